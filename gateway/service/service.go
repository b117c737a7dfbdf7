// Package service reads what a Service of type LoadBalancer asks of the gateways, and reports what is not possible.
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
	// AnnotationManaged is "true" on Services that the controller manages. The controller writes it. A user who writes
	// "false" keeps the controller away.
	AnnotationManaged = "gateway.isthmus.dev/managed"
	// AnnotationPort is the id of the L2 port of the Service. The controller writes it.
	AnnotationPort = "gateway.isthmus.dev/port"
	// AnnotationAddresses asks for addresses: at most one of each family, separated by a comma. It wins over
	// spec.loadBalancerIP.
	AnnotationAddresses = "gateway.isthmus.dev/addresses"
	// AnnotationAgree agrees to what edited settings would take from the Service. Its value is in the condition Mapped.
	AnnotationAgree = "gateway.isthmus.dev/agree"
	// AnnotationSharing is a key with which Services of several namespaces share addresses: all of them have the same key.
	AnnotationSharing = "gateway.isthmus.dev/allow-shared-ip"
	// AnnotationFloatingIP is "none", "allocate", or the id or the address of a floating IP of the project. The
	// controller's settings have the default.
	AnnotationFloatingIP = "gateway.isthmus.dev/floating-ip"
	// AnnotationFloatingIPAfterwards is "delete" (the default) or "retain": what happens to an allocated floating IP that
	// no Service needs any more. One that a user named is always retained.
	AnnotationFloatingIPAfterwards = "gateway.isthmus.dev/floating-ip-afterwards"
	// AnnotationPool names a pool of the controller. The default is the first one.
	AnnotationPool = "gateway.isthmus.dev/pool"
	// AnnotationBackends is "pods" or "nodeports": the destination of packets. The controller's settings have the
	// default.
	AnnotationBackends = "gateway.isthmus.dev/backends"
	// AnnotationExternalIPs is "true" if the addresses are also written to spec.externalIPs.
	AnnotationExternalIPs = "gateway.isthmus.dev/external-ips"
	// AnnotationOwnExternalIPs lists the spec.externalIPs that the controller added. All others belong to the user.
	AnnotationOwnExternalIPs = "gateway.isthmus.dev/own-external-ips"
	// AnnotationServiceImport names a ServiceImport in the Service's namespace. Its endpoints in all clusters are the
	// backends; the Service has no selector. Ports match by name, or if both have a single port.
	AnnotationServiceImport = "isthmus.dev/service-import"
)

// Finalizer keeps a Service until its addresses are released.
const Finalizer = "gateway.isthmus.dev/addresses"

// Conditions in a Service's status and their reasons.
const (
	// ConditionMapped is True while the Service has addresses.
	ConditionMapped = "gateway.isthmus.dev/Mapped"
	ReasonMapped    = "Mapped"
	// ReasonInvalid: the Service asks for something impossible. It keeps what it has.
	ReasonInvalid = "Invalid"
	// ReasonQuotaExceeded: the quota of ports or floating IPs, or the addresses of the pool, are exhausted.
	ReasonQuotaExceeded = "QuotaExceeded"
	// ReasonWithdrawing: the address was freed, and a gateway has not confirmed yet that it no longer serves it.
	ReasonWithdrawing = "Withdrawing"
	// ReasonPending: OpenStack has not answered yet.
	ReasonPending = "CloudPending"
	// ReasonCloud: Neutron refuses a request, or does not answer.
	ReasonCloud = "CloudFailed"

	// ConditionAllocated records the port of a Service and the settings that it had it from: the controller reads it while
	// OpenStack is away, and after the settings were edited.
	ConditionAllocated = "gateway.isthmus.dev/Allocated"
	ReasonAllocated    = "Allocated"

	// ConditionApplied is True while gateways have applied the Service.
	ConditionApplied = "gateway.isthmus.dev/Applied"
	ReasonApplied    = "Applied"
	// ReasonRefused: a gateway could not apply it.
	ReasonRefused = "Refused"
	// ReasonNoSuchPort: gateways have applied it, but its ServiceImport has no port of that name.
	ReasonNoSuchPort = "NoSuchPort"
	// ReasonForeignSlices: gateways have applied it, but no controller of Isthmus wrote the slices of its ServiceImport.
	ReasonForeignSlices = "ForeignSlices"
	// ReasonInvalidEndpoint: gateways have applied it, but without an endpoint that no packet can be sent to.
	ReasonInvalidEndpoint = "InvalidEndpoint"
	// ReasonNoGateway: no gateway in the group of the Service's pool has applied it.
	ReasonNoGateway = "NoGateway"
)

