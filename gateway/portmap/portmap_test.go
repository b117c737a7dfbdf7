package portmap

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func claim(service, port string, l4 ...L4) Claim {
	return Claim{Service: service, Port: port, L4: l4}
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
	if err := m.Take(claim("b", "p1", dns, http)); !errors.Is(err, ErrCollision) || err.Error() != "80/TCP at port p1: another Service uses it: a" {
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
			got, ok := m.Choose(tc.claim, tc.from)
			if got != tc.want || ok != (tc.want != "") {
				t.Errorf("%q, %v, want %q", got, ok, tc.want)
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
			c := Claim{
				Service: fmt.Sprint("s", rapid.IntRange(0, 5).Draw(rt, "service")),
				L4:      rapid.SliceOfNDistinct(rapid.SampledFrom(l4s), 1, 3, rapid.ID[L4]).Draw(rt, "L4"),
			}
			switch rapid.IntRange(0, 2).Draw(rt, "step") {
			case 0:
				m.Release(c.Service)
				delete(want, c.Service)
			case 1:
				c.Port = rapid.SampledFrom(ports).Draw(rt, "port")
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
				var ok bool
				if c.Port, ok = m.Choose(c, ports); ok {
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

// Restore gives the same result in any order of the claims. Of two colliding Services the older one keeps its port.
func TestRestore(t *testing.T) {
	at := func(c Claim, hour int) Claim {
		c.Created = time.Unix(int64(hour)*3600, 0)
		return c
	}
	claims := []Claim{
		at(claim("young", "p1", http), 3), at(claim("old", "p1", http, dns), 1), at(claim("other", "p1", tdns), 2), at(claim("new", "", http), 4),
		at(claim("same age b", "p2", http), 5), at(claim("same age a", "p2", http), 5),
	}
	rapid.Check(t, func(rt *rapid.T) {
		m, collided := Restore(rapid.Permutation(claims).Draw(rt, "order"))
		for service, want := range map[string]string{"old": "p1", "other": "p1", "same age a": "p2", "young": "", "new": "", "same age b": ""} {
			if got := m.Port(service); got != want {
				rt.Errorf("%s has %q, want %q", service, got, want)
			}
		}
		var names []string
		for _, c := range collided {
			names = append(names, c.Service)
		}
		if want := []string{"young", "new", "same age b"}; !slices.Equal(names, want) {
			rt.Errorf("to be mapped again: %q, want %q", names, want)
		}
	})
}
