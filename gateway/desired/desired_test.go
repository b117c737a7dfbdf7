package desired

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func example() State {
	return State{
		Cluster: "a", Group: "edge", Balancer: NFTables, Peers: []PeerGateway{{URL: "https://10.0.0.12:9479", Name: "gateway-2"}},
		VIPs: []VIP{{
			Addr: netip.MustParseAddr("198.51.100.7"), Announce: ByBGP, Return: Routed,
			Frontends: []Frontend{{
				Service: "shop/web", Protocol: "TCP", Port: 443, Sources: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Affinity: 60,
				Backends: []Backend{
					{Addr: netip.MustParseAddr("10.1.0.5"), Port: 8443, Weight: 1},
					{Addr: netip.MustParseAddr("10.1.0.6"), Port: 8443, Weight: 2, Draining: true},
				},
			}},
		}},
		BGP: &BGP{
			ASN: 64512, RouterID: netip.MustParseAddr("10.0.0.11"), GracefulRestart: 10, Communities: []string{"64512:1"}, MED: new(uint32(50)),
			Peers: []Peer{{Addr: netip.MustParseAddr("10.0.0.1"), ASN: 64500, HoldTime: 9, BFD: &BFD{IntervalMillis: 100, Multiplier: 3}}},
		},
		VRRP: &VRRP{
			Interface: "eth0", Source: netip.MustParseAddr("10.0.0.11"), Peers: []netip.Addr{netip.MustParseAddr("10.0.0.12")},
			RouterID: 51, Priority: 100, IntervalMillis: 100,
		},
	}
}

// Each fault is reported with its field, and nothing else is.
func TestValidate(t *testing.T) {
	first := func(s *State) *Frontend { return &s.VIPs[0].Frontends[0] }
	for field, spoil := range map[string]func(*State){
		"cluster":          func(s *State) { s.Cluster = "" },
		"group":            func(s *State) { s.Group = "" },
		"balancer":         func(s *State) { s.Balancer = "ipvs" },
		"peers[0].name":    func(s *State) { s.Peers[0].Name = "" },
		"peers[0].url":     func(s *State) { s.Peers[0].URL = "http://10.0.0.12" },
		"peers[0].address": func(s *State) { s.Peers[0].Address = netip.IPv6Loopback() },
		"peers[0].otherAddress": func(s *State) {
			s.Peers[0].Address, s.Peers[0].OtherAddress = netip.MustParseAddr("192.0.2.12"), netip.MustParseAddr("192.0.2.13")
		},
		"slots":                        func(s *State) { s.Slots = make([]Slot, 63) },
		"slots[5].owner":               func(s *State) { s.Slots = make([]Slot, 64); s.Slots[5].Owner = 2 },
		"slots[63].previous":           func(s *State) { s.Slots = make([]Slot, 64); s.Slots[63].Previous = -1 },
		"vips[0].announce":             func(s *State) { s.BGP = nil },
		"vips[0].return":               func(s *State) { s.VIPs[0].Return = "" },
		"vips[1].addr":                 func(s *State) { s.VIPs = append(s.VIPs, VIP{Addr: s.VIPs[0].Addr, Announce: ByNone, Return: SNAT}) },
		"vips[0].frontends[0].service": func(s *State) { first(s).Service = "" },
		"vips[0].frontends[0].port":    func(s *State) { first(s).Port = 0 },
		"vips[0].frontends[0].protocol": func(s *State) {
			first(s).Protocol = "SCTP"
		},
		"vips[0].frontends[1].port": func(s *State) {
			s.VIPs[0].Frontends = append(s.VIPs[0].Frontends, Frontend{Service: "shop/other", Protocol: "TCP", Port: 443})
		},
		"vips[0].frontends[0].affinity":           func(s *State) { first(s).Affinity = -1 },
		"vips[0].frontends[0].sources[0]":         func(s *State) { first(s).Sources[0] = netip.MustParsePrefix("192.0.2.1/24") },
		"vips[0].frontends[0].backends[1].addr":   func(s *State) { first(s).Backends[1].Addr = netip.MustParseAddr("fd00::1") },
		"vips[0].frontends[0].backends[0].port":   func(s *State) { first(s).Backends[0].Port = 0 },
		"vips[0].frontends[0].backends[0].weight": func(s *State) { first(s).Backends[0].Weight = 0 },
		"vips[0].frontends[0].backends":           func(s *State) { slices.Reverse(first(s).Backends) },
		"vips[0].frontends[0].backends[1]":        func(s *State) { first(s).Backends[1] = first(s).Backends[0] },
		"bgp.asn":                                 func(s *State) { s.BGP.ASN = 0 },
		"bgp.routerID":                            func(s *State) { s.BGP.RouterID = netip.MustParseAddr("fd00::1") },
		"bgp.gracefulRestart":                     func(s *State) { s.BGP.GracefulRestart = 5000 },
		"bgp.peers":                               func(s *State) { s.BGP.Peers = nil },
		"bgp.peers[0].addr":                       func(s *State) { s.BGP.Peers[0].Addr = netip.Addr{} },
		"bgp.peers[0].asn":                        func(s *State) { s.BGP.Peers[0].ASN = 0 },
		"bgp.peers[0].holdTime":                   func(s *State) { s.BGP.Peers[0].HoldTime = 2 },
		"bgp.peers[0].ttlSecurity":                func(s *State) { s.BGP.Peers[0].TTLSecurity = 255 },
		"bgp.peers[0].password":                   func(s *State) { s.BGP.Peers[0].Password = strings.Repeat("x", 81) },
		"bgp.peers[0].bfd.intervalMillis":         func(s *State) { s.BGP.Peers[0].BFD.IntervalMillis = 1 },
		"bgp.peers[0].bfd.multiplier":             func(s *State) { s.BGP.Peers[0].BFD.Multiplier = 0 },
		"vrrp.interface":                          func(s *State) { s.VRRP.Interface = "" },
		"vrrp.source":                             func(s *State) { s.VRRP.Source = netip.MustParseAddr("127.0.0.1") },
		"vrrp.peers[0]":                           func(s *State) { s.VRRP.Peers[0] = netip.MustParseAddr("fd00::1") },
		"vrrp.routerID":                           func(s *State) { s.VRRP.RouterID = 255 },
		"vrrp.priority":                           func(s *State) { s.VRRP.Priority = 0 },
		"vips[0].routerID":                        func(s *State) { s.VIPs[0].RouterID = 52 },
		"vrrp.routers[0].routerID":                func(s *State) { s.VRRP.Routers = []VirtualRouter{{51, 100}} },
		"vrrp.routers[1].routerID":                func(s *State) { s.VRRP.Routers = []VirtualRouter{{52, 100}, {255, 100}} },
		"vrrp.routers[0].priority":                func(s *State) { s.VRRP.Routers = []VirtualRouter{{52, 255}} },
		"vrrp.intervalMillis":                     func(s *State) { s.VRRP.IntervalMillis = 105 },
	} {
		s := example()
		if faults := s.Validate(); len(faults) > 0 {
			t.Fatal(faults)
		}
		spoil(&s)
		if faults := s.Validate(); len(faults) != 1 || faults[0].Field != field || faults[0].Component != ComponentRequest {
			t.Errorf("%s: faults %v", field, faults)
		}
	}
}

