package desired

import (
	"cmp"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// Components by which faults are grouped.
const (
	ComponentRequest  = "request"
	ComponentBalancer = "balancer"
	ComponentBGP      = string(ByBGP)
	ComponentVRRP     = string(ByVRRP)
)

// Fault is one thing that is wrong.
type Fault struct {
	Component string `json:"component"`
	// Field is the path into the state, such as "vips[3].frontends[0].port"; "" when the fault concerns no field.
	Field string `json:"field,omitempty"`
	// Services are the affected ones, as namespace/name; empty: all.
	Services []string `json:"services,omitempty"`
	Message  string   `json:"message"`
}

// Faults are an error grouped by component.
type Faults []Fault

func (f Faults) Error() string {
	lines := make([]string, len(f))
	for i, fault := range f {
		lines[i] = strings.TrimPrefix(fault.Component+": ", ComponentRequest+": ") + strings.TrimPrefix(fault.Field+": ", ": ") + fault.Message
	}
	return strings.Join(lines, "; ")
}

// Validate returns everything that is wrong with a state on its own, each fault with its field. A fault of a VIP names all
// its Services.
func (s *State) Validate() Faults {
	faults, _ := s.validate(nil)
	return faults
}

// validate is Validate. Of Services that claim the same port, it blames those that do not have it in have, else all but the
// first. broken are the indices of VIPs that cannot be served, whatever their frontends.
func (s *State) validate(have *State) (faults Faults, broken map[int]bool) {
	v := validator{}
	v.nonEmpty("cluster", s.Cluster)
	v.nonEmpty("group", s.Group)
	oneOf(&v, "balancer", s.Balancer, NFTables, EBPF)
	for i, m := range s.Peers {
		v.item("peers", i, nil, func(v *validator) {
			v.nonEmpty("name", m.Name)
			if u, err := url.Parse(m.URL); err != nil || u.Scheme != "https" || u.Host == "" {
				v.add("url", "is %q; it must be https://HOST:PORT", m.URL)
			}
			if m.Address.IsValid() {
				v.address("address", m.Address)
			}
			if m.OtherAddress.IsValid() && v.address("otherAddress", m.OtherAddress) && m.OtherAddress.Is4() == m.Address.Is4() {
				v.add("otherAddress", "%s is of the same family as address", m.OtherAddress)
			}
		})
	}
	v.slots(s)
	seen := map[netip.Addr]int{}
	broken = map[int]bool{}
	for i := range s.VIPs {
		vip := &s.VIPs[i]
		broken[i] = v.item("vips", i, vip.Services, func(v *validator) {
			if v.address("addr", vip.Addr) {
				if other, ok := seen[vip.Addr]; ok {
					v.add("addr", "%s is vips[%d] too", vip.Addr, other)
				} else {
					seen[vip.Addr] = i
				}
			}
			v.vip(s, vip)
		})
		v.item("vips", i, nil, func(v *validator) { v.frontends(vip, have) })
	}
	v.sizes(s)
	if s.BGP != nil {
		v.bgp(s.BGP)
	}
	if s.VRRP != nil {
		v.vrrp(s.VRRP)
	}
	return v.faults, broken
}

type validator struct{ faults Faults }

func (v *validator) add(field, format string, args ...any) {
	v.faults = append(v.faults, Fault{Component: ComponentRequest, Field: field, Message: fmt.Sprintf(format, args...)})
}

// item collects the faults of one element of a list, and reports whether there are any. check names fields relative to the
// element; the full path and the Services are determined only for faults, because there are thousands of elements.
func (v *validator) item(list string, i int, services func() []string, check func(*validator)) (found bool) {
	var own validator
	check(&own)
	for _, f := range own.faults {
		f.Field = strings.TrimSuffix(fmt.Sprintf("%s[%d].%s", list, i, f.Field), ".")
		if services != nil && f.Services == nil {
			f.Services = services()
		}
		v.faults = append(v.faults, f)
	}
	return len(own.faults) > 0
}

func (v *validator) nonEmpty(field, value string) {
	if value == "" {
		v.add(field, "is missing")
	}
}

func oneOf[T ~string](v *validator, field string, have T, of ...T) {
	if slices.Contains(of, have) {
		return
	}
	v.add(field, "is %q; it can be %s", string(have), OneOf(of...))
}

// OneOf lists the values that a field may have, for messages.
func OneOf[T ~string](of ...T) string {
	words := make([]string, len(of))
	for i, o := range of {
		words[i] = fmt.Sprintf("%q", string(o))
	}
	last := len(words) - 1
	return strings.TrimPrefix(strings.Join(words[:last], ", ")+" or "+words[last], " or ")
}

// Routable reports whether gateways can send packets to an address: a unicast address without a zone, not that of one link
// or machine, in its plain form.
func Routable(a netip.Addr) bool {
	return a.IsValid() && !a.Is4In6() && a.Zone() == "" && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast() &&
		a != broadcast
}

// RoutablePrefix reports whether all addresses of a network are Routable.
func RoutablePrefix(p netip.Prefix) bool {
	return !p.Addr().Is4In6() && !slices.ContainsFunc(unroutable, p.Overlaps)
}

// unroutable are the networks of the addresses that are not Routable.
var unroutable = func() (all []netip.Prefix) {
	for _, text := range []string{
		"0.0.0.0/32", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", "::/128", "::1/128", "fe80::/10", "ff00::/8", "::ffff:0:0/96",
	} {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}()

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// address reports whether packets can be routed to an address.
func (v *validator) address(field string, a netip.Addr) bool {
	switch {
	case !a.IsValid():
		v.add(field, "is missing")
	case !Routable(a):
		v.add(field, "%s is not an address that gateways can route to", a)
	default:
		return true
	}
	return false
}

func (v *validator) slots(s *State) {
	if n := len(s.Slots); n != 0 && n != SlotCount {
		v.add("slots", "are %d; there can be %d or none", n, SlotCount)
	}
	for i, slot := range s.Slots {
		v.item("slots", i, nil, func(v *validator) {
			v.gateway("owner", slot.Owner, s)
			v.gateway("previous", slot.Previous, s)
		})
	}
}

// gateway checks a number as Slot has it.
func (v *validator) gateway(field string, n int, s *State) {
	if n < 0 || n > len(s.Peers) {
		v.add(field, "is %d; it can be 0 for the gateway itself to %d for its last peer", n, len(s.Peers))
	}
}

func (v *validator) vip(s *State, vip *VIP) {
	oneOf(v, "announce", vip.Announce, Announces...)
	oneOf(v, "return", vip.Return, Routed, SNAT, Masquerade)
	switch {
	case vip.Announce == ByBGP && s.BGP == nil:
		v.add("announce", "is %q, but bgp is missing", ByBGP)
	case vip.Announce == ByVRRP && s.VRRP == nil:
		v.add("announce", "is %q, but vrrp is missing", ByVRRP)
	}
	if vip.Route != nil {
		v.route(vip.Announce, vip.Route)
	}
	if vip.RouterID != 0 && vip.Announce != ByVRRP {
		v.add("routerID", "is set, but announce is %q", vip.Announce)
	}
}

func (v *validator) route(announce Announce, r *Route) {
	if announce != ByBGP {
		v.add("route", "is set, but announce is %q", announce)
	}
	for i, p := range r.Peers {
		if !p.IsValid() {
			v.add(fmt.Sprintf("route.peers[%d]", i), "is missing")
		}
	}
	v.communities("route.communities", r.Communities)
}

func (v *validator) communities(field string, all []string) {
	for i, text := range all {
		if _, err := ParseCommunity(text); err != nil {
			v.add(fmt.Sprintf("%s[%d]", field, i), "%v", err)
		}
	}
}

func (v *validator) frontends(vip *VIP, have *State) {
	seen := map[l4]int{}
	for i := range vip.Frontends {
		f := &vip.Frontends[i]
		v.item("frontends", i, f.services, func(v *validator) { v.frontend(vip.Addr, f) })
		winner, loser := i, i
		if other, ok := seen[f.l4()]; ok {
			winner = other
			if have.owner(vip.Addr, f.l4()) == f.Service {
				winner, loser = i, other
			}
			v.item("frontends", loser, vip.Frontends[loser].services, func(v *validator) {
				v.add("port", "%s %d of %s already belongs to %s", f.Protocol, f.Port, vip.Addr, vip.Frontends[winner].Service)
			})
		}
		seen[f.l4()] = winner
	}
}

func (v *validator) frontend(vip netip.Addr, f *Frontend) {
	v.nonEmpty("service", f.Service)
	oneOf(v, "protocol", f.Protocol, "TCP", "UDP")
	if f.Port == 0 {
		v.add("port", "is missing")
	}
	if f.Affinity < 0 || f.Affinity > 86400 {
		v.add("affinity", "is %d; it can be 0 to 86400 seconds", f.Affinity)
	}
	for i, p := range f.Sources {
		if !p.IsValid() || p != p.Masked() {
			v.add(fmt.Sprintf("sources[%d]", i), "%s is not a network such as 192.0.2.0/24", p)
		}
	}
	v.backends(vip, f.Backends)
}

func (v *validator) backends(vip netip.Addr, all []Backend) {
	for i, b := range all {
		v.item("backends", i, nil, func(v *validator) {
			if v.address("addr", b.Addr) && b.Addr.Is4() != vip.Is4() {
				v.add("addr", "%s is of another family than %s", b.Addr, vip)
			}
			if b.Port == 0 {
				v.add("port", "is missing")
			}
			if b.Weight == 0 {
				v.add("weight", "is 0; a backend without new connections has draining set")
			}
			if i > 0 && b.compare(all[i-1]) == 0 {
				v.add("", "%s appears twice", netip.AddrPortFrom(b.Addr, b.Port))
			}
		})
	}
	if !slices.IsSortedFunc(all, Backend.compare) {
		v.add("backends", "are not sorted by address and port")
	}
}

func (b Backend) compare(o Backend) int {
	return cmp.Or(b.Addr.Compare(o.Addr), cmp.Compare(b.Port, o.Port))
}

func (v *validator) bgp(b *BGP) {
	if b.ASN == 0 {
		v.add("bgp.asn", "is missing")
	}
	if !b.RouterID.Is4() {
		v.add("bgp.routerID", "is not an IPv4 address")
	}
	if b.GracefulRestart > 4095 {
		v.add("bgp.gracefulRestart", "is %d; RFC 4724 allows 4095 seconds at most", b.GracefulRestart)
	}
	v.communities("bgp.communities", b.Communities)
	if len(b.Peers) == 0 {
		v.add("bgp.peers", "are missing")
	}
	for i, p := range b.Peers {
		at := fmt.Sprintf("bgp.peers[%d]", i)
		if !p.Addr.IsValid() {
			v.add(at+".addr", "is missing")
		}
		if p.ASN == 0 {
			v.add(at+".asn", "is missing")
		}
		if p.HoldTime > 0 && p.HoldTime < 3 {
			v.add(at+".holdTime", "is %d; RFC 4271 allows 3 seconds or more", p.HoldTime)
		}
		if p.TTLSecurity == 255 {
			v.add(at+".ttlSecurity", "is 255; there are 254 hops at most")
		}
		if len(p.Password) > 80 {
			v.add(at+".password", "is longer than 80 characters, which the kernel allows")
		}
		if p.BFD != nil && (p.BFD.IntervalMillis < 10 || p.BFD.IntervalMillis > 60_000) {
			v.add(at+".bfd.intervalMillis", "is %d; it can be 10 to 60000", p.BFD.IntervalMillis)
		}
		if p.BFD != nil && p.BFD.Multiplier == 0 {
			v.add(at+".bfd.multiplier", "is missing")
		}
	}
}

func (v *validator) vrrp(r *VRRP) {
	v.nonEmpty("vrrp.interface", r.Interface)
	v.address("vrrp.source", r.Source)
	for i, p := range r.Peers {
		at := fmt.Sprintf("vrrp.peers[%d]", i)
		if v.address(at, p) && p.Is4() != r.Source.Is4() {
			v.add(at, "%s is of another family than %s", p, r.Source)
		}
	}
	seen := map[uint8]bool{}
	for i, is := range r.VirtualRouters() {
		at := "vrrp"
		if i > 0 {
			at = fmt.Sprintf("vrrp.routers[%d]", i-1)
		}
		if v.virtualRouter(at, is); seen[is.RouterID] {
			v.add(at+".routerID", "%d appears twice", is.RouterID)
		}
		seen[is.RouterID] = true
	}
	if r.IntervalMillis < 10 || r.IntervalMillis > 40_950 || r.IntervalMillis%10 != 0 {
		v.add("vrrp.intervalMillis", "is %d; it can be 10 to 40950 in steps of 10", r.IntervalMillis)
	}
}

func (v *validator) virtualRouter(at string, r VirtualRouter) {
	if r.RouterID == 0 || r.RouterID == 255 {
		v.add(at+".routerID", "is %d; it can be 1 to 254", r.RouterID)
	}
	if r.Priority == 0 || r.Priority == 255 {
		v.add(at+".priority", "is %d; it can be 1 to 254", r.Priority)
	}
}
