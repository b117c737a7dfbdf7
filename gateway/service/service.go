// Package service reads what a Service of type LoadBalancer asks of the gateways, and tells what cannot be had.
package service

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/portmap"
)

// Class is the loadBalancerClass of Services for the gateways.
const Class = "isthmus.dev/gateway"

// Annotations of Services.
const (
	// AnnotationManaged is "true" on Services that the controller has taken over. It writes it; a user who writes "false"
	// keeps the controller away.
	AnnotationManaged = "gateway.isthmus.dev/managed"
	// AnnotationPort is the id of the Neutron port whose addresses the Service has. The controller writes it.
	AnnotationPort = "gateway.isthmus.dev/port"
	// AnnotationFloatingIP is "none", "allocate", or the id or the address of a floating IP of the project. Without it the
	// controller's default counts.
	AnnotationFloatingIP = "gateway.isthmus.dev/floating-ip"
	// AnnotationFloatingIPAfterwards is "delete" or "retain": what becomes of an allocated floating IP when no Service
	// needs it any more. The default is "delete". One that a user named is always retained.
	AnnotationFloatingIPAfterwards = "gateway.isthmus.dev/floating-ip-afterwards"
	// AnnotationPool names one of the controller's pools of addresses. Without it the first one counts.
	AnnotationPool = "gateway.isthmus.dev/pool"
	// AnnotationBackends is "pods" or "nodeports": where gateways send packets. Without it the controller's default counts.
	AnnotationBackends = "gateway.isthmus.dev/backends"
	// AnnotationExternalIPs is "true" where the addresses are to stand in spec.externalIPs as well.
	AnnotationExternalIPs = "gateway.isthmus.dev/external-ips"
	// AnnotationOwnExternalIPs lists those of spec.externalIPs that the controller put there. All others are the user's.
	AnnotationOwnExternalIPs = "gateway.isthmus.dev/own-external-ips"
	// AnnotationServiceImport names a ServiceImport of the Service's namespace, whose endpoints in all clusters are the
	// backends. The Service has no selector then. Ports are those of the same name; where both have one port it is that one.
	AnnotationServiceImport = "isthmus.dev/service-import"
)

// Finalizer keeps a Service until its addresses are given back.
const Finalizer = "gateway.isthmus.dev/addresses"

// The conditions of a Service's status and their reasons.
const (
	// ConditionMapped is True while the Service has addresses.
	ConditionMapped = "gateway.isthmus.dev/Mapped"
	ReasonMapped    = "Mapped"
	// ReasonInvalid: the Service asks for what cannot be had. It keeps what it has.
	ReasonInvalid = "Invalid"
	// ReasonQuotaExceeded: the project may have no more ports or floating IPs, or the pool no more addresses.
	ReasonQuotaExceeded = "QuotaExceeded"
	// ReasonCloud: Neutron does not do, or does not answer, what it is asked.
	ReasonCloud = "CloudFailed"

	// ConditionApplied is True while gateways have the Service as it is.
	ConditionApplied = "gateway.isthmus.dev/Applied"
	ReasonApplied    = "Applied"
	// ReasonRefused: a gateway could not apply it.
	ReasonRefused = "Refused"
	// ReasonNoSuchPort: gateways have it, but the ServiceImport that it names has none of its ports' names.
	ReasonNoSuchPort = "NoSuchPort"
	// ReasonNoGateway: no gateway of the group of the Service's pool has it.
	ReasonNoGateway = "NoGateway"
)

// Backends is where gateways send packets.
type Backends string

// The kinds of backends.
const (
	Pods      Backends = "pods"
	NodePorts Backends = "nodeports"
)

// FloatingIP is what a Service wants of floating IPs.
type FloatingIP struct {
	// Allocate asks for one that nobody else has; Use for a certain one, by its id or address. Neither: none.
	Allocate bool
	Use      string
	// Retain keeps an allocated one when it is not needed any more.
	Retain bool
}

// Config is what counts for Services that do not say otherwise.
type Config struct {
	// Default takes Services without a class as well.
	Default bool
	// Pools are the names of pools of addresses, the default one first.
	Pools    []string
	Floating FloatingIP
	Backends Backends
}

// Want is what a Service asks for.
type Want struct {
	L4       []portmap.L4
	Families []corev1.IPFamily // one or two, the first one preferred
	Floating FloatingIP
	Pool     string
	Backends Backends
	// ExternalIPs asks for the addresses in spec.externalIPs.
	ExternalIPs bool
	// Import is the ServiceImport whose endpoints are the backends, "" for the Service's own.
	Import string
	// Sources are who may connect; none: everybody.
	Sources []netip.Prefix
	// Local sends packets only to gateways' own or named nodes' endpoints (externalTrafficPolicy: Local).
	Local bool
	// HealthCheckPort is the node port that tells which nodes have endpoints, 0 for none.
	HealthCheckPort uint16
	// Affinity is for how many seconds a client stays with its backend, 0 for none.
	Affinity int32
}

// Takes reports whether a Service is for the gateways at all: of type LoadBalancer, of our class, and not kept away.
func (c Config) Takes(s *corev1.Service) bool {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer || s.Annotations[AnnotationManaged] == "false" {
		return false
	}
	if s.Spec.LoadBalancerClass == nil {
		return c.Default
	}
	return *s.Spec.LoadBalancerClass == Class
}

