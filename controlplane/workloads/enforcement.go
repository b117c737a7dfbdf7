package workloads

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
)

// Enforcer applies rules to the servers of one project.
type Enforcer interface {
	// Apply gives each server in plan.Of the rules of its group and no others, and returns all other servers in plan.Known to what
	// they had before. cluster is the one that plan.Groups are for; what other clusters apply stays. refused has the reasons, by the ID of
	// the server, why one could not get its rules; it keeps what it had. It is not called concurrently. After an error it is
	// called again, and finishes what is left.
	Apply(ctx context.Context, cluster string, plan rules.Plan) (refused map[string]string, err error)
}

// enforcement applies the latest plan to one cloud, when it changes and periodically.
type enforcement struct {
	settings CloudSettings
	enforcer Enforcer
	wake     signal.Signal
	changed  func()
	log      *slog.Logger

	mu      sync.Mutex
	cluster string
	plan    *rules.Plan // nil until it is known
	refused map[string]string
	err     error
}

// set sets the plan of a cluster.
func (e *enforcement) set(cluster string, plan rules.Plan) {
	plan.Faults = nil
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.plan == nil || !reflect.DeepEqual(*e.plan, plan) {
		e.cluster, e.plan = cluster, &plan
		e.wake.Notify()
	}
}

// wanted returns the latest plan, nil if there is none yet.
func (e *enforcement) wanted() (cluster string, plan *rules.Plan) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cluster, e.plan
}

// result returns the result of the last attempt.
func (e *enforcement) result() (refused map[string]string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refused, e.err
}

// run applies plans until ctx ends.
func (e *enforcement) run(ctx context.Context) {
	tick := time.NewTicker(e.settings.Interval.Duration)
	defer tick.Stop()
	var told lastError
	for {
		if cluster, plan := e.wanted(); plan != nil {
			refused, err := e.enforcer.Apply(ctx, cluster, *plan)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				err = fmt.Errorf("apply policies to servers: %w", err)
			}
			e.mu.Lock()
			same := reflect.DeepEqual(e.refused, refused) && fmt.Sprint(e.err) == fmt.Sprint(err)
			e.refused, e.err = refused, err
			e.mu.Unlock()
			if !same {
				e.changed()
			}
			if told.differs(err) {
				e.log.Warn("policies cannot be applied to the servers of a cloud; their rules stay as they are", "cloud", e.settings.Name, "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-e.wake.C():
		case <-tick.C:
		}
	}
}

// enforce plans the rules of the servers of all clouds whose settings ask for it, and returns the problems of servers and those of
// policies. machines are those of all sources. A cloud that has not answered yet keeps its rules.
func (c *Controller) enforce(ctx context.Context, machines []machine, unread map[source]bool) (problems []problem, faults []string, err error) {
	if len(c.enforcements) == 0 {
		return nil, nil, nil
	}
	policies, err := c.policies(ctx)
	if err != nil {
		return nil, nil, err
	}
	if c.cluster == "" {
		ns := &corev1.Namespace{}
		if err := c.client.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns); err != nil {
			return nil, nil, fmt.Errorf("read namespace %s, whose uid identifies the cluster: %w", metav1.NamespaceSystem, err)
		}
		c.cluster = string(ns.UID)
	}
	var errs []error
	faulty := map[string]string{} // the faults of now
	for _, e := range c.enforcements {
		from := source{cloud: e.settings.Name}
		if e.settings.SecurityGroups == SecurityGroupsRelease {
			e.set(c.cluster, rules.Plan{})
		} else if !unread[from] {
			plan := rules.Build(c.cluster, policies, ofSource(machines, from))
			plan.Known = c.knownOf(from)
			e.set(c.cluster, plan)
			for _, f := range plan.Faults {
				faults = append(faults, fmt.Sprintf("networkpolicy %s/%s: %s", f.Policy.Namespace, f.Policy.Name, f.Text))
				key := e.settings.Name + "/" + string(f.Policy.UID)
				if faulty[key] = f.Text; c.faulty[key] == f.Text {
					continue
				}
				errs = append(errs, c.warnPolicy(ctx, f))
			}
		}
		refused, _ := e.result()
		for _, m := range machines {
			if reason, ok := refused[m.id]; ok && m.source == from {
				problems = append(problems, problem{m, reason})
			}
		}
	}
	c.faulty = faulty
	return problems, faults, errors.Join(errs...)
}

// knownOf returns the resources of a source that were listed and understood. Nova, for example, leaves out servers of a cell that does not
// answer: these keep their rules.
func (c *Controller) knownOf(from source) map[string]bool {
	for _, f := range c.pollers {
		if f.source == from {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.known
		}
	}
	return map[string]bool{}
}

// policies returns the cluster's NetworkPolicies.
func (c *Controller) policies(ctx context.Context) (all []*networkingv1.NetworkPolicy, err error) {
	var list networkingv1.NetworkPolicyList
	if err := c.cache.List(ctx, &list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}
	return all, nil
}

// ofSource returns the machines of a source as policies see them.
func ofSource(machines []machine, from source) (all []rules.Machine) {
	for _, m := range machines {
		if m.source != from {
			continue
		}
		of := rules.Machine{ID: m.id, Namespace: m.service.Namespace, Labels: m.labels}
		for _, p := range m.ports {
			of.Ports = append(of.Ports, rules.Port{Name: p.name, Protocol: p.protocol, Number: p.target})
		}
		all = append(all, of)
	}
	return all
}

// warnPolicy records an event on a policy that has a fault.
func (c *Controller) warnPolicy(ctx context.Context, f rules.Fault) error {
	err := c.client.Create(ctx, &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: f.Policy.Namespace, GenerateName: f.Policy.Name + ".machines-"},
		Regarding: corev1.ObjectReference{
			APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "NetworkPolicy", Namespace: f.Policy.Namespace, Name: f.Policy.Name, UID: f.Policy.UID,
		},
		Type: corev1.EventTypeWarning, Reason: "NotForMachines", Action: "ApplyToMachines", Note: f.Text[:min(len(f.Text), 1024)],
		EventTime: metav1.NowMicro(), ReportingController: v1alpha1.ManagedByMachines, ReportingInstance: name,
	})
	if err != nil && !apierrors.IsForbidden(err) { // a namespace that ends takes no events
		return fmt.Errorf("write an event on networkpolicy %s/%s: %w", f.Policy.Namespace, f.Policy.Name, err)
	}
	return nil
}
