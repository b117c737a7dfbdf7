package mcs

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Packed is a compact form of an EndpointSlice of the broker. It is immutable.
type Packed struct {
	Name    string
	Owner   clusterset.ClusterID
	Service clusterset.ServiceName
	Digest  Digest // of the original slice

	addresses unique.Handle[string] // the address type
	changed   int64                 // ChangedAt in nanoseconds since 1970; 0 if unknown
	ports     unique.Handle[string] // as JSON
	endpoints []packedEndpoint
}

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
// drops endpoints without a valid one.
func Pack(es *discoveryv1.EndpointSlice) *Packed {
	name, _ := ServiceOf(es)
	p := &Packed{
		Name:      strings.Clone(es.Name),
		Owner:     clusterset.ClusterID(Share(string(OwnerOf(es)))),
		Service:   clusterset.ServiceName{Namespace: Share(name.Namespace), Name: Share(name.Name)},
		Digest:    SliceDigest(es),
		addresses: unique.Make(string(es.AddressType)),
		ports:     unique.Make(formatPorts(es.Ports)),
		endpoints: make([]packedEndpoint, 0, len(es.Endpoints)),
	}
	if t, ok := ChangedAt(es); ok {
		p.changed = t.UnixNano()
	}
	for i := range es.Endpoints {
		e := &es.Endpoints[i]
		if len(e.Addresses) == 0 {
			continue
		}
		a, err := netip.ParseAddr(e.Addresses[0])
		if err != nil {
			continue
		}
		name, isPod := deref(e.Hostname), false
		if pod := podOf(e); pod != "" {
			name, isPod = pod, true
		}
		p.endpoints = append(p.endpoints, packedEndpoint{
			address: a, hostname: strings.Clone(name), isPod: isPod, node: handle(e.NodeName), zone: handle(e.Zone), hints: e.Hints,
			ready: packBool(e.Conditions.Ready), serving: packBool(e.Conditions.Serving), t: packBool(e.Conditions.Terminating),
		})
	}
	return p
}

// Empty reports whether the slice has no endpoints.
func (p *Packed) Empty() bool { return len(p.endpoints) == 0 }

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
