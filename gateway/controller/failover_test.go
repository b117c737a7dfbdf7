package controller

import (
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// movingSettings are testSettings with a failover IP pool.
func failoverSettings() Settings {
	s := testSettings()
	s.Pools = append(s.Pools, Pool{Name: "moving", Announce: desired.ByNone, Return: desired.Masquerade, FailoverIP: &FailoverIPPool{FloatingNetwork: openstacktest.External}})
	return s
}

// failoverTestbed has gateways with addresses of their own.
func failoverTestbed(t *testing.T) *testbed {
	t.Helper()
	w := newTestbed(t)
	for i, name := range []string{"gw1", "gw2"} {
		n := w.gateway(name)
		n.Spec.Address = openstacktest.GatewayAddrs[i].String()
		w.noError(w.api.Update(t.Context(), n))
	}
	w.startWith(failoverSettings(), nil)
	w.noError(w.Sync(t.Context()))
	return w
}

// refresh refreshes the gateways, and then the Services.
func (w *testbed) refresh() {
	w.t.Helper()
	w.noError(errors.Join(w.Refresh(w.t.Context()), w.converge()))
}

// A failover IP leads to one gateway, and moves when that gateway dies, is cordoned, or is deleted.
func TestFailoverIP(t *testing.T) {
	w := failoverTestbed(t)
	clock := time.Now()
	w.now = func() time.Time { return clock }
	w.create(w.newService("a", annotation(service.AnnotationPool, "moving"), 80), w.newService("b", annotation(service.AnnotationPool, "moving"), 443))
	w.noError(w.converge())
	had := addresses(w.get("a"))
	if b := addresses(w.get("b")); len(had) != 1 || !slices.Equal(had, b) {
		t.Fatalf("the Services have %v and %v", had, b)
	}
	moves := -1
	last := ""
	leads := func(step, to string) {
		t.Helper()
		w.refresh()
		all, err := w.cloud.FloatingIPs(t.Context())
		w.noError(err)
		if len(all) != 1 || all[0].Port != to || all[0].Addr.String() != had[0] {
			t.Fatalf("%s: floating IPs %+v, want %v to lead to %s", step, all, had, to)
		}
		if to != last {
			last = to
			moves++
		}
		for i, name := range []string{"gw1", "gw2"} {
			want := []string(nil)
			if port := []string{openstacktest.Gateway1, openstacktest.Gateway2}[i]; port == to {
				want = had
			}
			if n := w.gateway(name); !slices.Equal(n.Status.FloatingIPs, want) {
				t.Errorf("%s: gateway %s says that %v lead to it, want %v", step, name, n.Status.FloatingIPs, want)
			}
			if v := w.gateways.states[name].VIPs; len(v) != 1 || v[0].Addr != openstacktest.GatewayAddrs[i] || len(v[0].Frontends) != 2 {
				t.Errorf("%s: gateway %s has the VIPs %+v", step, name, v)
			}
		}
		if got := addresses(w.get("a")); !slices.Equal(got, had) {
			t.Errorf("%s: the Service is reached at %v, before at %v", step, got, had)
		}
	}
	leads("at first", openstacktest.Gateway1)
	w.startWith(failoverSettings(), nil)
	w.now = func() time.Time { return clock }
	w.noError(w.Sync(t.Context()))
	leads("after a restart", openstacktest.Gateway1)

	w.gateways.away["gw1"] = errors.New("connection refused")
	leads("while gw1 may come back", openstacktest.Gateway1)
	if w.recheckAfter <= 0 || w.recheckAfter > silenceTimeout {
		t.Errorf("the next look is in %v", w.recheckAfter)
	}
	clock = clock.Add(silenceTimeout - time.Second)
	leads("a second before it is given up", openstacktest.Gateway1)
	clock = clock.Add(time.Second)
	leads("when gw1 is dead", openstacktest.Gateway2)
	delete(w.gateways.away, "gw1")
	leads("when gw1 is back", openstacktest.Gateway2)

	cordon := func(name string, is bool) {
		t.Helper()
		n := w.gateway(name)
		n.Spec.Cordoned = is
		w.noError(w.api.Update(t.Context(), n))
	}
	cordon("gw2", true)
	leads("when gw2 is cordoned", openstacktest.Gateway1)
	cordon("gw1", true)
	leads("when both are", openstacktest.Gateway1)
	cordon("gw2", false)
	leads("when gw2 is free", openstacktest.Gateway2)
	if moves != 3 {
		t.Errorf("it moved %d times, want 3", moves)
	}
	t.Logf("%d moves", moves)

	c := meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionMapped)
	applied := meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionApplied)
	if c == nil || !strings.Contains(c.Message, "its connections break") || applied == nil || applied.Status != metav1.ConditionTrue || !strings.Contains(applied.Message, "gateway gw2") {
		t.Errorf("conditions %+v and %+v", c, applied)
	}
	for _, port := range []string{openstacktest.Gateway1, openstacktest.Gateway2} {
		if pairs, err := w.cloud.AddressPairs(t.Context(), port); err != nil || len(pairs) > 0 {
			t.Errorf("port %s may send as %v, %v; its own address needs no pair", port, pairs, err)
		}
	}
	w.remove("a")
	w.remove("b")
	w.noError(w.converge())
	if _, fips := w.fake.Objects(); len(fips) > 0 {
		t.Errorf("left: %v", fips)
	}
}

