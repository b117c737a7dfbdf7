package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/probes"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// Decision is what the controller decides about one Service. The worker's own functions make it, so it cannot differ from what
// the controller does with the same objects.
type Decision struct {
	Service *corev1.Service
	// NotTaken says why the gateways do not handle the Service, "" if they do. The rest is then what it still has.
	NotTaken string
	// Refused is the first reason why it does not get what it asks for, nil for none, and without settings. It keeps what it
	// has.
	Refused error
	// Edit is what edited settings would take from it, "" for nothing.
	Edit string
	// Pool is the pool that it has or would get, "" for none, and Pools has a verdict for each.
	Pool  string
	Group string
	Pools []PoolVerdict
	// Has is whether it has addresses. Addresses are those that clients use, and VIPs what gateways get of it.
	Has       bool
	Addresses []netip.Addr
	VIPs      []desired.VIP
	Ports     []PortVerdict
	// Fault says what is wrong with its backends, "" for nothing.
	Fault    string
	Gateways []GatewayVerdict // of its group, by name
}

// PoolVerdict says whether a Service gets addresses of a pool.
type PoolVerdict struct {
	Pool   string
	Chosen bool
	Reason string
}

// PortVerdict says why a port of a Service is not served, "" if it is.
type PortVerdict struct {
	portmap.L4

	NotServed string
}

// GatewayVerdict is what the controller decides about a Service and a gateway.
type GatewayVerdict struct {
	Node *v1alpha1.GatewayNode
	// Refused says why the gateway does not get the Service, "" if it gets it.
	Refused string
}

// ErrNoService means that a cluster has no Service of a name.
var ErrNoService = errors.New("the cluster has no such Service")

// Decide returns what the controller decides about a Service, from the objects of its cluster alone: it writes nothing, asks
// nothing of OpenStack, gateways or nodes, and takes the ports in Neutron that Services record. Settings are nil if they are
// unknown: pools are then those that Services record. For managedBy see Config.
func Decide(ctx context.Context, of client.Client, settings *Settings, managedBy []string, name types.NamespacedName) (Decision, error) {
	w, all, err := reader(ctx, of, settings, managedBy)
	if err != nil {
		return Decision{}, err
	}
	i := slices.IndexFunc(all, func(s corev1.Service) bool { return nameOf(&s) == name })
	if i < 0 {
		return Decision{}, fmt.Errorf("%w: %s", ErrNoService, name)
	}
	s := &all[i]
	d := Decision{Service: s, NotTaken: w.notTaken(s)}
	if s.DeletionTimestamp != nil {
		d.NotTaken = "it is being deleted"
	}
	if d.NotTaken != "" && !managed(s) {
		return d, nil
	}
	want, err := w.read(s)
	if settings != nil { // otherwise a valid pool would be unknown
		d.Refused, d.Edit = err, w.pendingEdit(s)
	}
	if settings != nil && err == nil && d.NotTaken == "" {
		if err := w.decidePool(ctx, s, want, &d); err != nil {
			return Decision{}, err
		}
	}
	m := w.services[s.UID]
	d.Ports = w.decidePorts(s, want, m)
	if m == nil {
		return d, nil
	}
	pool := w.settings.pool(m.port.Pool)
	d.Has, d.Pool, d.Group, d.Addresses = true, pool.Name, pool.Group, m.port.external(m.families(pool))
	return d, w.decideGateways(ctx, m, pool, &d)
}

// reader returns a worker that only reads, with the allocations of all Services, and the Services.
func reader(ctx context.Context, of client.Client, settings *Settings, managedBy []string) (*worker, []corev1.Service, error) {
	var all corev1.ServiceList
	if err := of.List(ctx, &all); err != nil {
		return nil, nil, fmt.Errorf("list services: %w", err)
	}
	var nodes v1alpha1.GatewayNodeList
	if err := of.List(ctx, &nodes); err != nil {
		return nil, nil, fmt.Errorf("list gateway nodes: %w", err)
	}
	ended, end := context.WithCancel(ctx)
	end() // it probes no node
	w := &worker{managedBy: managedBy, client: of, live: of, probes: probes.New(ended, probes.Config{}), log: slog.New(slog.DiscardHandler)}
	if settings != nil {
		w.configured = *settings
	}
	w.init()
	w.sources = []*cloudPorts{w.network, w.failover} // unread, so Services' records count
	w.secrets = map[string]string{}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		w.givenTo(n)
		if n.Spec.BGP == nil {
			continue
		}
		for _, p := range n.Spec.BGP.Peers {
			w.secrets[p.PasswordSecret] = "unread"
		}
	}
	ours := slices.DeleteFunc(slices.Clone(all.Items), func(s corev1.Service) bool { return !managed(&s) && !w.takes(&s) })
	return w, all.Items, w.restore(ctx, ours)
}

