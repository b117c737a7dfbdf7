package controller

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/gateway/controller/internal/probes"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// endpoints are the possible destinations of packets.
type endpoints struct {
	services map[types.NamespacedName][]*discoveryv1.EndpointSlice
	imports  map[types.NamespacedName][]*discoveryv1.EndpointSlice
	// foreign has the first slice, by name, of each ServiceImport that other controllers wrote.
	foreign map[types.NamespacedName]*discoveryv1.EndpointSlice
	nodes   []*corev1.Node
	// answers are the results of health check probes of nodes, and wantedProbes the probes needed now.
	answers      map[netip.AddrPort]probes.Answer
	wantedProbes map[netip.AddrPort]bool
}

// readEndpoints reads all EndpointSlices and Nodes.
func (w *worker) readEndpoints(ctx context.Context) (*endpoints, error) {
	var slices discoveryv1.EndpointSliceList
	if err := w.client.List(ctx, &slices); err != nil {
		return nil, fmt.Errorf("list endpoint slices: %w", err)
	}
	var nodes corev1.NodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	e := &endpoints{
		services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{}, imports: map[types.NamespacedName][]*discoveryv1.EndpointSlice{},
		foreign: map[types.NamespacedName]*discoveryv1.EndpointSlice{},
		answers: w.probes.Answers(), wantedProbes: map[netip.AddrPort]bool{},
	}
	for i := range slices.Items {
		e.add(&slices.Items[i], w.managedBy)
	}
	for i := range nodes.Items {
		e.nodes = append(e.nodes, &nodes.Items[i])
	}
	return e, nil
}

// add adds a slice to its Service, and to its ServiceImport if one of the controllers managedBy wrote it; empty: any.
func (e *endpoints) add(s *discoveryv1.EndpointSlice, managedBy []string) {
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		key := types.NamespacedName{Namespace: s.Namespace, Name: name}
		e.services[key] = append(e.services[key], s)
	}
	name := s.Labels[mcsv1beta1.LabelServiceName]
	if name == "" {
		return
	}
	key := types.NamespacedName{Namespace: s.Namespace, Name: name}
	if len(managedBy) == 0 || slices.Contains(managedBy, s.Labels[discoveryv1.LabelManagedBy]) {
		e.imports[key] = append(e.imports[key], s)
	} else if first := e.foreign[key]; first == nil || s.Name < first.Name {
		e.foreign[key] = s
	}
}

// backends returns the backends of a Service port, in one family.
func (e *endpoints) backends(m *mapped, p corev1.ServicePort, f corev1.IPFamily) []desired.Backend {
	of := e.services[m.name]
	if m.want.Import != "" {
		of = e.imported(m)
		p.Name, _ = importPort(of, m.ports, p)
	}
	pods := podBackends(of, p, f, m.leaveOut)
	if m.want.Backends != service.NodePorts {
		return merge(pods)
	}
	return merge(e.nodeBackends(m, p, f, pods))
}

// imported returns the slices of the ServiceImport that a Service names.
func (e *endpoints) imported(m *mapped) []*discoveryv1.EndpointSlice {
	return e.imports[types.NamespacedName{Namespace: m.name.Namespace, Name: m.want.Import}]
}

// importPort returns the name of a Service port in the slices of an import. It is the same name, or the only port of the
// import if the Service has a single port as well. It reports false when no port matches.
func importPort(of []*discoveryv1.EndpointSlice, others []corev1.ServicePort, p corev1.ServicePort) (name string, ok bool) {
	all := slicePorts(of)
	single := len(all) == 1 && len(others) == 1 && all[0].protocol == protocolOf(p)
	switch {
	case len(all) == 0, slices.Contains(all, slicePort{p.Name, protocolOf(p)}):
		return p.Name, true
	case single:
		return all[0].name, true
	}
	return p.Name, false
}

// slicePort identifies a port of EndpointSlices.
type slicePort struct {
	name     string
	protocol corev1.Protocol
}

// String formats a port for messages.
func (p slicePort) String() string { return fmt.Sprintf("%q (%s)", p.name, p.protocol) }