// Read returns what a Service that Takes takes asks for. The error joins all that is wrong with it; each part names the
// field and the fix.
func (c Config) Read(s *corev1.Service) (Want, error) {
	r := reader{annotations: s.Annotations}
	w := Want{
		Floating: r.floating(c.Floating),
		Pool:     r.choice(AnnotationPool, c.Pools...),
		Backends: Backends(r.choice(AnnotationBackends, preferred(string(c.Backends), string(Pods), string(NodePorts))...)),
		Import:   s.Annotations[AnnotationServiceImport],
		Families: s.Spec.IPFamilies,
		Local:    s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
	}
	if _, asks := s.Annotations[AnnotationFloatingIP]; asks && (w.Floating.Allocate || w.Floating.Use != "") && len(w.Families) > 0 && !slices.Contains(w.Families, corev1.IPv4Protocol) {
		r.wrong("annotation %s asks for a floating IP, which is IPv4, and spec.ipFamilies is IPv6 alone; add IPv4 there, or set the annotation to \"none\"", AnnotationFloatingIP)
	}
	w.ExternalIPs = r.choice(AnnotationExternalIPs, "false", "true") == "true"
	for _, p := range s.Spec.Ports {
		if p.Protocol != corev1.ProtocolTCP && p.Protocol != corev1.ProtocolUDP {
			r.wrong("spec.ports[%s].protocol %s is not balanced by gateways; use TCP or UDP", p.Name, p.Protocol)
			continue
		}
		w.L4 = append(w.L4, portmap.L4{Protocol: string(p.Protocol), Port: uint16(p.Port)})
		if w.Backends == NodePorts && p.NodePort == 0 {
			r.wrong("spec.ports[%s] has no node port, which %s=%s needs; set spec.allocateLoadBalancerNodePorts to true", p.Name, AnnotationBackends, NodePorts)
		}
	}
	slices.SortFunc(w.L4, portmap.L4.Compare)
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			r.wrong("spec.loadBalancerSourceRanges: %q is not a CIDR such as 192.0.2.0/24", text)
			continue
		}
		w.Sources = append(w.Sources, p.Masked())
	}
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		w.Affinity = corev1.DefaultClientIPServiceAffinitySeconds
		if cfg := s.Spec.SessionAffinityConfig; cfg != nil && cfg.ClientIP != nil && cfg.ClientIP.TimeoutSeconds != nil {
			w.Affinity = *cfg.ClientIP.TimeoutSeconds
		}
	}
	if w.Local {
		w.HealthCheckPort = uint16(s.Spec.HealthCheckNodePort)
	}
	if w.Import != "" {
		if len(s.Spec.Selector) > 0 {
			r.wrong("spec.selector and the annotation %s name two sets of backends; remove one of them", AnnotationServiceImport)
		}
		if w.Backends == NodePorts {
			r.wrong("the annotation %s needs %s=%s: other clusters' node ports do not lead to their pods for us", AnnotationServiceImport, AnnotationBackends, Pods)
		}
	}
	return w, errors.Join(r.errs...)
}

// reader collects what is wrong with annotations.
type reader struct {
	annotations map[string]string
	errs        []error
}

func (r *reader) wrong(format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf(format, args...))
}

// choice returns an annotation's value, which must be one of some, the first when there is none.
func (r *reader) choice(name string, of ...string) string {
	value, ok := r.annotations[name]
	switch {
	case !ok && len(of) > 0:
		return of[0]
	case !ok:
		return ""
	case !slices.Contains(of, value):
		quoted := make([]string, len(of))
		for i, v := range of {
			quoted[i] = fmt.Sprintf("%q", v)
		}
		r.wrong("annotation %s is %q; it can be %s", name, value, strings.Join(quoted, " or "))
	}
	return value
}

// preferred returns all, with one of them first.
func preferred(first string, all ...string) []string {
	rest := slices.DeleteFunc(slices.Clone(all), func(s string) bool { return s == first })
	if len(rest) == len(all) {
		return all
	}
	return append([]string{first}, rest...)
}

// floating reads the annotations about floating IPs.
func (r *reader) floating(byDefault FloatingIP) FloatingIP {
	f := byDefault
	if value, ok := r.annotations[AnnotationFloatingIP]; ok {
		f = FloatingIP{Retain: byDefault.Retain}
		switch value {
		case "none":
		case "allocate":
			f.Allocate = true
		case "":
			r.wrong("annotation %s is empty; it can be \"none\", \"allocate\", or the id or the address of a floating IP", AnnotationFloatingIP)
		default:
			if addr, err := netip.ParseAddr(value); err == nil && !addr.Is4() {
				r.wrong("annotation %s is %s; floating IPs are IPv4 only, IPv6 addresses are announced as they are", AnnotationFloatingIP, addr)
			}
			f.Use, f.Retain = value, true
		}
	}
	if _, ok := r.annotations[AnnotationFloatingIPAfterwards]; ok {
		retain := r.choice(AnnotationFloatingIPAfterwards, "delete", "retain") == "retain"
		if f.Use != "" && !retain {
			r.wrong("annotation %s is \"delete\", but %s was not allocated for this Service; only a user may delete it", AnnotationFloatingIPAfterwards, f.Use)
			return f
		}
		f.Retain = retain
	}
	return f
}