// A Service keeps what it has of a pool that was removed from the settings. When it is deleted, so are its objects.
func TestRemovedPools(t *testing.T) {
	list := func() Settings {
		s := testSettings()
		s.Pools = s.Pools[1:]
		return s
	}
	for name, tc := range map[string]struct {
		pool  string
		after Settings
	}{
		"with a failover IP": {"moving", testSettings()},
		"with Neutron":       {"public", list()},
	} {
		t.Run(name, func(t *testing.T) {
			w := failoverTestbed(t)
			w.create(w.newService("a", annotation(service.AnnotationPool, tc.pool), 80))
			w.noError(w.converge())
			w.edit("a", func(s *corev1.Service) { delete(s.Annotations, service.AnnotationPool) })
			w.startWith(tc.after, nil)
			w.noError(w.Sync(t.Context()))
			w.noError(w.converge())
			w.checkInvariants()
			w.remove("a")
			w.noError(w.converge())
			if ports, fips := w.fake.Objects(); len(ports)+len(fips) > 0 {
				t.Errorf("left: %v %v", ports, fips)
			}
		})
	}
}

// A gateway with an invalid GatewayNode keeps its failover IP only while it answers.
func TestFailoverIPOfInvalidGateway(t *testing.T) {
	for name, restarts := range map[string]bool{"it dies": false, "it dies, and the controller restarts": true} {
		t.Run(name, func(t *testing.T) {
			w := failoverTestbed(t)
			clock := time.Now()
			now := func() time.Time { return clock }
			w.now = now
			w.create(w.newService("a", annotation(service.AnnotationPool, "moving"), 80))
			w.noError(w.converge())
			leads := func(step, to string) {
				t.Helper()
				w.refresh()
				if all, err := w.cloud.FloatingIPs(t.Context()); err != nil || len(all) != 1 || all[0].Port != to {
					t.Errorf("%s: floating IPs %+v, %v; want one that leads to %s", step, all, err, to)
				}
			}
			has := w.gateways.states["gw1"]
			n := w.gateway("gw1")
			n.Spec.BGP.Peers[0].PasswordSecret = "none-such"
			w.noError(w.api.Update(t.Context(), n))
			leads("while it answers", openstacktest.Gateway1)
			if is := w.gateways.states["gw1"]; is.Hash() != has.Hash() {
				t.Errorf("it has %+v now, before %+v", is, has)
			}
			clock = clock.Add(2 * silenceTimeout)
			leads("a while later", openstacktest.Gateway1)
			w.gateways.away["gw1"] = errors.New("connection refused")
			if restarts {
				delete(w.gateways.states, "gw1") // as if it had never answered
				w.startWith(failoverSettings(), nil)
				w.now = now
				w.noError(w.Sync(t.Context()))
			}
			leads("while it may come back", openstacktest.Gateway1)
			clock = clock.Add(silenceTimeout)
			leads("when it is dead", openstacktest.Gateway2)
		})
	}
}