// slicePorts returns the ports of all slices, sorted and without duplicates.
func slicePorts(of []*discoveryv1.EndpointSlice) (all []slicePort) {
	for _, s := range of {
		for _, p := range s.Ports {
			if p.Port != nil {
				all = append(all, slicePort{deref(p.Name), cmp.Or(deref(p.Protocol), corev1.ProtocolTCP)})
			}
		}
	}
	slices.SortFunc(all, func(a, b slicePort) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.protocol, b.protocol))
	})
	return slices.Compact(all)
}

func protocolOf(p corev1.ServicePort) corev1.Protocol { return cmp.Or(p.Protocol, corev1.ProtocolTCP) }

// importFault returns why a Service lacks backends of its import; zero for no fault.
func (e *endpoints) importFault(m *mapped) verdict {
	foreign := e.foreign[types.NamespacedName{Namespace: m.name.Namespace, Name: m.want.Import}]
	if foreign != nil && len(e.imported(m)) == 0 {
		return verdict{service.ReasonForeignSlices, fmt.Sprintf("the annotation %s: no controller of Isthmus wrote the EndpointSlices of ServiceImport %s, such as %s (managed by %q); delete them, or set --imports=any of isthmus-gateway-controller",
			service.AnnotationServiceImport, m.want.Import, foreign.Name, foreign.Labels[discoveryv1.LabelManagedBy])}
	}
	if text := e.missingPorts(m); text != "" {
		return verdict{service.ReasonNoSuchPort, text}
	}
	return verdict{}
}

// missingPorts describes the ports of a Service that its import does not have, "" for none.
func (e *endpoints) missingPorts(m *mapped) string {
	if m.want.Import == "" {
		return ""
	}
	of := e.imported(m)
	var none []string
	for _, p := range m.ports {
		if _, ok := importPort(of, m.ports, p); !ok {
			none = append(none, slicePort{p.Name, protocolOf(p)}.String())
		}
	}
	if len(none) == 0 {
		return ""
	}
	return fmt.Sprintf("spec.ports: ServiceImport %s has no %s, but %s; give the Service's ports the names of the import", m.want.Import, strings.Join(none, ", "), list(slicePorts(of)))
}

func list[T fmt.Stringer](all []T) string { return joined(all, ", ") }

func joined[T fmt.Stringer](all []T, separator string) string {
	texts := make([]string, len(all))
	for i, v := range all {
		texts[i] = v.String()
	}
	return strings.Join(texts, separator)
}

// pod is an endpoint as a backend, with its node.
type pod struct {
	desired.Backend
	node    string
	serving bool
}

// leaveOut records an endpoint that no packet can be sent to. Of several it keeps the first text, which stays the same.
func (m *mapped) leaveOut(s *discoveryv1.EndpointSlice, format string, args ...any) {
	text := fmt.Sprintf("EndpointSlice %s: %s; gateways send nothing there", s.Name, fmt.Sprintf(format, args...))
	if m.fault.reason == "" || m.fault.reason == service.ReasonInvalidEndpoint && text < m.fault.message {
		m.fault = verdict{service.ReasonInvalidEndpoint, text}
	}
}

// podBackends returns the endpoints of slices, and calls leaveOut for those that are invalid. Terminating ones keep their
// connections and get no new ones, unless all serving endpoints are terminating (KEP-1669).
func podBackends(all []*discoveryv1.EndpointSlice, p corev1.ServicePort, f corev1.IPFamily, leaveOut func(*discoveryv1.EndpointSlice, string, ...any)) (pods []pod) {
	for _, s := range all {
		if string(s.AddressType) != string(f) {
			continue
		}
		for _, sp := range s.Ports {
			if deref(sp.Name) != p.Name || sp.Port == nil || cmp.Or(deref(sp.Protocol), corev1.ProtocolTCP) != protocolOf(p) {
				continue
			}
			if *sp.Port < 1 || *sp.Port > math.MaxUint16 {
				leaveOut(s, "port %q is %d", p.Name, *sp.Port)
				continue
			}
			for i := range s.Endpoints {
				pods = append(pods, podsOf(&s.Endpoints[i], uint16(*sp.Port), f, func(addr string) {
					leaveOut(s, "address %q of an endpoint is not one of %s that gateways can route to", addr, f)
				})...)
			}
		}
	}
	if !slices.ContainsFunc(pods, func(p pod) bool { return !p.Draining }) {
		for i := range pods {
			pods[i].Draining = !pods[i].serving
		}
	}
	return pods
}