// A gateway takes ports in its own slots, all of them, and of the ports of servers only those that its clients have.
func TestOwnSlots(t *testing.T) {
	s := example()
	s.Peers = append(s.Peers, PeerGateway{URL: "https://10.0.0.13:9479", Name: "gateway-3"})
	for i, instead := range s.OwnSlots() {
		if instead != i {
			t.Errorf("without slots, %d is used for %d", instead, i)
		}
	}
	for i := range SlotCount {
		s.Slots = append(s.Slots, Slot{Owner: i % 3, Previous: (i + 1) % 3})
	}
	uses := map[int]int{}
	for i, instead := range s.OwnSlots() {
		if s.Slots[instead].Owner != 0 || i%3 == 0 && instead != i || i%3 != 0 && instead == 0 {
			t.Errorf("%d is used for %d", instead, i)
		}
		uses[instead]++
	}
	for i := range SlotCount {
		if i%3 == 0 && (uses[i] == 0 || uses[i] > 4) {
			t.Errorf("slot %d is used for %d", i, uses[i])
		}
	}
}

// A VIP without a backend for new connections is not announced.
func TestServes(t *testing.T) {
	s := example()
	v := &s.VIPs[0]
	if !v.Serves() {
		t.Error("a VIP with a backend does not serve")
	}
	v.Frontends[0].Backends[0].Draining = true
	if v.Serves() {
		t.Error("a VIP whose backends all drain serves")
	}
}

