package portmap

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// claim returns a claim to an L2 port p1, p2, ..., which has one address.
func claim(service, port string, l4 ...L4) Claim {
	c := Claim{Service: service, Port: port, L4: l4}
	if port != "" {
		c.At = at("10.0.0." + port[1:])
		c.Of = c.At
	}
	return c
}

// at returns addresses of one group.
func at(addrs ...string) (all []Address) {
	for _, a := range addrs {
		all = append(all, Address{"edge", netip.MustParseAddr(a)})
	}
	return all
}

var (
	http = L4{"TCP", 80}
	dns  = L4{"UDP", 53}
	tdns = L4{"TCP", 53}
)

func TestServicesShareAPort(t *testing.T) {
	var m Allocations
	for _, c := range []Claim{claim("a", "p1", http), claim("b", "p1", dns), claim("c", "p1", tdns), claim("d", "p2", http)} {
		if err := m.Take(c); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Take(claim("b", "p1", dns, http)); !errors.Is(err, ErrCollision) || err.Error() != "80/TCP at 10.0.0.1: another Service uses it: a" {
		t.Errorf("b takes a's port: %v", err)
	}
	if m.Port("b") != "p1" || m.Take(claim("e", "p1", dns)) == nil {
		t.Error("b lost what it had when it wanted more")
	}
	m.Release("b")
	if err := m.Take(claim("e", "p1", dns)); err != nil {
		t.Error(err)
	}
	m.Release("d")
	if m.Used("p2") || !m.Used("p1") || m.Port("d") != "" {
		t.Error("Used disagrees with the claims")
	}
}

func TestChoose(t *testing.T) {
	var m Allocations
	for _, c := range []Claim{claim("a", "p2", http), claim("b", "p3", http), claim("c", "p1", dns)} {
		if err := m.Take(c); err != nil {
			t.Fatal(err)
		}
	}
	all := []string{"p3", "p1", "p2"}
	for name, tc := range map[string]struct {
		claim Claim
		from  []string
		want  string
	}{
		"the first free one":                              {claim("new", "", http), all, "p1"},
		"its current one":                                 {claim("b", "", http, dns), all, "p3"},
		"not its current one, which is no candidate":      {claim("b", "", http), []string{"p1", "p2"}, "p1"},
		"another one, if its current one has a collision": {claim("a", "", http, dns), []string{"p3", "p2"}, "p2"},
		"none":          {claim("new", "", http, dns), []string{"p1", "p2"}, ""},
		"no candidates": {claim("new", "", http), nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var claims []Claim
			for _, p := range tc.from {
				claims = append(claims, claim(tc.claim.Service, p, tc.claim.L4...))
			}
			got, ok := m.Choose(claims)
			if got.Port != tc.want || ok != (tc.want != "") {
				t.Errorf("%q, %v, want %q", got.Port, ok, tc.want)
			}
		})
	}
}

// After any operations, no two Services share an L4 port, and every allocation has its claim.
func TestAllocationsModel(t *testing.T) {
	l4s := []L4{http, dns, tdns, {"TCP", 443}}
	ports := []string{"p1", "p2", "p3"}
	rapid.Check(t, func(rt *rapid.T) {
		var m Allocations
		want := map[string]Claim{} // by Service
		for range rapid.IntRange(1, 30).Draw(rt, "steps") {
			service, l4 := fmt.Sprint("s", rapid.IntRange(0, 5).Draw(rt, "service")), rapid.SliceOfNDistinct(rapid.SampledFrom(l4s), 1, 3, rapid.ID[L4]).Draw(rt, "L4")
			c := claim(service, rapid.SampledFrom(ports).Draw(rt, "port"), l4...)
			switch rapid.IntRange(0, 2).Draw(rt, "step") {
			case 0:
				m.Release(c.Service)
				delete(want, c.Service)
			case 1:
				free := true
				for service, w := range want {
					shares := slices.ContainsFunc(w.L4, func(l L4) bool { return slices.Contains(c.L4, l) })
					free = free && (service == c.Service || w.Port != c.Port || !shares)
				}
				if err := m.Take(c); (err == nil) != free {
					rt.Fatalf("take %+v of %+v: %v", c, want, err)
				}
				if free {
					want[c.Service] = c
				}
			case 2:
				var claims []Claim
				for _, p := range ports {
					claims = append(claims, claim(service, p, l4...))
				}
				if c, ok := m.Choose(claims); ok {
					if err := m.Take(c); err != nil {
						rt.Fatal(err)
					}
					want[c.Service] = c
				}
			}
			for service := range want {
				if got := m.Port(service); got != want[service].Port {
					rt.Fatalf("%s has %q, want %q", service, got, want[service].Port)
				}
			}
			for _, p := range ports {
				used := slices.ContainsFunc(slices.Collect(maps.Values(want)), func(c Claim) bool { return c.Port == p })
				if m.Used(p) != used {
					rt.Fatalf("%s used: %v", p, m.Used(p))
				}
			}
		}
	})
}

