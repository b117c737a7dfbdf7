package mcs

import (
	"encoding/json"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Packed is a compact form of an EndpointSlice of the broker. It is immutable.
type Packed struct {
	Name    string
	Owner   clusterset.ClusterID
	Service clusterset.ServiceName
	Digest  Digest    // of the original slice
	Created time.Time // by the broker

	Omitted []Omission // the parts of the original slice that no imported slice may have

	addresses unique.Handle[string] // the address type
	changed   int64                 // ChangedAt in nanoseconds since 1970; 0 if unknown
	ports     unique.Handle[string] // as JSON
	regions   clusterset.Regions    // of zones of endpoints
	endpoints []packedEndpoint
	stub      *stub // not nil: the slice has neither ports nor endpoints here
}

// stub describes the content that a Packed omits.
type stub struct{ endpoints, bytes int }

// packedEndpoint encodes booleans as 0 unset, 1 false, 2 true.
type packedEndpoint struct {
	address           netip.Addr
	hostname          string                // or, when isPod, the name of the pod
	node, zone        unique.Handle[string] // "\x00" is unset
	hints             *discoveryv1.EndpointHints
	ready, serving, t uint8
	isPod             bool
}

const unset = "\x00"

// Pack packs a slice of the broker. It keeps the first address of each endpoint, the only one that the API defines, and
// drops endpoints without a valid one. It trusts no field: it omits ports beyond MaxPorts, names of hosts, pods, nodes and zones
// that Kubernetes would not accept, and regions of zones without an endpoint.
func Pack(es *discoveryv1.EndpointSlice) *Packed {
	name, _ := ServiceOf(es)
	p := &Packed{
		Name:      strings.Clone(es.Name),
		Owner:     clusterset.ClusterID(Share(string(OwnerOf(es)))),
		Service:   clusterset.ServiceName{Namespace: Share(name.Namespace), Name: Share(name.Name)},
		Digest:    SliceDigest(es),
		Created:   es.CreationTimestamp.UTC(),
		addresses: unique.Make(string(es.AddressType)),
		endpoints: make([]packedEndpoint, 0, len(es.Endpoints)),
	}
	if t, ok := ChangedAt(es); ok {
		p.changed = t.UnixNano()
	}
	vet := sliceVetter{}
	p.ports = unique.Make(formatPorts(vet.ports(es.Ports)))
	for i := range es.Endpoints {
		e := &es.Endpoints[i]
		if len(e.Addresses) == 0 {
			continue
		}
		a, err := netip.ParseAddr(e.Addresses[0])
		if err != nil {
			continue
		}
		name, isPod := vet.name("endpoints.hostname", deref(e.Hostname), isHostname), false
		if pod := podOf(e); pod != "" {
			name, isPod = vet.name("endpoints.targetRef.name", pod, isSubdomain), true
		}
		p.endpoints = append(p.endpoints, packedEndpoint{
			address: a, hostname: strings.Clone(name), isPod: isPod && name != "",
			node: handle(vet.optional("endpoints.nodeName", e.NodeName, isSubdomain)), zone: handle(vet.optional("endpoints.zone", e.Zone, isLabelValue)),
			hints: vet.hints(e.Hints),
			ready: packBool(e.Conditions.Ready), serving: packBool(e.Conditions.Serving), t: packBool(e.Conditions.Terminating),
		})
	}
	if stated := vet.regions(es.Annotations[v1alpha1.AnnotationRegions]); len(stated) > 0 {
		p.regions = regionsIn(p.zones(), func(zone string) string { return stated[zone] })
	}
	p.Omitted = vet.omitted
	return p
}

// sliceVetter omits the invalid parts of endpoints, and reports one omission for each field.
type sliceVetter struct{ omitted omissions }

func (v *sliceVetter) omit(field, value string) {
	if !slices.ContainsFunc(v.omitted, func(o Omission) bool { return o.Field == field }) {
		v.omitted.add(field, "%q is not valid", shorten(value))
	}
}

// ports returns the first MaxPorts of ports that have a number, or may have any.
func (v *sliceVetter) ports(ports []discoveryv1.EndpointPort) []discoveryv1.EndpointPort {
	if n := len(ports); n > MaxPorts {
		v.omitted.add("ports", "%d entries of at most %d", n, MaxPorts)
		ports = ports[:MaxPorts]
	}
	wrong := func(p discoveryv1.EndpointPort) bool { return p.Port != nil && (*p.Port < 1 || *p.Port > 65535) }
	if !slices.ContainsFunc(ports, wrong) {
		return ports
	}
	v.omit("ports.port", "not in 1..65535")
	return slices.DeleteFunc(slices.Clone(ports), wrong)
}

// isHostname reports whether s can be the hostname of a pod.
func isHostname(s string) bool { return clusterset.IsLabel(s, maxLabel) }

// name returns a name that is valid; "" for another.
func (v *sliceVetter) name(field, name string, valid func(string) bool) string {
	if name == "" || valid(name) {
		return name
	}
	v.omit(field, name)
	return ""
}

// optional returns a name that is nil or valid; nil for another.
func (v *sliceVetter) optional(field string, name *string, valid func(string) bool) *string {
	if name == nil || valid(*name) {
		return name
	}
	v.omit(field, *name)
	return nil
}

// maxHints is how many zones, and nodes, Kubernetes allows in the hints of an endpoint.
const maxHints = 8

// hints returns hints that are nil or valid; nil for others.
func (v *sliceVetter) hints(hints *discoveryv1.EndpointHints) *discoveryv1.EndpointHints {
	if hints == nil {
		return nil
	}
	valid := len(hints.ForZones) <= maxHints && len(hints.ForNodes) <= maxHints &&
		!slices.ContainsFunc(hints.ForZones, func(z discoveryv1.ForZone) bool { return !isLabelValue(z.Name) }) &&
		!slices.ContainsFunc(hints.ForNodes, func(n discoveryv1.ForNode) bool { return !isSubdomain(n.Name) })
	if valid {
		return hints
	}
	v.omit("endpoints.hints", fmt.Sprintf("%d zones, %d nodes", len(hints.ForZones), len(hints.ForNodes)))
	return nil
}

// Empty reports whether the slice has no endpoints.
func (p *Packed) Empty() bool { return p.Len() == 0 }

// Len returns how many endpoints the slice has.
func (p *Packed) Len() int {
	if p.stub != nil {
		return p.stub.endpoints
	}
	return len(p.endpoints)
}

// zones returns the zones of the endpoints, "" for those without one.
func (p *Packed) zones() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range p.endpoints {
			zone := p.endpoints[i].zone.Value()
			if zone == unset {
				zone = ""
			}
			if !yield(zone) {
				return
			}
		}
	}
}

