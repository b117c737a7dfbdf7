package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// number returns the IPv4 address of a number in a network.
func number(first byte, i int) netip.Addr {
	b := binary.BigEndian.AppendUint32(nil, uint32(i))
	return netip.AddrFrom4([4]byte{first, b[1], b[2], b[3]})
}

// demand is what a Service of a test asks for, at a VIP of its own.
type demand struct {
	vip                      int
	ports, sources, backends int
	version                  byte // another one has other sources and backends
}

// demands returns a state with a Service for each demand, by name.
func demands(all map[string]demand) *desired.State {
	s := &desired.State{Cluster: "a", Group: "edge", Balancer: desired.EBPF}
	for name, d := range all {
		v := desired.VIP{Addr: number(198, d.vip), Announce: desired.ByBGP, Return: desired.Routed}
		for p := range d.ports {
			f := desired.Frontend{Service: name, Protocol: "TCP", Port: uint16(p + 1)}
			for i := range d.sources {
				f.Sources = append(f.Sources, netip.PrefixFrom(number(20+d.version, i), 32))
			}
			for i := range d.backends {
				f.Backends = append(f.Backends, desired.Backend{Addr: number(60+d.version, i), Port: 8080, Weight: 1})
			}
			v.Frontends = append(v.Frontends, f)
		}
		s.VIPs = append(s.VIPs, v)
	}
	slices.SortFunc(s.VIPs, func(a, b desired.VIP) int { return a.Addr.Compare(b.Addr) })
	return s
}

// A Service that has no room is refused by name. One that has what it asks for, or replaces it by as much, never is, whatever
// others ask for at lower addresses.
func TestCheckRoom(t *testing.T) {
	t.Parallel()
	limits := room{frontends: 10, sources: 100, backends: 50, members: 50}
	type all = map[string]demand
	for name, tc := range map[string]struct {
		before, after all
		refused       string
	}{
		"all fit":                         {nil, all{"a": {1, 4, 10, 5, 0}, "b": {2, 6, 10, 5, 0}}, ""},
		"too many ports":                  {nil, all{"a": {1, 4, 0, 0, 0}, "b": {2, 7, 0, 0, 0}, "c": {3, 6, 0, 0, 0}}, "b: 7 more ports of VIPs"},
		"too many sources":                {nil, all{"a": {1, 2, 51, 0, 0}, "b": {2, 1, 100, 0, 0}}, "a: 102 more source ranges"},
		"too many backends":               {nil, all{"a": {1, 1, 0, 51, 0}, "b": {2, 1, 0, 50, 0}}, "a: 51 more backends"},
		"what is served comes first":      {all{"b": {2, 1, 60, 0, 0}}, all{"a": {1, 1, 60, 0, 0}, "b": {2, 1, 60, 0, 0}}, "a: 60 more source ranges"},
		"replacements need no room":       {all{"a": {1, 1, 50, 25, 0}, "b": {2, 1, 50, 25, 0}}, all{"a": {1, 1, 50, 25, 0}, "b": {2, 1, 50, 25, 1}}, ""},
		"growth beside a full map":        {all{"a": {1, 1, 0, 40, 0}, "b": {2, 1, 0, 10, 0}}, all{"a": {1, 1, 0, 50, 0}, "b": {2, 1, 0, 9, 1}}, "a: 10 more backends"},
		"growth into what another leaves": {all{"a": {1, 1, 0, 40, 0}, "b": {2, 1, 0, 10, 0}}, all{"a": {1, 1, 0, 49, 0}, "b": {2, 1, 0, 1, 0}}, ""},
		"ports of a removed Service are free only after it is gone": {all{"a": {1, 10, 0, 0, 0}}, all{"b": {2, 1, 0, 0, 0}}, "b: 1 more ports of VIPs"},
		"a port that moves to another Service":                      {all{"a": {1, 10, 0, 0, 0}}, all{"b": {1, 10, 0, 0, 0}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before, after := demands(tc.before), demands(tc.after)
			var refused []string
			for _, f := range checkRoom(limits, usedBy(before), before, after) {
				text, _, _ := strings.Cut(strings.TrimPrefix(f.Message, "there is no room for "), ":")
				refused = append(refused, f.Services[0]+": "+text)
			}
			if have := strings.Join(refused, ", "); have != tc.refused {
				t.Errorf("refused are %q, want %q", have, tc.refused)
			}
		})
	}
}