// podsOf returns the backends of an endpoint: none if it is neither ready nor terminating. It calls leaveOut for invalid
// addresses.
func podsOf(e *discoveryv1.Endpoint, port uint16, f corev1.IPFamily, leaveOut func(addr string)) (pods []pod) {
	c := e.Conditions
	ready := c.Ready == nil || *c.Ready
	serving := c.Serving != nil && *c.Serving || c.Serving == nil && ready
	terminating := c.Terminating != nil && *c.Terminating
	if !ready && !terminating {
		return nil
	}
	for _, text := range e.Addresses {
		addr, err := netip.ParseAddr(text)
		if err != nil || !desired.Routable(addr) || familyOf(addr) != f {
			leaveOut(text)
			continue
		}
		pods = append(pods, pod{
			Backend: desired.Backend{Addr: addr, Port: port, Weight: 1, Draining: terminating},
			node:    deref(e.NodeName), serving: serving,
		})
	}
	return pods
}

// nodeBackends returns the nodes' addresses at a Service's node port. With externalTrafficPolicy Local, only nodes with
// endpoints for new connections count, weighted by their number. A node whose health check port reports none, or does not
// answer, gets no new connections while another node's reports some.
func (e *endpoints) nodeBackends(m *mapped, p corev1.ServicePort, f corev1.IPFamily, pods []pod) (all []pod) {
	if p.NodePort == 0 {
		return nil
	}
	here := map[string]int{}
	for _, pod := range pods {
		if !pod.Draining {
			here[pod.node]++
		}
	}
	serving, out := false, []int{}
	for _, n := range e.usable() {
		weight := uint16(1)
		if m.want.Local {
			weight = uint16(min(here[n.Name], math.MaxUint16))
		}
		addr, ok := internalIP(n, f)
		if weight == 0 || !ok {
			continue
		}
		if m.want.HealthCheckPort != 0 {
			at := netip.AddrPortFrom(addr, m.want.HealthCheckPort)
			e.wantedProbes[at] = true
			switch e.answers[at] {
			case probes.Serving:
				serving = serving || !leaving(n)
			case probes.Refusing, probes.Silent:
				out = append(out, len(all))
			case probes.Unknown:
			}
		}
		all = append(all, pod{Backend: desired.Backend{Addr: addr, Port: uint16(p.NodePort), Weight: weight, Draining: leaving(n)}, serving: true})
	}
	if serving { // otherwise the controller cannot reach the nodes, or every node is about to leave
		for _, i := range out {
			all[i].Draining = true
		}
	}
	return all
}

// usable returns the ready nodes, or all if none is ready: then the API server hears from no node.
func (e *endpoints) usable() []*corev1.Node {
	allowed := slices.DeleteFunc(slices.Clone(e.nodes), func(n *corev1.Node) bool {
		_, excluded := n.Labels[corev1.LabelNodeExcludeBalancers]
		return excluded
	})
	ready := slices.DeleteFunc(slices.Clone(allowed), func(n *corev1.Node) bool {
		return !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
	})
	if len(ready) == 0 {
		return allowed
	}
	return ready
}

// taintToBeDeleted marks nodes that the cluster autoscaler is about to remove.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

func leaving(n *corev1.Node) bool {
	return n.DeletionTimestamp != nil || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taintToBeDeleted })
}

func internalIP(n *corev1.Node, f corev1.IPFamily) (netip.Addr, bool) {
	for _, a := range n.Status.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err == nil && a.Type == corev1.NodeInternalIP && familyOf(addr) == f && desired.Routable(addr) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

// merge sorts backends by address and port. Of duplicates it keeps one that accepts new connections.
func merge(pods []pod) []desired.Backend {
	all := make([]desired.Backend, 0, len(pods))
	for _, p := range pods {
		all = append(all, p.Backend)
	}
	slices.SortStableFunc(all, func(a, b desired.Backend) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port), cmp.Compare(order(a), order(b)))
	})
	return slices.CompactFunc(all, func(a, b desired.Backend) bool { return a.Addr == b.Addr && a.Port == b.Port })
}

func order(b desired.Backend) int {
	if b.Draining {
		return 1
	}
	return 0
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