// Bytes returns the size of the slice's ports, regions and hints.
func (p *Packed) Bytes() int {
	if p.stub != nil {
		return p.stub.bytes
	}
	n := len(p.ports.Value()) + len(p.regions.String())
	for i := range p.endpoints {
		hints := p.endpoints[i].hints
		if hints == nil {
			continue
		}
		for _, z := range hints.ForZones {
			n += len(z.Name)
		}
		for _, node := range hints.ForNodes {
			n += len(node.Name)
		}
	}
	return n
}

// Stub returns p without its endpoints and ports. It takes little memory, and Len and Bytes still describe the slice.
func (p *Packed) Stub() *Packed {
	s := *p
	s.stub = &stub{p.Len(), p.Bytes()}
	s.ports, s.regions, s.endpoints, s.Omitted = unique.Make("[]"), clusterset.Regions{}, nil, nil
	return &s
}

// IsStub reports whether p lacks the endpoints and ports of its slice.
func (p *Packed) IsStub() bool { return p.stub != nil }

// ChangedAt returns the beginning of the slice's change, on its member's clock, and whether it is known.
func (p *Packed) ChangedAt() (time.Time, bool) { return time.Unix(0, p.changed), p.changed != 0 }

// Unpack returns the slice as an object of the broker, without a namespace. The caller owns it.
func (p *Packed) Unpack() *discoveryv1.EndpointSlice {
	es := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: p.Name, Labels: withManagedBy(ownerLabels(p.Owner, p.Service))},
		AddressType: discoveryv1.AddressType(p.addresses.Value()),
		Endpoints:   make([]discoveryv1.Endpoint, 0, len(p.endpoints)),
	}
	if t, ok := p.ChangedAt(); ok {
		SetChangedAt(es, t)
	}
	writeRegions(es, p.regions)
	if err := json.Unmarshal([]byte(p.ports.Value()), &es.Ports); err != nil {
		panic(fmt.Sprintf("mcs: decode ports of slice %s: %v", p.Name, err)) // Pack encoded them
	}
	for i := range p.endpoints {
		e := &p.endpoints[i]
		out := discoveryv1.Endpoint{
			Addresses: []string{e.address.String()}, NodeName: unhandle(e.node), Zone: unhandle(e.zone), Hints: e.hints.DeepCopy(),
			Conditions: discoveryv1.EndpointConditions{Ready: unpackBool(e.ready), Serving: unpackBool(e.serving), Terminating: unpackBool(e.t)},
		}
		switch {
		case e.isPod:
			out.TargetRef = &corev1.ObjectReference{Kind: kindPod, Name: e.hostname}
		case e.hostname != "":
			out.Hostname = new(e.hostname)
		}
		es.Endpoints = append(es.Endpoints, out)
	}
	return es
}

// TCP returns the TCP address of the first ready endpoint, and whether there is one.
func (p *Packed) TCP() (netip.AddrPort, bool) {
	es := p.Unpack()
	port := slices.IndexFunc(es.Ports, func(q discoveryv1.EndpointPort) bool { return q.Port != nil && *q.Protocol == "TCP" })
	i := slices.IndexFunc(p.endpoints, func(e packedEndpoint) bool { return e.ready != packBool(&no) })
	if port < 0 || i < 0 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(p.endpoints[i].address, uint16(*es.Ports[port].Port)), true
}

// Share returns the shared copy of s.
func Share(s string) string { return unique.Make(s).Value() }

func handle(s *string) unique.Handle[string] {
	if s == nil {
		return unique.Make(unset)
	}
	return unique.Make(*s)
}

func unhandle(h unique.Handle[string]) *string {
	if s := h.Value(); s != unset {
		return &s
	}
	return nil
}

func packBool(b *bool) uint8 {
	switch {
	case b == nil:
		return 0
	case *b:
		return 2
	default:
		return 1
	}
}

func unpackBool(b uint8) *bool {
	switch b {
	case 1:
		return &no
	case 2:
		return &yes
	default:
		return nil
	}
}
