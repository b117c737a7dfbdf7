package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// agentDaemonSet returns the DaemonSet of the agents, or nil if there is none. Two are an error: either could be the one of this
// installation.
func (c *collector) agentDaemonSet(ctx context.Context) (*appsv1.DaemonSet, error) {
	selector, err := labels.Parse(status.AgentSelector)
	if err != nil {
		return nil, err
	}
	all := &appsv1.DaemonSetList{}
	if err := c.client.List(ctx, all, client.InNamespace(c.namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("list DaemonSets in namespace %s: %w", c.namespace, err)
	}
	return membership.OnlyOne(all.Items, "DaemonSet", c.namespace, status.AgentSelector)
}

// agentPods lists the agents of the named nodes, or of all nodes if none is named, sorted by node.
func (c *collector) agentPods(ctx context.Context, nodes []string) ([]corev1.Pod, error) {
	d, err := c.agentDaemonSet(ctx)
	if err != nil {
		return nil, err
	}
	if d == nil {
		return nil, fmt.Errorf("namespace %s has no DaemonSet with the label %s; install Isthmus, see helm install, or give its namespace with --namespace",
			c.namespace, status.AgentSelector)
	}
	pods, err := c.podsOf(ctx, d.Spec.Selector)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(pods, func(a, b corev1.Pod) int { return strings.Compare(a.Spec.NodeName, b.Spec.NodeName) })
	for _, n := range nodes {
		if !slices.ContainsFunc(pods, func(p corev1.Pod) bool { return p.Spec.NodeName == n }) {
			var known []string
			for _, p := range pods {
				known = append(known, p.Spec.NodeName)
			}
			return nil, fmt.Errorf("no agent runs on node %q; agents run on %s", n, list(known))
		}
	}
	if len(nodes) > 0 {
		pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool { return !slices.Contains(nodes, p.Spec.NodeName) })
	}
	if len(pods) == 0 {
		return nil, fmt.Errorf("DaemonSet %s has no pods; see isthmusctl status", client.ObjectKeyFromObject(d))
	}
	return pods, nil
}

// observerToken returns the token that agents and controllers require for their status and for introspection. It creates one for
// all requests of a command.
func (c *collector) observerToken(ctx context.Context) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.tokenMade) < tokenLife/2 {
		return c.token, nil
	}
	token, err := c.createToken(ctx)
	if err != nil {
		return "", err
	}
	c.token, c.tokenMade = token, time.Now()
	return token, nil
}

// tokenLife is the lifetime of an observer's token, the minimum of the API server.
const tokenLife = 10 * time.Minute

func (c *collector) createToken(ctx context.Context) (string, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: status.ObserverAccount}}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		Audiences: []string{status.TokenAudience, status.ControllerAudience}, ExpirationSeconds: new(int64),
	}}
	*request.Spec.ExpirationSeconds = int64(tokenLife.Seconds())
	err := c.client.SubResource("token").Create(ctx, account, request)
	if apierrors.IsNotFound(err) {
		return "", fmt.Errorf("ServiceAccount %s/%s does not exist; upgrade Isthmus, see helm upgrade, or give its namespace with --namespace", c.namespace, status.ObserverAccount)
	}
	if err != nil {
		return "", fmt.Errorf("create a token of ServiceAccount %s/%s: %w", c.namespace, status.ObserverAccount, err)
	}
	return request.Status.Token, nil
}

// withToken adds a path, the observer token and parameters to a request to an agent.
func withToken(token, path string, params map[string]string) func(*rest.Request) *rest.Request {
	return func(r *rest.Request) *rest.Request {
		r = r.Suffix(path).SetHeader(status.TokenHeader, token)
		for k, v := range params {
			if v != "" {
				r = r.Param(k, v)
			}
		}
		return r
	}
}
