package bgp

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// plan is the part of a state that a speaker needs.
type plan struct {
	id       identity
	peers    map[netip.Addr]neighbour
	routes   map[netip.Addr]attributes   // by VIP
	only     map[netip.Addr][]netip.Addr // peers that receive the route to a VIP, sorted; a VIP that is not in it: all
	cordoned bool                        // routers move to other gateways before routes are withdrawn
}

// identity is shared by all sessions of a speaker. A change restarts all of them.
type identity struct {
	asn      uint32
	routerID netip.Addr
}

// neighbour is a peer. A difference in any field but bfd needs a new session.
type neighbour struct {
	asn      uint32
	port     uint16 // 0: 179
	password string
	hold     time.Duration
	hops     uint8         // packets from farther away are dropped; 0: none are
	most     uint32        // routes of a family that it may send
	restart  time.Duration // graceful restart; 0: none
	bfd      desired.BFD   // zero: none
}

// attributes are the path attributes by which routers choose routes.
type attributes struct {
	med, localPreference *uint32
	bandwidth            linkBandwidth // zero: none
	standard             []uint32
	large                []largeCommunity
}

func (a attributes) equal(b attributes) bool {
	return equal(a.med, b.med) && equal(a.localPreference, b.localPreference) && a.bandwidth == b.bandwidth &&
		slices.Equal(a.standard, b.standard) && slices.Equal(a.large, b.large)
}

func equal(a, b *uint32) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// linkBandwidth is an extended community of draft-ietf-idr-link-bandwidth.
type linkBandwidth struct {
	asn   uint16
	bytes float32 // a second
}

// newLinkBandwidth returns the community for Mbit/s. It has room for an AS number of two octets; AS_TRANS (RFC 6793) stands for others.
func newLinkBandwidth(asn, mbits uint32) linkBandwidth {
	if mbits == 0 {
		return linkBandwidth{}
	}
	if asn > math.MaxUint16 {
		asn = asTrans
	}
	return linkBandwidth{uint16(asn), float32(mbits) * 1e6 / 8}
}

// asTrans stands for AS numbers of four octets where two have room.
const asTrans = 23456

// defaultHold is the hold time of peers without one.
const defaultHold = 9 * time.Second

// defaultMost is the number of routes of a family that a peer may send without MaxPrefixes.
const defaultMost = 10_000

// newPlan returns the plan of a state, nil if the state has no BGP, or everything that is wrong with it.
func newPlan(s *desired.State) (*plan, error) {
	if s == nil || s.BGP == nil {
		return nil, nil
	}
	p := &plan{
		id:    identity{asn: s.BGP.ASN, routerID: s.BGP.RouterID},
		peers: map[netip.Addr]neighbour{}, routes: map[netip.Addr]attributes{}, only: map[netip.Addr][]netip.Addr{}, cordoned: s.Cordoned,
	}
	attrs := attributes{med: s.BGP.MED, localPreference: s.BGP.LocalPreference, bandwidth: newLinkBandwidth(s.BGP.ASN, s.BGP.LinkBandwidth)}
	var faults desired.Faults
	if s.BGP.RouterID.IsUnspecified() {
		faults = append(faults, desired.Fault{Component: desired.ComponentBGP, Field: "bgp.routerID", Message: fmt.Sprintf("%s is not a router id: use an address of the gateway", s.BGP.RouterID)})
	}
	for i, text := range s.BGP.Communities {
		if err := attrs.addCommunity(text); err != nil {
			faults = append(faults, desired.Fault{Component: desired.ComponentBGP, Field: fmt.Sprintf("bgp.communities[%d]", i), Message: err.Error()})
		}
	}
	for i, have := range s.BGP.Peers {
		if _, twice := p.peers[have.Addr]; twice {
			faults = append(faults, desired.Fault{Component: desired.ComponentBGP, Field: fmt.Sprintf("bgp.peers[%d].addr", i), Message: fmt.Sprintf("%s appears twice", have.Addr)})
		}
		n := neighbour{
			asn: have.ASN, port: have.Port, password: have.Password,
			hold: cmp.Or(time.Duration(have.HoldTime)*time.Second, defaultHold),
			hops: have.TTLSecurity, most: cmp.Or(have.MaxPrefixes, defaultMost),
			restart: time.Duration(s.BGP.GracefulRestart) * time.Second,
		}
		if have.BFD != nil {
			n.bfd = *have.BFD
		}
		p.peers[have.Addr] = n
	}
	for i := range s.VIPs {
		v := &s.VIPs[i]
		if v.Announce != desired.ByBGP || !v.Serves() || s.Cordoned {
			continue
		}
		if err := p.addRoute(v, attrs); err != nil {
			faults = append(faults, desired.Fault{Component: desired.ComponentBGP, Field: fmt.Sprintf("vips[%d].route.communities", i), Services: v.Services(), Message: err.Error()})
		}
	}
	if len(faults) > 0 {
		return nil, faults
	}
	return p, nil
}

// addRoute adds the route to a VIP, with the gateway's attributes where it has none of its own.
func (p *plan) addRoute(v *desired.VIP, attrs attributes) error {
	if r := v.Route; r != nil {
		attrs.med, attrs.localPreference = cmp.Or(r.MED, attrs.med), cmp.Or(r.LocalPreference, attrs.localPreference)
		if len(r.Communities) > 0 {
			attrs.standard, attrs.large = nil, nil
		}
		for _, text := range r.Communities {
			if err := attrs.addCommunity(text); err != nil {
				return err
			}
		}
		if len(r.Peers) > 0 {
			p.only[v.Addr] = slices.SortedFunc(slices.Values(r.Peers), netip.Addr.Compare)
		}
	}
	p.routes[v.Addr] = attrs
	return nil
}

// receives reports whether a peer receives the route to a VIP, if there is one.
func (p *plan) receives(peer, vip netip.Addr) bool {
	only, has := p.only[vip]
	return !has || slices.Contains(only, peer)
}

// sameSession reports whether a session with a also serves b.
func sameSession(a, b neighbour) bool {
	a.bfd, b.bfd = noBFD, noBFD
	return a == b
}

// clone returns an independent copy.
func (p *plan) clone() *plan {
	if p == nil {
		return nil
	}
	q := *p
	q.peers, q.routes, q.only = maps.Clone(p.peers), maps.Clone(p.routes), maps.Clone(p.only)
	return &q
}