// The text of faults names the component and the field.
func TestFaultsText(t *testing.T) {
	have := Faults{{Component: ComponentBGP, Message: "no route"}, {Component: ComponentRequest, Field: "group", Message: "is missing"}}.Error()
	if want := "bgp: no route; group: is missing"; have != want {
		t.Errorf("have %q, want %q", have, want)
	}
}

// A request has the JSON of its state, whatever the request before it had.
func TestNext(t *testing.T) {
	state := func(edit func(*State)) State {
		s := example()
		other := example().VIPs[0]
		other.Addr = netip.MustParseAddr("198.51.100.8")
		s.VIPs = append(s.VIPs, other)
		edit(&s)
		return s
	}
	states := map[string]State{
		"nothing else":   state(func(*State) {}),
		"a service":      state(func(s *State) { s.VIPs[1].Frontends[0].Service = `shop/"vips":[<` }),
		"a backend":      state(func(s *State) { s.VIPs[0].Frontends[0].Backends[0].Weight = 7 }),
		"a source":       state(func(s *State) { s.VIPs[0].Frontends[0].Sources = nil }),
		"affinity":       state(func(s *State) { s.VIPs[0].Frontends[0].Affinity = 0 }),
		"a port":         state(func(s *State) { s.VIPs[0].Frontends[0].Port = 444 }),
		"a protocol":     state(func(s *State) { s.VIPs[0].Frontends[0].Protocol = "UDP" }),
		"no backends":    state(func(s *State) { s.VIPs[0].Frontends[0].Backends = nil }),
		"empty backends": state(func(s *State) { s.VIPs[0].Frontends[0].Backends = []Backend{} }),
		"no frontends":   state(func(s *State) { s.VIPs[0].Frontends = nil }),
		"an announcer":   state(func(s *State) { s.VIPs[0].Announce = ByVRRP }),
		"a return":       state(func(s *State) { s.VIPs[0].Return = SNAT }),
		"a route":        state(func(s *State) { s.VIPs[0].Route = &Route{MED: new(uint32(7))} }),
		"another route":  state(func(s *State) { s.VIPs[0].Route = &Route{MED: new(uint32(8))} }),
		"a router":       state(func(s *State) { s.VIPs[0].RouterID = 3 }),
		"order":          state(func(s *State) { slices.Reverse(s.VIPs) }),
		"fewer VIPs":     state(func(s *State) { s.VIPs = s.VIPs[1:] }),
		"no VIPs":        state(func(s *State) { s.VIPs = nil }),
		"another peer":   state(func(s *State) { s.Peers[0].Name = `"vips":[` }),
		"cordoned":       state(func(s *State) { s.Cordoned = true }),
	}
	for before, b := range states {
		last := NewRequest(1, b)
		for name, s := range states {
			r := last.Next(2, s)
			want, err := json.Marshal(&s)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(r.encoded, want) || r.Hash != s.Hash() {
				t.Errorf("%s after %s:\n%s\nwant\n%s", name, before, r.encoded, want)
			}
			if _, err := Parse(r.JSON(), nil); err != nil {
				t.Errorf("%s after %s: %v", name, before, err)
			}
			if again := r.Next(3, s); !bytes.Equal(again.encoded, want) {
				t.Errorf("%s twice after %s: %s", name, before, again.encoded)
			}
		}
	}
}

// VIPs that differ in any field are not equal: else a change of it would never be sent.
func TestEqualFields(t *testing.T) {
	for _, at := range []func(*VIP) any{
		func(v *VIP) any { return v },
		func(v *VIP) any { return &v.Frontends[0] },
		func(v *VIP) any { return &v.Frontends[0].Backends[0] },
	} {
		for i := range reflect.ValueOf(at(new(example().VIPs[0]))).Elem().NumField() {
			a, b := example().VIPs[0], example().VIPs[0]
			if !a.Equal(&b) {
				t.Fatal("a VIP is not equal to itself")
			}
			strct := reflect.ValueOf(at(&b)).Elem()
			field := strct.Field(i)
			switch zero := reflect.Zero(field.Type()); {
			case !field.IsZero():
				field.Set(zero)
			case field.Kind() == reflect.Pointer:
				field.Set(reflect.New(field.Type().Elem()))
			case field.CanUint():
				field.SetUint(1)
			case field.Kind() == reflect.Bool:
				field.SetBool(true)
			default:
				t.Fatalf("%s: say how to change it", strct.Type().Field(i).Name)
			}
			if a.Equal(&b) {
				t.Errorf("%s.%s differs", strct.Type(), strct.Type().Field(i).Name)
			}
		}
	}
}
