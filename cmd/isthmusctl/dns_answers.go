package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
)

// answered is the result of a query by a node's agent for clusterset.local to one server of the cluster's DNS.
type answered struct {
	Node    string `json:"node"`
	Server  string `json:"server"`
	Answers bool   `json:"answers"`
	Reason  string `json:"reason,omitempty"` // the cause of a missing answer
}

// questions returns the servers that each agent queries: those that the pods of its node query, and servers that pods
// reach only through a Service. It assumes that the Corefiles are installed.
func (c *collector) questions(ctx context.Context, configs []*loadedConfig, upstreams []string) (pods []corev1.Pod, servers map[string][]string, err error) {
	if pods, err = c.agentPods(ctx, nil); err != nil {
		return nil, nil, err
	}
	servers = map[string][]string{}
	onNode := map[string]bool{}
	first := pods[0].Spec.NodeName
	for _, s := range configs {
		st, err := s.parts.stub(upstreams)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", s, err)
		}
		running, err := s.servers(ctx, c.client)
		if err != nil {
			return nil, nil, err
		}
		if len(running) == 0 {
			return nil, nil, fmt.Errorf("%s: no running pod mounts it; start %s, or name the right ConfigMap", s, s.name)
		}
		for _, pod := range running {
			asker := first
			if s.node {
				asker = pod.Spec.NodeName // every node has the same addresses
				onNode[asker] = true
			}
			servers[asker] = append(servers[asker], addressesOf(pod, st)...)
		}
	}
	if address := c.clusterDNS(ctx); address != "" {
		for _, pod := range pods {
			if node := pod.Spec.NodeName; !onNode[node] {
				servers[node] = append(servers[node], net.JoinHostPort(address, "53"))
			}
		}
	}
	for node := range servers {
		slices.Sort(servers[node])
		servers[node] = slices.Compact(servers[node])
	}
	return pods, servers, nil
}

// askAll queries the servers through the agents, and returns the results by node.
func (c *collector) askAll(ctx context.Context, pods []corev1.Pod, servers map[string][]string) ([]answered, error) {
	token, err := c.observerToken(ctx)
	if err != nil {
		return nil, err
	}
	said := make([][]answered, len(pods))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrent)
	for i, pod := range pods {
		group.Go(func() error {
			for some := range slices.Chunk(servers[pod.Spec.NodeName], status.MaxAsked) {
				said[i] = append(said[i], c.askFrom(ctx, token, pod, some)...)
			}
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return slices.Concat(said...), nil
}

// askFrom queries servers through one agent.
func (c *collector) askFrom(ctx context.Context, token string, pod corev1.Pod, servers []string) []answered {
	request := func(r *rest.Request) *rest.Request {
		r = r.Suffix(status.AskPath).SetHeader(status.TokenHeader, token)
		for _, s := range servers {
			r = r.Param("server", s)
		}
		return r
	}
	verdicts, err := fetch[[]status.ClusterDNS](ctx, c, pod, status.AgentPort, request)
	var all []answered
	for i, server := range servers {
		a := answered{Node: pod.Spec.NodeName, Server: server}
		switch {
		case err != nil:
			a.Reason = sentence(err)
		case i < len(*verdicts):
			a.Answers, a.Reason = (*verdicts)[i].Answers, (*verdicts)[i].Reason
		}
		all = append(all, a)
	}
	return all
}

// awaitReload queries the servers through the agents until pending names none that has to reload its Corefile, or until limit is over.
func (c *collector) awaitReload(ctx context.Context, progress io.Writer, configs []*loadedConfig, upstreams []string, limit time.Duration, pending func([]answered) string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not reloaded after %s", limit))
	defer cancel()
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	told := ""
	for {
		pods, servers, err := c.questions(ctx, configs, upstreams)
		var said []answered
		if err == nil {
			said, err = c.askAll(ctx, pods, servers)
		}
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case err == nil:
			waiting := pending(said)
			if waiting == "" {
				return nil
			}
			if waiting != told {
				told = waiting
				if _, err := fmt.Fprintf(progress, "waiting for the reload: %s\n", waiting); err != nil {
					return err
				}
			}
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			return fmt.Errorf("%w: %s; the Corefile stays as it is now; see isthmusctl dns status, and the log of the cluster's DNS about its Corefile", context.Cause(ctx), told)
		case <-tick.C:
		}
	}
}

// unanswering names the servers that do not answer, with the reason of the first, or "".
func unanswering(said []answered) string {
	var who []string
	reason := ""
	for _, a := range said {
		if a.Answers {
			continue
		}
		if len(who) == 0 {
			reason = a.Reason
		}
		who = append(who, a.where())
	}
	if len(who) == 0 {
		return ""
	}
	return fewOf(who) + ": " + reason
}

// answering names the servers that answer from the agents, or "".
func answering(said []answered) string {
	var who []string
	for _, a := range said {
		if a.Answers {
			who = append(who, a.where())
		}
	}
	if len(who) == 0 {
		return ""
	}
	return fewOf(who) + " still asks the agents"
}

func (a answered) where() string { return fmt.Sprintf("%s on %s", a.Server, a.Node) }