// Restore gives the same result in any order of the claims. Of two colliding Services the one that is confirmed keeps its
// port, or else the older one.
func TestRestore(t *testing.T) {
	aged := func(c Claim, hour int) Claim {
		c.Created = time.Unix(int64(hour)*3600, 0)
		return c
	}
	claims := []Claim{
		aged(claim("young", "p1", http), 3), aged(claim("old", "p1", http, dns), 1), aged(claim("other", "p1", tdns), 2), aged(claim("new", "", http), 4),
		aged(claim("same age b", "p2", http), 5), aged(claim("same age a", "p2", http), 5),
	}
	confirmed := aged(claim("confirmed", "p3", http), 7)
	confirmed.Confirmed = true
	claims = append(claims, aged(claim("unconfirmed", "p3", http), 6), confirmed)
	rapid.Check(t, func(rt *rapid.T) {
		m, collided := Restore(rapid.Permutation(claims).Draw(rt, "order"))
		for service, want := range map[string]string{"old": "p1", "other": "p1", "same age a": "p2", "confirmed": "p3", "unconfirmed": "", "young": "", "new": "", "same age b": ""} {
			if got := m.Port(service); got != want {
				rt.Errorf("%s has %q, want %q", service, got, want)
			}
		}
		var names []string
		for _, c := range collided {
			names = append(names, c.Service)
		}
		if want := []string{"young", "new", "same age b", "unconfirmed"}; !slices.Equal(names, want) {
			rt.Errorf("to be mapped again: %q, want %q", names, want)
		}
	})
}

// An address belongs to one L2 port, and its ports to one Service each: under whatever id the L2 port is named, with one or
// both of its addresses.
func TestAddressOfSeveralPorts(t *testing.T) {
	var m Allocations
	pair := at("10.0.0.1", "fd00::1")
	if err := m.Take(Claim{Service: "a", Port: "pair", L4: []L4{http}, Of: pair, At: pair[:1]}); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		claim Claim
		ok    bool
	}{
		"half of it, the same port":     {Claim{Service: "b", Port: "half", L4: []L4{http}, At: at("10.0.0.1")}, false},
		"half of it, another port":      {Claim{Service: "b", Port: "half", L4: []L4{dns}, At: at("10.0.0.1")}, false},
		"another spelling":              {Claim{Service: "b", Port: "PAIR", L4: []L4{dns}, At: at("10.0.0.1", "fd00::1")}, false},
		"the half that it does not use": {Claim{Service: "b", Port: "half", L4: []L4{http}, At: at("fd00::1")}, false},
		"no address of a half":          {Claim{Service: "b", Port: "half", L4: []L4{http}, Of: at("fd00::1")}, false},
		"the same id, the same port":    {Claim{Service: "b", Port: "pair", L4: []L4{http}, At: at("10.0.0.1")}, false},
		"the same id, another address":  {Claim{Service: "b", Port: "pair", L4: []L4{http}, At: at("fd00::1")}, true},
		"the same id, another port":     {Claim{Service: "b", Port: "pair", L4: []L4{dns}, At: at("fd00::1")}, true},
		"another group":                 {Claim{Service: "b", Port: "other", L4: []L4{http}, At: []Address{{"inner", netip.MustParseAddr("10.0.0.1")}}}, true},
		"another address":               {Claim{Service: "b", Port: "next", L4: []L4{http}, At: at("10.0.0.2")}, true},
		"its own, under another id":     {Claim{Service: "a", Port: "half", L4: []L4{http}, At: at("10.0.0.1")}, true},
		"one free and one used address": {Claim{Service: "b", Port: "mix", L4: []L4{http}, At: at("10.0.0.3", "fd00::1")}, false},
	} {
		if tc.claim.Of == nil {
			tc.claim.Of = tc.claim.At
		}
		if err := m.Collision(tc.claim); (err == nil) != tc.ok || err != nil && !errors.Is(err, ErrCollision) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Services of two namespaces come to one address only with the same key, and stay there without it.
func TestNamespaces(t *testing.T) {
	of := func(namespace, key string, c Claim) Claim {
		c.Namespace, c.Sharing = namespace, key
		return c
	}
	var m Allocations
	if err := errors.Join(m.Take(of("one", "k", claim("a", "p1", http))), m.Take(of("two", "k", claim("b", "p1", dns)))); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]error{"": ErrForeign, "other": ErrForeign, "k": nil} {
		if err := m.Collision(of("one", key, claim("c", "p1", tdns))); !errors.Is(err, want) {
			t.Errorf("key %q: %v", key, err)
		}
	}
	if err := m.Take(of("one", "", claim("a", "p1", http))); err != nil {
		t.Errorf("it withdraws its key: %v", err)
	}
	if err := m.Collision(of("two", "k", claim("c", "p1", tdns))); !errors.Is(err, ErrForeign) {
		t.Errorf("a newcomer: %v", err)
	}
	for _, confirmed := range []bool{true, false} {
		one, two := of("one", "", claim("a", "p1", http)), of("two", "k", claim("b", "p1", dns))
		one.Confirmed, two.Confirmed = true, confirmed
		if _, collided := Restore([]Claim{two, one}); len(collided) == 1 == confirmed {
			t.Errorf("restored, confirmed %v: %+v collide", confirmed, collided)
		}
	}
}