// refusedBy applies a state and returns the Services that are refused; all are refused by name.
func refusedBy(t *testing.T, b *Balancer, s *desired.State) (names []string) {
	t.Helper()
	err := b.Apply(context.Background(), s)
	if err == nil {
		return nil
	}
	faults, ok := errors.AsType[desired.Faults](err)
	if !ok {
		t.Fatal(err)
	}
	for _, f := range faults {
		if len(f.Services) == 0 {
			t.Fatalf("a fault without a Service: %v", f)
		}
		names = append(names, f.Services...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// A Service beyond the limits of the maps is refused by name, and costs the others nothing.
func TestServiceBeyondTheMaps(t *testing.T) {
	netlab.Privileged(t)
	b := solo(t, netlab.BPFFS(t))
	type all = map[string]demand
	apply(t, b, demands(all{"bystander": {9, 2, 10, 4, 0}, "hog": {1, 1, 40_000, 0, 0}}))
	for what, hog := range map[string]demand{"ports": {1, 20_000, 0, 0, 0}, "source ranges": {1, 1, 70_000, 0, 0}, "backends": {1, 5, 0, 30_000, 0}} {
		s := demands(all{"bystander": {9, 3, 20, 5, 1}, "hog": hog})
		if have := refusedBy(t, b, s); !slices.Equal(have, []string{"hog"}) {
			t.Errorf("%s: %q are refused", what, have)
		}
		rest := s.Without(desired.Faults{{Services: []string{"hog"}}}, b.applied)
		apply(t, b, &rest)
		if d := drift(t, b); len(d) > 0 {
			t.Errorf("%s: drift %v", what, d)
		}
	}
	// Each half of a map is replaced by as much.
	apply(t, b, demands(all{"bystander": {9, 2, 10, 4, 0}, "hog": {1, 1, 65_000, 0, 0}}))
	apply(t, b, demands(all{"bystander": {9, 2, 10, 4, 1}, "hog": {1, 1, 65_000, 0, 1}}))
	if n := len(b.have.sources); n != 65_020 {
		t.Errorf("%d sources", n)
	}
}

// Without a route to the backends of a Service, it alone is refused, again and again, and takes no ids from others.
func TestServiceWithoutARoute(t *testing.T) {
	netlab.Privileged(t)
	b := solo(t, netlab.BPFFS(t))
	apply(t, b, demands(map[string]demand{"bystander": {9, 1, 0, 1, 0}}))
	s := demands(map[string]demand{"first": {1, 9_000, 0, 0, 0}, "lost": {2, 1, 0, 3, 0}})
	s.VIPs[1].Return = desired.Masquerade // the namespace has no route
	if have := refusedBy(t, b, s); !slices.Equal(have, []string{"lost"}) {
		t.Errorf("%q are refused", have)
	}
	apply(t, b, demands(map[string]demand{"second": {3, 16_000, 0, 0, 0}}))
}

// A backend without a route does not cost the other Services of a masqueraded VIP their address.
func TestOwnAddressBesideABackendWithoutARoute(t *testing.T) {
	t.Parallel()
	own, lost := netip.MustParseAddr("10.0.0.11"), number(60, 0)
	v := &desired.VIP{Return: desired.Masquerade}
	for _, a := range []netip.Addr{lost, number(10, 5)} {
		v.Frontends = append(v.Frontends, desired.Frontend{Service: a.String(), Backends: []desired.Backend{{Addr: a}}})
	}
	have, err := ownAddress(v, environment{address: func(to netip.Addr) (netip.Addr, error) {
		if to == lost {
			return netip.Addr{}, fmt.Errorf("no route to %s", to)
		}
		return own, nil
	}})
	if have != own || err != nil {
		t.Errorf("%s, %v", have, err)
	}
}