// ErrorUnservedProtocol is the error of a port in a Service's status whose protocol gateways do not balance.
const ErrorUnservedProtocol = "gateway.isthmus.dev/ProtocolNotServed"

// Backends is the destination of packets.
type Backends string

// The kinds of backends.
const (
	Pods      Backends = "pods"
	NodePorts Backends = "nodeports"
)

// FloatingIP is the floating IP that a Service wants.
type FloatingIP struct {
	// Allocate asks for a new one, and Use names one by id or address. Neither: none.
	Allocate bool
	Use      string
	// Retain keeps an allocated one when it is no longer needed.
	Retain bool
}

// Config holds the defaults of Services.
type Config struct {
	// Default includes Services without a class.
	Default bool
	// Pools are the names of the pools, the default one first.
	Pools    []string
	Floating FloatingIP
	Backends Backends
}

// Want is what a Service asks for.
type Want struct {
	L4 []portmap.L4
	// Unserved are its ports of other protocols.
	Unserved []portmap.L4
	Families []corev1.IPFamily // one or two, in order of preference
	Floating FloatingIP
	// Addresses are those that it asks for, at most one of each family, and AddressesField names the field that does.
	Addresses      []netip.Addr
	AddressesField string
	// Sharing is the key with which Services of other namespaces may share its address, "" for none.
	Sharing  string
	Pool     string
	Backends Backends
	// ExternalIPs asks for the addresses in spec.externalIPs as well.
	ExternalIPs bool
	// Import is the ServiceImport whose endpoints are the backends, "" for the Service's own endpoints.
	Import string
	// Sources are the networks of allowed clients; empty: all clients.
	Sources []netip.Prefix
	// Local sends packets only to nodes with endpoints (externalTrafficPolicy: Local).
	Local bool
	// HealthCheckPort is the node port that tells whether a node has endpoints, 0 for none.
	HealthCheckPort uint16
	// Affinity is the timeout of session affinity in seconds, 0 for none.
	Affinity int32
}

// Takes reports whether the gateways handle a Service: it is of type LoadBalancer and of our class, and the user does not
// keep the controller away.
func (c Config) Takes(s *corev1.Service) bool { return c.NotTaken(s) == "" }

// NotTaken says why the gateways do not handle a Service, with the fix; "" if they do.
func (c Config) NotTaken(s *corev1.Service) string {
	switch class := s.Spec.LoadBalancerClass; {
	case s.Spec.Type != corev1.ServiceTypeLoadBalancer:
		return fmt.Sprintf("spec.type is %s; gateways serve those of type LoadBalancer", s.Spec.Type)
	case s.Annotations[AnnotationManaged] == "false":
		return fmt.Sprintf("the annotation %s is \"false\"; remove it", AnnotationManaged)
	case class == nil && !c.Default:
		return fmt.Sprintf("it has no spec.loadBalancerClass; create it with %s, or set defaultClass in the settings", Class)
	case class != nil && *class != Class:
		return fmt.Sprintf("spec.loadBalancerClass is %s; create it with %s", *class, Class)
	}
	return ""
}