// An error at one gateway's port does not delay the timeout of another, silent gateway.
func TestSilentGatewayDespiteError(t *testing.T) {
	w := failoverTestbed(t)
	w.create(w.newService("a", annotation(service.AnnotationPool, "moving"), 80))
	w.noError(w.converge())
	l := &loop{worker: w.worker, controller: &Controller{}}
	l.controller.synced.Store(true)
	w.gateways.away["gw1"] = errors.New("connection refused")
	w.fake.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodPut {
			return openstacktest.Refuse
		}
		return openstacktest.None
	}
	w.create(w.newService("b", nil, 80))
	_ = w.converge() // pairs cannot be set
	r, err := l.Reconcile(t.Context(), reconcile.Request{NamespacedName: gatewaysKey})
	if err != nil || r.RequeueAfter <= 0 || r.RequeueAfter > silenceTimeout {
		t.Errorf("the next look is in %v, %v; want one within %v", r.RequeueAfter, err, silenceTimeout)
	}
	delete(w.gateways.away, "gw1")
	if r, err := l.Reconcile(t.Context(), reconcile.Request{NamespacedName: gatewaysKey}); err != nil || r.RequeueAfter > 0 {
		t.Errorf("with no gateway silent: %v, %v; the lane retries", r, err)
	}
}

// Services that ask a failover IP pool for something impossible get a message.
func TestFailoverIPRefusesServices(t *testing.T) {
	w := failoverTestbed(t)
	w.create(w.newService("a", annotation(service.AnnotationPool, "moving"), 80))
	w.noError(w.converge())
	taken := addresses(w.get("a"))[0]
	free, err := w.cloud.ReserveFloatingIP(t.Context(), openstacktest.External, "other.x")
	w.noError(err)
	lent := func(addr string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			delete(s.Annotations, service.AnnotationPool)
			annotation(service.AnnotationFloatingIP, addr)(s)
		}
	}
	for name, tc := range map[string]struct {
		change func(*corev1.Service)
		port   int32
		says   string
	}{
		"collides": {func(*corev1.Service) {}, 80, "has one floating IP, at which another Service uses one of these ports"},
		"agent":    {func(*corev1.Service) {}, 9479, "spec.ports: the agent of gateway gw1 listens on 9479/TCP"},
		"none":     {annotation(service.AnnotationFloatingIP, "none"), 81, `floating-ip is "none"`},
		"retain":   {annotation(service.AnnotationFloatingIPAfterwards, "retain"), 81, `floating-ip-afterwards is "retain"`},
		"six":      {func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol} }, 81, "has only [IPv4]"},
		"in-use":   {lent(taken), 81, "was allocated for service"},
		"of-pool":  {lent(free.Addr.String()), 81, "belongs to a pool"},
	} {
		s := w.newService(name, annotation(service.AnnotationPool, "moving"), tc.port)
		tc.change(s)
		w.create(s)
		w.noError(w.converge())
		c := meta.FindStatusCondition(w.get(name).Status.Conditions, service.ConditionMapped)
		if c == nil || c.Reason != service.ReasonInvalid || !strings.Contains(c.Message, tc.says) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// An address with another cluster's floating IP is left alone.
func TestFailoverIPSkipsTakenAddress(t *testing.T) {
	w := failoverTestbed(t)
	theirs := w.connect("cluster-b")
	f, err := theirs.ReserveFloatingIP(t.Context(), openstacktest.External, "x.y")
	w.noError(errors.Join(err, theirs.AssociateFloatingIP(t.Context(), f.ID, openstacktest.Gateway1, openstacktest.GatewayAddrs[0])))
	w.create(w.newService("a", annotation(service.AnnotationPool, "moving"), 80))
	w.noError(w.converge())
	w.refresh()
	if n := w.gateway("gw2"); !slices.Equal(n.Status.FloatingIPs, addresses(w.get("a"))) {
		t.Errorf("gw2 has %v, the Service %v", n.Status.FloatingIPs, addresses(w.get("a")))
	}
}

func TestFailoverIPSettings(t *testing.T) {
	for says, change := range map[string]func(*Settings){
		`pools[2].failoverIP needs announce "none" and return "masquerade"`: func(s *Settings) { s.Pools[2].Return = desired.SNAT },
		"pools[2].failoverIP.floatingNetwork is missing":                    func(s *Settings) { s.Pools[2].FailoverIP.FloatingNetwork = "" },
		"set one of neutron, failoverIP and addresses":                      func(s *Settings) { s.Pools[2].Addresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} },
		"pools[3].group: the floating IP of pool moving already leads":      func(s *Settings) { s.Pools = append(s.Pools, s.Pools[2]); s.Pools[3].Name = "more" },
	} {
		s := failoverSettings()
		change(&s)
		if err := s.Complete(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q in it", err, says)
		}
	}
	s := failoverSettings()
	if err := s.Complete(); err != nil {
		t.Error(err)
	}
}
