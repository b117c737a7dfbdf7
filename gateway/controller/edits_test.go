package controller

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// Whatever an operator edits in the settings, each Service keeps its addresses, its floating IP and its gateways. It says what
// the settings would take from it. When it agrees, exactly that happens.
func TestEditedSettings(t *testing.T) {
	other := Pool{Name: "first", Announce: desired.ByBGP, Return: desired.SNAT, Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/28")}}
	for name, tc := range map[string]struct {
		edit   func(*Settings)
		of     string // the Service that the edit is about, "" for none
		change string
		then   string // an address after the agreement begins like this; "": the Service is released
	}{
		"another pool first":            {func(s *Settings) { s.Pools = append([]Pool{other}, s.Pools...) }, "", "", ""},
		"a pool of a list removed":      {func(s *Settings) { s.Pools = append(s.Pools[:1], other) }, "list", "the settings have no pool list", ""},
		"a pool of Neutron removed":     {func(s *Settings) { s.Pools = []Pool{other, s.Pools[1]} }, "public", "the settings have no pool public", "198.51.100."},
		"other addresses":               {func(s *Settings) { s.Pools[1].Addresses = other.Addresses }, "list", "pool list no longer has the address 192.0.2.9", "198.51.100."},
		"another group":                 {func(s *Settings) { s.Pools[1].Group = "edge" }, "list", "pool list has the group edge instead of default", "192.0.2.9"},
		"another announcer":             {func(s *Settings) { s.Pools[1].Announce = desired.ByNone }, "list", "pool list has announce none instead of vrrp", "192.0.2.9"},
		"another virtual router":        {func(s *Settings) { s.Pools[1].VRRP = &VRRPPool{RouterID: 52} }, "list", "pool list has vrrp.routerID 52 instead of 0", "192.0.2.9"},
		"no floating IPs":               {func(s *Settings) { s.FloatingIPs = "none" }, "public", "pool public gives Services no floating IP", "10.9."},
		"no network of floating IPs":    {func(s *Settings) { s.Pools[0].Neutron.FloatingNetwork = "" }, "public", "pool public gives Services no floating IP", "10.9."},
		"Services without a class left": {func(s *Settings) { s.DefaultClass = false }, "classless", "defaultClass is false", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newAPITestbed(t)
			before := testSettings()
			before.DefaultClass = true
			w.startWith(before, nil)
			w.noError(w.Sync(t.Context()))
			w.create(
				w.newService("public", nil, 80), w.newService("list", annotation(service.AnnotationPool, "list"), 80),
				w.newService("classless", func(s *corev1.Service) { s.Spec.LoadBalancerClass = nil }, 443),
			)
			w.refresh()
			names := []string{"classless", "list", "public"}
			state := func() (all []string) {
				for _, n := range names {
					all = append(all, n+": "+strings.Join(addresses(w.get(n)), " ")+"; "+strings.Join(w.served(n), ", "))
				}
				ports, floating := w.fake.Objects()
				return slices.Concat(all, ports, floating)
			}
			had := state()
			edited := testSettings()
			edited.DefaultClass = true
			tc.edit(&edited)
			for range 2 { // restarts
				w.startWith(edited, nil)
				w.noError(w.Sync(t.Context()))
				w.refresh()
				if diff := cmp.Diff(had, state()); diff != "" {
					t.Fatalf("Services before and after the edit (-before +after):\n%s", diff)
				}
			}
			var list corev1.ServiceList
			w.noError(w.api.List(t.Context(), &list))
			var of []Edit
			for _, e := range Edits(&w.configured, list.Items) {
				if e.Service == tc.of {
					of = append(of, e)
				}
			}
			if tc.of == "" {
				if all := Edits(&w.configured, list.Items); len(all) > 0 {
					t.Errorf("nothing would change, but %+v", all)
				}
				return
			}
			c := w.condition(tc.of, service.ConditionMapped)
			if len(of) != 1 || !strings.HasPrefix(of[0].Change, tc.change) || !strings.Contains(c.Message, "; "+of[0].Change+"; ") || !strings.Contains(c.Message, of[0].Agreement) {
				t.Fatalf("the plan says %+v, the condition %q", of, c.Message)
			}
			if !w.hasEvent("SettingsEdited " + tc.of + ": " + of[0].Change) {
				t.Error("no event says so")
			}
			for _, n := range names { // the others would keep a pool as it is
				if e := Edits(&w.configured, []corev1.Service{*w.get(n)}); len(e) > 0 {
					w.edit(n, annotation(service.AnnotationAgree, e[0].Agreement))
				}
			}
			w.noError(w.converge())
			w.noError(w.Sync(t.Context()))
			w.refresh()
			have := strings.Join(addresses(w.get(tc.of)), " ")
			if tc.then == "" && have != "" || !strings.HasPrefix(have, tc.then) {
				t.Errorf("agreed, it has %q, want %q", have, tc.then)
			}
			if e := Edits(&w.configured, []corev1.Service{*w.get(tc.of)}); len(e) > 0 && e[0].Agreement == of[0].Agreement {
				t.Errorf("agreed, it still waits: %+v", e)
			}
		})
	}
}

// The addresses of a removed or edited pool stay in its virtual router.
func TestVirtualRouterOfEditedPools(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("192.0.2.9")
	has := record{port: port{ID: staticID([]netip.Addr{vip}), Pool: "partner", VIPs: []netip.Addr{vip}}, group: DefaultGroup, announce: desired.ByVRRP, router: 52}
	for name, tc := range map[string]struct {
		pools []Pool
		want  uint8
	}{
		"removed": {nil, 52},
		"edited":  {[]Pool{{Name: "partner", Group: DefaultGroup, Announce: desired.ByVRRP, VRRP: &VRRPPool{RouterID: 53}}}, 52},
		"without": {[]Pool{{Name: "partner", Group: DefaultGroup, Announce: desired.ByVRRP}}, 52},
	} {
		kept := (&Settings{Pools: tc.pools}).keeping([]record{has})
		if id := kept.pool("partner").routerID(); id != tc.want {
			t.Errorf("%s: virtual router %d, want %d", name, id, tc.want)
		}
	}
}

// The routes to a pool's addresses go to its peers alone, also after an edit that Services have not agreed to. Another announcer needs
// none of them.
func TestPeersOfEditedPools(t *testing.T) {
	t.Parallel()
	peers := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	vip := netip.MustParseAddr("192.0.2.9")
	has := record{port: port{ID: staticID([]netip.Addr{vip}), Pool: "partner", VIPs: []netip.Addr{vip}}, group: DefaultGroup, announce: desired.ByBGP, peers: peers}
	pool := Pool{Name: "partner", Group: DefaultGroup, Announce: desired.ByBGP, BGP: &desired.Route{Peers: peers, Communities: []string{"no-export"}}}
	byVRRP := pool
	byVRRP.Announce, byVRRP.BGP = desired.ByVRRP, nil
	for name, tc := range map[string]struct {
		pools []Pool
		want  *desired.Route
	}{
		"no edit":              {[]Pool{pool}, pool.BGP},
		"the pool removed":     {nil, &desired.Route{Peers: peers}},
		"another announcer":    {[]Pool{byVRRP}, &desired.Route{Peers: peers}},
		"of a Service of VRRP": {[]Pool{pool}, nil},
	} {
		r := has
		if name == "of a Service of VRRP" {
			r.announce, r.peers = desired.ByVRRP, nil
		}
		kept := (&Settings{Pools: tc.pools}).keeping([]record{r})
		if diff := cmp.Diff(tc.want, kept.pool("partner").BGP, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +have):\n%s", name, diff)
		}
	}
}