// Read returns what a Service asks for, if Takes accepts it. The error joins everything that is wrong, each part with the
// field and the fix.
func (c Config) Read(s *corev1.Service) (Want, error) {
	r := reader{annotations: s.Annotations}
	w := Want{
		Floating: r.floating(c.Floating),
		Sharing:  s.Annotations[AnnotationSharing],
		Pool:     r.choice(AnnotationPool, c.Pools...),
		Backends: Backends(r.choice(AnnotationBackends, Preferred(string(c.Backends), string(Pods), string(NodePorts))...)),
		Import:   s.Annotations[AnnotationServiceImport],
		Families: s.Spec.IPFamilies,
		Local:    s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
	}
	if _, asks := s.Annotations[AnnotationFloatingIP]; asks && (w.Floating.Allocate || w.Floating.Use != "") && len(w.Families) > 0 && !slices.Contains(w.Families, corev1.IPv4Protocol) {
		r.wrong("annotation %s asks for a floating IP, which is IPv4, and spec.ipFamilies is IPv6 alone; add IPv4 there, or set the annotation to \"none\"", AnnotationFloatingIP)
	}
	w.AddressesField, w.Addresses = r.addresses(s)
	w.ExternalIPs = r.choice(AnnotationExternalIPs, "false", "true") == "true"
	for _, p := range s.Spec.Ports {
		l4 := portmap.L4{Protocol: string(p.Protocol), Port: uint16(p.Port)}
		if p.Protocol != corev1.ProtocolTCP && p.Protocol != corev1.ProtocolUDP {
			w.Unserved = append(w.Unserved, l4)
			continue
		}
		w.L4 = append(w.L4, l4)
		if w.Backends == NodePorts && p.NodePort == 0 {
			r.wrong("spec.ports[%s] has no node port, which %s=%s needs; set spec.allocateLoadBalancerNodePorts to true", p.Name, AnnotationBackends, NodePorts)
		}
	}
	if len(w.L4) == 0 && len(w.Unserved) > 0 {
		r.wrong("spec.ports: gateways balance TCP and UDP, and the Service has only %s", w.Unserved)
	}
	slices.SortFunc(w.L4, portmap.L4.Compare)
	slices.SortFunc(w.Unserved, portmap.L4.Compare)
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
			r.wrong("the annotation %s needs %s=%s: node ports of other clusters are not reachable", AnnotationServiceImport, AnnotationBackends, Pods)
		}
	}
	return w, errors.Join(r.errs...)
}

// reader collects errors about annotations.
type reader struct {
	annotations map[string]string
	errs        []error
}

func (r *reader) wrong(format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf(format, args...))
}

// choice returns the value of an annotation, which must be one of the given values; the first is the default.
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

// Preferred returns all with first, if it is among them, moved to the front.
func Preferred(first string, all ...string) []string {
	rest := slices.DeleteFunc(slices.Clone(all), func(s string) bool { return s == first })
	if len(rest) == len(all) {
		return all
	}
	return append([]string{first}, rest...)
}

// addresses reads the addresses that a Service asks for, and the name of the field if it asks for any.
func (r *reader) addresses(s *corev1.Service) (field string, all []netip.Addr) {
	field, text := "spec.loadBalancerIP", s.Spec.LoadBalancerIP
	if value, ok := r.annotations[AnnotationAddresses]; ok {
		field, text = "annotation "+AnnotationAddresses, value
	}
	if text == "" {
		return "", nil
	}
	for one := range strings.SplitSeq(text, ",") {
		addr, err := netip.ParseAddr(strings.TrimSpace(one))
		addr = addr.Unmap()
		family := corev1.IPv6Protocol
		if addr.Is4() {
			family = corev1.IPv4Protocol
		}
		switch {
		case err != nil || addr.Zone() != "":
			r.wrong("%s: %q is not an IP address such as 192.0.2.17", field, one)
		case slices.ContainsFunc(all, func(a netip.Addr) bool { return a.Is4() == addr.Is4() }):
			r.wrong("%s has two %s addresses; name one of each family at most", field, family)
		case len(s.Spec.IPFamilies) > 0 && !slices.Contains(s.Spec.IPFamilies, family):
			r.wrong("%s: %s is %s, which spec.ipFamilies lacks; add it there", field, addr, family)
		default:
			all = append(all, addr)
		}
	}
	return field, all
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
				r.wrong("annotation %s is %s; floating IPs are IPv4 only; IPv6 addresses are announced without one", AnnotationFloatingIP, addr)
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