// decidePool sets the pools of a decision, and the reason if the Service gets no address of them.
func (w *worker) decidePool(ctx context.Context, s *corev1.Service, want service.Want, d *Decision) error {
	var has port
	if m := w.services[s.UID]; m != nil {
		has = m.port
	}
	pool, families, want, err := w.place(ctx, s, want, has)
	if pool != nil {
		d.Pool, d.Group = pool.Name, pool.Group
	}
	switch _, wrong := errors.AsType[invalid](err); {
	case err != nil && !wrong:
		return err
	case err != nil:
		d.Refused = err
	case w.pools[pool.Name] == nil:
		_, d.Refused = w.choosePort(s, want, pool, families)
	case has.ID == "": // the port is Neutron's to give
		d.Refused = w.checkQuota(s, request{Pool: pool, Families: families}, port{})
	}
	_, named := s.Annotations[service.AnnotationPool]
	for i := range w.settings.Pools {
		p := &w.settings.Pools[i]
		selected, err := w.selects(ctx, p, s)
		if err != nil {
			return err
		}
		v := PoolVerdict{Pool: p.Name, Chosen: p == pool}
		switch {
		case has.Pool == p.Name:
			v.Reason = "the Service has addresses of it"
		case p.removed:
			v.Reason = "the settings no longer have it"
		case !selected:
			v.Reason = "it does not select the Service, by the labels of its namespace or its own"
		case has.Pool != "":
			v.Reason = "the Service keeps what it has of pool " + has.Pool
		case named && want.Pool == p.Name:
			v.Reason = "the annotation " + service.AnnotationPool + " names it"
		case named:
			v.Reason = "the annotation " + service.AnnotationPool + " names pool " + want.Pool
		case v.Chosen:
			v.Reason = "the first one that selects the Service"
		default:
			v.Reason = "pool " + d.Pool + " selects the Service and comes first"
		}
		d.Pools = append(d.Pools, v)
	}
	return nil
}

// decidePorts returns the verdict of each port.
func (w *worker) decidePorts(s *corev1.Service, want service.Want, m *mapped) (all []PortVerdict) {
	for _, l := range want.L4 {
		v := PortVerdict{L4: l}
		if m == nil {
			v.NotServed = "the Service has no address"
		} else if !slices.Contains(m.want.L4, l) {
			v.NotServed = "the controller has not added it yet"
			one := want
			one.L4 = []portmap.L4{l}
			if w.allocations.Collision(w.claim(s, one, m.port)) != nil {
				v.NotServed = "another Service has this port of the address"
			}
		}
		all = append(all, v)
	}
	for _, l := range want.Unserved {
		all = append(all, PortVerdict{l, "gateways balance TCP and UDP"})
	}
	return all
}

// decideGateways sets what the gateways of its group get of a Service with addresses.
func (w *worker) decideGateways(ctx context.Context, m *mapped, pool *Pool, d *Decision) error {
	plans, err := w.plans(ctx)
	if err != nil {
		return err
	}
	e, err := w.readEndpoints(ctx)
	if err != nil {
		return err
	}
	m.fault = e.importFault(m)
	if only := []*mapped{m}; pool.FailoverIP == nil {
		d.VIPs = vips(&w.settings, only, e, pool.Group)
	} else if at := m.port.Floating.Fixed; at.IsValid() {
		d.VIPs = failoverVIPs(&w.settings, only, e, pool.Group, at)
	}
	d.Fault = m.fault.message
	for _, p := range plans {
		if group(p.node) != pool.Group {
			continue
		}
		v := GatewayVerdict{Node: p.node}
		if p.err != nil {
			v.Refused = p.err.Error()
		}
		for _, f := range p.faults {
			if slices.Contains(f.Services, m.name.String()) {
				v.Refused = f.Message
			}
		}
		d.Gateways = append(d.Gateways, v)
	}
	return nil
}

// PoolOf returns the pool of a Service's addresses as its status records it, "" for none.
func PoolOf(s *corev1.Service) string {
	r, _ := readRecord(s)
	return r.Pool
}
