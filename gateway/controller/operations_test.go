package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// annotation returns a change that sets an annotation.
func annotation(name, value string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[name] = value
	}
}

// The three handlers of the design, event by event.
func TestHandlers(t *testing.T) {
	w := newTestbed(t)
	portOf := func(name string) string { return w.get(name).Annotations[service.AnnotationPort] }
	handle := func(name string) {
		t.Helper()
		w.noError(w.Handle(t.Context(), types.NamespacedName{Namespace: w.ns, Name: name}))
	}
	w.noError(w.Sync(t.Context()))

	w.create(w.newService("foreign", func(s *corev1.Service) { s.Spec.LoadBalancerClass = new("example.com/other") }, 80))
	handle("foreign")
	if s := w.get("foreign"); managed(s) || len(s.Annotations) > 0 || len(w.events) > 0 {
		t.Errorf("not managed and cannot be: %v, %v", s.Annotations, w.events)
	}

	w.create(w.newService("a", nil, 80))
	handle("a")
	if s := w.get("a"); !managed(s) || s.Annotations[service.AnnotationManaged] != "true" || portOf("a") != "" || !w.hasEvent("TakenOver a") {
		t.Errorf("not managed and can be: %v", s.Annotations)
	}
	handle("a")
	if portOf("a") == "" || len(addresses(w.get("a"))) != 1 || !w.hasEvent("Mapped a: reachable at "+addresses(w.get("a"))[0]) {
		t.Errorf("managed without a port: %v", w.get("a").Annotations)
	}
	w.noError(w.converge()) // the gateways get it when their ports let it pass
	had, writes := portOf("a"), w.writes.Load()
	handle("a")
	handle("a")
	if portOf("a") != had || len(w.events) > 0 || w.writes.Load() > writes+1 { // the verdict of the gateways may be new
		t.Errorf("managed with a port: port %s, events %v, %d writes", portOf("a"), w.events, w.writes.Load()-writes)
	}
	w.edit("a", annotation(service.AnnotationManaged, "false"))
	handle("a")
	if s := w.get("a"); managed(s) || portOf("a") != "" || len(addresses(s)) > 0 || s.Annotations[service.AnnotationManaged] != "false" || !w.hasEvent("Unmapped a") {
		t.Errorf("managed and cannot be: %v %v", s.Annotations, s.Finalizers)
	}
	w.edit("a", annotation(service.AnnotationManaged, "true"))
	handle("a")
	handle("a")
	w.remove("a")
	handle("a")
	if names := w.names(); len(names) != 1 { // foreign
		t.Errorf("deleted: services %v", names)
	}
	if ports, fips := w.fake.Objects(); len(ports)+len(fips) > 0 {
		t.Errorf("deleted: ports %v, floating IPs %v", ports, fips)
	}
}

// Services share a port while their L4 ports do not collide. The same request gets the same port.
func TestServicesShareAPort(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	for _, s := range []*corev1.Service{
		w.newService("a", nil, 80), w.newService("b", nil, 443), w.newService("c", nil, 80),
		w.newService("d", annotation(service.AnnotationFloatingIP, "none"), 8080),
		w.newService("e", func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP }, 80),
	} {
		w.create(s)
		w.noError(w.converge())
	}
	port := map[string]string{}
	for _, n := range w.names() {
		port[n.Name] = w.get(n.Name).Annotations[service.AnnotationPort]
	}
	if port["a"] != port["b"] || port["a"] != port["e"] {
		t.Errorf("no collision, but ports %v", port)
	}
	if port["a"] == port["c"] || port["a"] == port["d"] || port["c"] == port["d"] {
		t.Errorf("80/TCP twice, or a floating IP and none, at one port: %v", port)
	}
	w.checkInvariants()
	w.start()
	w.noError(w.Sync(t.Context()))
	w.noError(w.converge())
	before := w.writes.Load()
	w.start()
	w.noError(errors.Join(w.Sync(t.Context()), w.converge()))
	if n := w.writes.Load() - before; n != 0 {
		t.Errorf("a restart wrote %d times", n)
	}
}

// count counts writes to Neutron from now on, by method and kind of object.
func (w *testbed) count() (asked func() map[string]int) {
	var one sync.Mutex
	n := map[string]int{}
	w.fake.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method != http.MethodGet {
			one.Lock()
			defer one.Unlock()
			_, of, _ := strings.Cut(r.URL.Path, "/v2.0/")
			kind, _, _ := strings.Cut(of, "s")
			n[r.Method+" "+kind]++
		}
		return openstacktest.None
	}
	return func() map[string]int {
		one.Lock()
		defer one.Unlock()
		return maps.Clone(n)
	}
}

// said returns the number of events with a reason.
func (w *testbed) said(reason string) (n int) {
	for _, e := range w.events {
		if strings.HasPrefix(e, reason+" ") {
			n++
		}
	}
	return n
}

// If two Services claim the same ports by annotation, the older one keeps them.
func TestCollidingClaims(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("old", nil, 80))
	w.noError(w.converge())
	old := w.get("old")
	young := w.newService("young", annotation(service.AnnotationPort, old.Annotations[service.AnnotationPort]), 80)
	young.Finalizers = []string{service.Finalizer}
	young.CreationTimestamp = metav1.NewTime(old.CreationTimestamp.Add(1e9))
	w.create(young)
	w.events = nil
	asked := w.count()
	w.recover()
	w.checkInvariants()
	if n := w.said("Remapped"); n != 1 || !w.hasEvent("Remapped young") {
		t.Errorf("%d Services moved, want the younger one", n)
	}
	if diff := cmp.Diff(map[string]int{"POST port": 1, "POST floatingip": 1, "PUT port": 2}, asked()); diff != "" {
		t.Errorf("writes to Neutron (-want +have):\n%s", diff)
	}
	if is := w.get("old"); !slices.Equal(addresses(is), addresses(old)) {
		t.Errorf("the older one moved from %v to %v", addresses(old), addresses(is))
	}
}

// The user's spec.externalIPs stay, whatever the controller does with its own.
func TestExternalIPs(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", func(s *corev1.Service) {
		annotation(service.AnnotationExternalIPs, "true")(s)
		s.Spec.ExternalIPs = []string{"198.51.100.1"}
	}, 80))
	w.noError(w.converge())
	s := w.get("a")
	if diff := cmp.Diff(append([]string{"198.51.100.1"}, addresses(s)...), s.Spec.ExternalIPs); diff != "" {
		t.Errorf("externalIPs (-want +have):\n%s", diff)
	}
	w.edit("a", func(s *corev1.Service) { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, "198.51.100.2") })
	w.noError(w.converge())
	w.recover()
	w.edit("a", annotation(service.AnnotationExternalIPs, "false"))
	w.noError(w.converge())
	if diff := cmp.Diff([]string{"198.51.100.1", "198.51.100.2"}, w.get("a").Spec.ExternalIPs); diff != "" {
		t.Errorf("externalIPs without ours (-want +have):\n%s", diff)
	}
}

// A floating IP of the user leads to the Service that names it, and survives it.
func TestFloatingIPByName(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	p, err := w.connect("theirs").CreatePort(t.Context(), openstack.PortRequest{Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4}, Purpose: "x"})
	w.noError(err)
	f, err := w.connect("theirs").CreateFloatingIP(t.Context(), openstacktest.External, p.ID, p.Addrs[0])
	w.noError(err)
	made := 0
	w.fake.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodPost {
			made++
		}
		return openstacktest.None
	}
	w.create(w.newService("a", annotation(service.AnnotationFloatingIP, f.Addr.String()), 80))
	w.noError(w.converge())
	if c := meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionMapped); c == nil || c.Reason != service.ReasonInvalid || !strings.Contains(c.Message, "leads to port "+p.ID) {
		t.Errorf("a floating IP that leads elsewhere: %+v", c)
	}
	if made > 0 {
		t.Errorf("%d objects were made for nothing", made)
	}
	w.fake.Fault = nil
	w.noError(w.connect("theirs").AssociateFloatingIP(t.Context(), f.ID, "", netip.Addr{}))
	w.noError(w.converge())
	if got := addresses(w.get("a")); !slices.Equal(got, []string{f.Addr.String()}) {
		t.Errorf("addresses %v, want %s", got, f.Addr)
	}
	w.create(w.newService("b", annotation(service.AnnotationFloatingIP, f.ID), 80))
	w.noError(w.converge())
	if c := meta.FindStatusCondition(w.get("b").Status.Conditions, service.ConditionMapped); c == nil || c.Reason != service.ReasonInvalid || !strings.Contains(c.Message, "80/TCP of floating IP") {
		t.Errorf("80/TCP of it a second time: %+v", c)
	}
	w.remove("b")
	w.remove("a")
	w.noError(w.converge())
	if is, err := w.cloud.FindFloatingIP(t.Context(), f.ID); err != nil || is.Port != "" {
		t.Errorf("it is %+v, %v", is, err)
	}
}

func TestRetainedFloatingIP(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", annotation(service.AnnotationFloatingIPAfterwards, "retain"), 80))
	w.noError(w.converge())
	had := addresses(w.get("a"))
	w.remove("a")
	w.noError(errors.Join(w.converge(), w.Sync(t.Context())))
	w.create(w.newService("a", annotation(service.AnnotationFloatingIP, had[0]), 80))
	w.noError(w.converge())
	if got := addresses(w.get("a")); !slices.Equal(got, had) {
		t.Errorf("made again it has %v, want %v", got, had)
	}
}

// Objects that were deleted by hand are created again, and the Service reports its new address.
func TestDeletedByHand(t *testing.T) {
	for name, tc := range map[string]struct {
		remove func(w *testbed, port, floating string)
		writes map[string]int // to Neutron
	}{
		"the floating IP": {
			func(w *testbed, _, floating string) { w.fake.Remove(floating) },
			map[string]int{"POST floatingip": 1},
		},
		"the port": { // a floating IP of it is left; the address is withdrawn before there is another one
			func(w *testbed, port, _ string) { w.fake.Remove(port) },
			map[string]int{"POST port": 1, "POST floatingip": 1, "PUT port": 4, "DELETE floatingip": 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			w.noError(w.Sync(t.Context()))
			w.create(w.newService("a", nil, 80), w.newService("b", nil, 443))
			w.noError(w.converge())
			_, fips := w.fake.Objects()
			had := addresses(w.get("a"))
			tc.remove(w, w.get("a").Annotations[service.AnnotationPort], fips[0])
			w.events = nil
			asked := w.count()
			w.noError(errors.Join(w.Sync(t.Context()), w.converge()))
			w.checkInvariants()
			if diff := cmp.Diff(tc.writes, asked()); diff != "" {
				t.Errorf("writes to Neutron (-want +have):\n%s", diff)
			}
			if n := w.said("Remapped"); n != 2 || slices.Equal(addresses(w.get("a")), had) {
				t.Errorf("%d events of 2 Services that were at %v and are at %v", n, had, addresses(w.get("a")))
			}
			if !w.hasEvent("Remapped a: now reachable at " + addresses(w.get("a"))[0]) {
				t.Error("no event says so")
			}
			if a, b := addresses(w.get("a")), addresses(w.get("b")); !slices.Equal(a, b) {
				t.Errorf("they shared an address and have %v and %v", a, b)
			}
		})
	}
}

func TestQuotaExhausted(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.fake.SetQuota("floatingip", 0)
	w.create(w.newService("a", nil, 80), w.newService("list", annotation(service.AnnotationPool, "list"), 80))
	if err := w.converge(); !errors.Is(err, openstack.ErrQuota) {
		t.Fatalf("%v", err)
	}
	c := meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionMapped)
	if c == nil || c.Status != metav1.ConditionFalse || c.Reason != service.ReasonQuotaExceeded || !w.hasEvent("QuotaExceeded a") {
		t.Errorf("condition %+v", c)
	}
	if got := addresses(w.get("list")); !slices.Equal(got, []string{"192.0.2.9"}) {
		t.Errorf("a Service that needs none of it has %v", got)
	}
	w.noError(w.Sync(t.Context()))
	if w.hasEvent("QuotaExceeded") {
		t.Error("it is said twice")
	}
	w.fake.SetQuota("floatingip", 1)
	w.noError(w.converge())
	w.checkInvariants()
}

// first breaks the first n requests to Neutron.
func first(n int, fault openstacktest.Fault) func(*http.Request) openstacktest.Fault {
	return func(*http.Request) openstacktest.Fault {
		if n--; n >= 0 {
			return fault
		}
		return openstacktest.None
	}
}

// No fault of the cloud takes anything away from a Service, or leaks an object.
func TestCloudFaults(t *testing.T) {
	for name, fault := range map[string]openstacktest.Fault{
		"503": openstacktest.Refuse, "no answer": openstacktest.Lose, "token expired": openstacktest.Expire, "401": openstacktest.Deny, "412": openstacktest.Stale, "409": openstacktest.Taken,
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
			t.Run(name+" to "+method, func(t *testing.T) {
				w := newTestbed(t)
				w.noError(w.Sync(t.Context()))
				w.create(w.newService("old", nil, 80), w.newService("gone", nil, 80))
				w.noError(w.converge())
				had := addresses(w.get("old"))
				w.create(w.newService("new", annotation(service.AnnotationFloatingIPAfterwards, "retain"), 80))
				w.remove("gone")
				every, broken := 0, 0
				w.fake.Fault = func(r *http.Request) openstacktest.Fault {
					if r.Method != method {
						return openstacktest.None
					}
					if every++; every%2 == 1 {
						broken++
						return fault
					}
					return openstacktest.None
				}
				for range 12 {
					_ = w.converge()
				}
				if got := addresses(w.get("old")); !slices.Equal(got, had) {
					t.Errorf("meanwhile it is reached at %v, before %v", got, had)
				}
				w.fake.Fault = nil
				w.noError(errors.Join(w.Sync(t.Context()), w.converge()))
				w.checkInvariants()
				if got := addresses(w.get("old")); !slices.Equal(got, had) {
					t.Errorf("it is reached at %v, before %v", got, had)
				}
				if broken == 0 {
					t.Error("no request was broken")
				}
				t.Logf("%d requests broken", broken)
			})
		}
	}
}

// While credentials are refused, a lane pauses after each call, as while the cloud fails. Here its pause is over at once, and each
// Service has one call: a request, and another one with a new token.
func TestRevokedCredentials(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	denied := 0
	w.fake.Fault = func(*http.Request) openstacktest.Fault {
		denied++
		return openstacktest.Deny
	}
	const services = 10
	for i := range services {
		w.create(w.newService(fmt.Sprint("new-", i), nil, 80))
	}
	if err := w.converge(); !errors.Is(err, openstack.ErrCredentials) {
		t.Errorf("%v, want refused credentials", err)
	}
	if denied == 0 || denied > 2*services {
		t.Errorf("%d requests were denied, want some, and at most %d", denied, 2*services)
	}
	w.fake.Fault = nil
	w.noError(errors.Join(w.Sync(t.Context()), w.converge()))
	w.checkInvariants()
}

// While calls to Neutron hang, endpoints reach the gateways, Services with an address are edited, and Services before lists
// come and go.
func TestHangingCloud(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
		t.Run(method, func(t *testing.T) {
			w := newTestbed(t)
			w.noError(w.Sync(t.Context()))
			w.create(w.newService("old", nil, 80), w.newService("gone", nil, 80), w.newService("list", annotation(service.AnnotationPool, "list"), 80))
			w.setEndpoints("old", "10.1.0.1")
			w.noError(w.converge())
			had := addresses(w.get("old"))
			hung, release := w.hang(method)
			w.create(w.newService("new", nil, 80), w.newService("list2", annotation(service.AnnotationPool, "list"), 80))
			w.remove("gone")
			w.remove("list")
			_ = errors.Join(w.converge(), w.Sync(t.Context()), w.converge())
			w.setEndpoints("old", "10.1.0.2")
			w.edit("old", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"} })
			_ = w.converge()
			w.noError(w.Refresh(t.Context()))
			for name, s := range w.gateways.states {
				have, _ := backendsOf(s, w.ns+"/old")
				i := slices.IndexFunc(s.VIPs, func(v desired.VIP) bool { return v.Frontends[0].Service == w.ns+"/old" })
				if !slices.Equal(have, []string{"10.1.0.2"}) || len(s.VIPs[i].Frontends[0].Sources) != 1 {
					t.Errorf("gateway %s has %+v", name, s.VIPs)
				}
				if _, ok := backendsOf(s, w.ns+"/gone"); ok {
					t.Errorf("gateway %s has the deleted Service", name)
				}
				if _, ok := backendsOf(s, w.ns+"/list2"); !ok {
					t.Errorf("gateway %s lacks the new Service with an address of a list", name)
				}
			}
			if slices.ContainsFunc(w.names(), func(n types.NamespacedName) bool { return n.Name == "list" }) {
				t.Error("the Service with an address of a list is still there")
			}
			if hung() == 0 || !slices.Equal(addresses(w.get("old")), had) {
				t.Errorf("with %d hanging requests it is reached at %v, before at %v", hung(), addresses(w.get("old")), had)
			}
			release()
			w.recover()
			w.checkInvariants()
		})
	}
}

// hang makes requests of Neutron with a method hang until release is called. It returns the number of those that do.
func (w *testbed) hang(method string) (hung func() int, release func()) {
	w.t.Helper()
	c, err := openstack.Connect(w.t.Context(), openstack.Config{Cloud: "test", File: w.fake.CloudsYAML(w.t), Cluster: "cluster-a", Timeout: time.Hour})
	w.noError(err)
	patient := w.cloud
	w.cloud = c
	w.start()
	w.worker.cloud = c // without a crasher, which makes one call at a time
	w.init()
	w.noError(errors.Join(w.Sync(w.t.Context()), w.converge()))
	n, hangs := 0, make(chan struct{}, 1000)
	w.fake.SetFaults(func(r *http.Request) openstacktest.Fault {
		if r.Method != method {
			return openstacktest.None
		}
		hangs <- struct{}{}
		return openstacktest.Hang
	}, nil)
	var calls sync.WaitGroup
	ctx, cancel := context.WithCancel(w.t.Context())
	w.lanes.ctx = ctx
	w.run = func(call func()) {
		done := make(chan struct{})
		calls.Go(func() { call(); close(done) })
		select {
		case <-done:
		case <-hangs:
			n++
		}
	}
	return func() int { return n }, func() {
		w.fake.SetFaults(nil, nil)
		cancel()
		calls.Wait()
		w.run, w.cloud = func(call func()) { call() }, patient
	}
}

// An invalid request is reported, and the Service keeps what it has.
func TestInvalidSpecKeepsAddresses(t *testing.T) {
	in := func(pool, floating string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			annotation(service.AnnotationPool, pool)(s)
			annotation(service.AnnotationFloatingIP, floating)(s)
		}
	}
	for name, tc := range map[string]struct {
		change func(*corev1.Service)
		says   string
	}{
		"unknown pool":                 {annotation(service.AnnotationPool, "gold"), `annotation gateway.isthmus.dev/pool is "gold"`},
		"SCTP alone":                   {func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP }, "gateways balance TCP and UDP, and the Service has only"},
		"no such address":              {annotation(service.AnnotationFloatingIP, "203.0.113.250"), "the project has no floating IP 203.0.113.250"},
		"a pool of the other family":   {annotation(service.AnnotationPool, "six"), "pool six has only [IPv6]"},
		"allocation from a list":       {in("list", "allocate"), "pool list has no floating IPs"},
		"a named one of a list":        {in("list", "203.0.113.250"), "pool list has no floating IPs"},
		"allocation without a network": {in("plain", "allocate"), "pool plain has no floating IPs"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			settings := testSettings()
			plain := settings.Pools[0]
			of := *plain.Neutron
			of.FloatingNetwork = ""
			plain.Name, plain.Neutron = "plain", &of
			settings.Pools = append(settings.Pools, plain, Pool{Name: "six", Announce: desired.ByNone, Return: desired.Routed, Addresses: []netip.Prefix{netip.MustParsePrefix("2001:db8:6::/126")}})
			w.startWith(settings, nil)
			w.noError(w.Sync(t.Context()))
			w.create(w.newService("a", nil, 80))
			w.noError(w.converge())
			had, state := addresses(w.get("a")), w.gateways.states["gw1"]
			made, _ := w.fake.Objects()
			w.edit("a", tc.change)
			w.create(w.newService("new", tc.change, 443)) // which has nothing
			for range 2 {                                 // with and without the remembered spec
				w.noError(w.converge())
				s := w.get("a")
				for _, of := range []*corev1.Service{s, w.get("new")} {
					c := meta.FindStatusCondition(of.Status.Conditions, service.ConditionMapped)
					if c == nil || c.Reason != service.ReasonInvalid || !strings.Contains(c.Message, tc.says) {
						t.Errorf("condition of %s: %+v", of.Name, c)
					}
				}
				if now, _ := w.fake.Objects(); !slices.Equal(now, made) {
					t.Errorf("ports %v, before %v", now, made)
				}
				if !slices.Equal(addresses(s), had) {
					t.Errorf("it is reached at %v, before %v", addresses(s), had)
				}
				w.startWith(settings, nil)
				w.noError(w.Sync(t.Context()))
			}
			if is := w.gateways.states["gw1"]; len(is.VIPs) != 1 || is.VIPs[0].Addr != state.VIPs[0].Addr {
				t.Errorf("the gateway has %+v, before %+v", is.VIPs, state.VIPs)
			}
		})
	}
}

// Neutron lets the VIPs pass at the gateways' ports, and foreign pairs stay.
func TestAddressPairs(t *testing.T) {
	w := newTestbed(t)
	foreign := netip.MustParsePrefix("198.51.100.7/32")
	w.noError(w.cloud.SetAddressPairs(t.Context(), openstacktest.Gateway1, nil, []netip.Prefix{foreign}))
	w.noError(w.Sync(t.Context()))
	for i := range 9 { // as many as fit beside the foreign one
		w.create(w.newService(fmt.Sprintf("s%d", i), nil, 80))
	}
	w.noError(w.converge())
	pairs, err := w.cloud.AddressPairs(t.Context(), openstacktest.Gateway1)
	if err != nil || len(pairs) != 10 || !slices.Contains(pairs, foreign) {
		t.Errorf("pairs %v, %v", pairs, err)
	}
	w.events = nil
	for _, name := range []string{"too-many", "more"} {
		w.create(w.newService(name, nil, 80))
	}
	if err := w.converge(); !errors.Is(err, openstack.ErrPairs) {
		t.Errorf("two too many: %v", err)
	}
	w.full("with two too many", map[string]int{openstacktest.Gateway1: 2, openstacktest.Gateway2: 1})
	if n := len(slices.DeleteFunc(w.events, func(e string) bool { return !strings.HasPrefix(e, service.ReasonRefused) })); n != 2 {
		t.Errorf("%d events say it of 2 Services", n)
	}
	writes := w.writes.Load()
	if err := w.Refresh(t.Context()); !errors.Is(err, openstack.ErrPairs) || w.writes.Load() != writes {
		t.Errorf("another attempt: %v, %d writes to the API server", err, w.writes.Load()-writes)
	}
	if c := meta.FindStatusCondition(w.gateway("gw1").Status.Conditions, v1alpha1.ConditionAddressPairs); c == nil || c.Status != metav1.ConditionFalse {
		t.Errorf("condition of the gateway: %+v", c)
	}
	// Pairs of a deleted Service are free for another one at once, also after a restart.
	w.remove("s3")
	_ = w.converge()
	w.full("with one too many", map[string]int{openstacktest.Gateway1: 1})
	w.start()
	_ = errors.Join(w.Sync(t.Context()), w.converge())
	w.full("after a restart", map[string]int{openstacktest.Gateway1: 1})
	w.remove("s5")
	w.noError(w.converge())
	w.full("when all have room", nil)
	for _, n := range w.names() {
		w.remove(n.Name)
	}
	w.noError(w.converge())
	if pairs, err := w.cloud.AddressPairs(t.Context(), openstacktest.Gateway1); err != nil || !slices.Equal(pairs, []netip.Prefix{foreign}) {
		t.Errorf("in the end pairs %v, %v", pairs, err)
	}
}

// full verifies that exactly the Services without room at a gateway's port report it, and that such a port is full.
func (w *testbed) full(step string, want map[string]int) {
	w.t.Helper()
	passes := map[string][]netip.Prefix{}
	for _, gateway := range []string{openstacktest.Gateway1, openstacktest.Gateway2} {
		pairs, err := w.cloud.AddressPairs(w.t.Context(), gateway)
		w.noError(err)
		passes[gateway] = pairs
		if want[gateway] > 0 && len(pairs) != 10 {
			w.t.Errorf("%s: port %s has %d pairs of 10", step, gateway, len(pairs))
		}
	}
	missing := map[string]int{}
	ports, err := w.cloud.Ports(w.t.Context())
	w.noError(err)
	for _, n := range w.names() {
		s := w.get(n.Name)
		vip := ports[slices.IndexFunc(ports, func(p openstack.Port) bool { return p.ID == s.Annotations[service.AnnotationPort] })].Addrs[0]
		reason, says := service.ReasonApplied, ""
		for _, gateway := range []string{openstacktest.Gateway2, openstacktest.Gateway1} {
			if !slices.Contains(passes[gateway], netip.PrefixFrom(vip, vip.BitLen())) {
				missing[gateway]++
				reason, says = service.ReasonRefused, "max_allowed_address_pair"
			}
		}
		if c := meta.FindStatusCondition(s.Status.Conditions, service.ConditionApplied); c == nil || c.Reason != reason || !strings.Contains(c.Message, says) {
			w.t.Errorf("%s: Service %s at %s, want %s: %+v", step, n.Name, vip, reason, c)
		}
	}
	if !maps.Equal(missing, want) {
		w.t.Errorf("%s: Services without a pair, by port: %v, want %v", step, missing, want)
	}
}

func (w *testbed) gateway(name string) *v1alpha1.GatewayNode {
	w.t.Helper()
	var n v1alpha1.GatewayNode
	w.noError(w.api.Get(w.t.Context(), types.NamespacedName{Name: name}, &n))
	return &n
}

// Errors of gateways are in the statuses of Services and GatewayNodes.
func TestFailingGateways(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	applied := func(of string) (reason string) {
		t.Helper()
		w.requeued = append(w.requeued, gatewaysKey)
		w.noError(w.converge())
		if of == "a" {
			return meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionApplied).Reason
		}
		return meta.FindStatusCondition(w.gateway(of).Status.Conditions, v1alpha1.ConditionApplied).Reason
	}
	want := func(step, a, gw1, gw2 string) {
		t.Helper()
		if got := []string{applied("a"), applied("gw1"), applied("gw2")}; !slices.Equal(got, []string{a, gw1, gw2}) {
			t.Errorf("%s: the Service, gw1 and gw2 say %v", step, got)
		}
	}
	w.create(w.newService("a", nil, 80), w.endpointSlice("a", []int32{80}, "10.1.0.1"))
	asked := w.count()
	// have verifies the number of ports and backends at each gateway.
	have := func(step string, gw1, gw2 [2]int) {
		t.Helper()
		for name, want := range map[string][2]int{"gw1": gw1, "gw2": gw2} {
			is := [2]int{}
			for _, v := range w.gateways.states[name].VIPs {
				for _, f := range v.Frontends {
					is[0]++
					is[1] += len(f.Backends)
				}
			}
			if is != want {
				t.Errorf("%s: gateway %s has %d ports with %d backends, want %d with %d", step, name, is[0], is[1], want[0], want[1])
			}
		}
	}
	want("all is well", "Applied", "Applied", "Applied")
	have("all is well", [2]int{1, 1}, [2]int{1, 1})
	wrote := asked()
	w.gateways.away["gw1"] = errors.New("connection refused")
	w.create(w.newService("b", nil, 443))
	want("gw1 is away", "Applied", "Pending", "Applied")
	have("gw1 is away", [2]int{1, 1}, [2]int{2, 1})
	w.gateways.away["gw2"] = w.gateways.away["gw1"]
	slice := w.endpointSlice("a", []int32{80}, "10.1.0.2", "10.1.0.3")
	slice.Name = "a-2"
	w.create(slice)
	want("both are away", "NoGateway", "Pending", "Pending")
	have("both are away", [2]int{1, 1}, [2]int{2, 1})
	if got := addresses(w.get("a")); len(got) != 1 || !slices.Equal(got, addresses(w.get("b"))) || w.said("Remapped")+w.said("Unmapped") > 0 {
		t.Errorf("with both away they are reached at %v and %v", got, addresses(w.get("b")))
	}
	w.gateways.away = map[string]error{}
	want("both are back", "Applied", "Applied", "Applied")
	have("both are back", [2]int{2, 3}, [2]int{2, 3})
	if diff := cmp.Diff(wrote, asked()); diff != "" {
		t.Errorf("writes to Neutron meanwhile (-before +after):\n%s", diff)
	}
	w.gateways.refuse["gw2"] = w.refusal("a")
	want("gw2 refuses the Service", "Refused", "Applied", "Refused")
	if !w.hasEvent("Refused a: gateway gw2: map full") {
		t.Error("no event says so")
	}
	w.gateways.refuse = map[string]*agents.Refused{}
	want("both accept it", "Applied", "Applied", "Applied")
	n := w.gateway("gw2")
	n.Spec.Balancer = "ebpf"
	w.noError(w.api.Update(t.Context(), n))
	before := w.gateways.states["gw2"]
	want("two balancers in one group", "Applied", "Applied", "MixedBalancers")
	if now := w.gateways.states["gw2"]; now.Hash() != before.Hash() {
		t.Error("a gateway with another balancer than its group received a state")
	}
	if peers := w.gateways.states["gw1"].Peers; len(peers) > 0 {
		t.Errorf("gateways with different balancers are peers: %v", peers)
	}
}

// A Service without changes neither waits for a cloud that is down, nor sends it requests.
func TestUnchangedServicesNeedNoCloud(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80))
	w.noError(w.converge())
	asked := 0
	w.fake.Fault = func(*http.Request) openstacktest.Fault { asked++; return openstacktest.Refuse }
	w.create(w.endpointSlice("a", []int32{80}, "10.1.0.1"))
	w.edit("a", func(s *corev1.Service) { s.Labels = map[string]string{"changed": "yes"} })
	w.noError(errors.Join(w.converge(), w.Refresh(t.Context())))
	if asked > 0 {
		t.Errorf("the cloud was asked %d times", asked)
	}
	if b := w.gateways.states["gw1"].VIPs[0].Frontends[0].Backends; len(b) != 1 {
		t.Errorf("the gateway has the backends %v", b)
	}
}

// Nor does it wait because another Service left objects that cannot be deleted now.
func TestUnchangedServicesDoNotWait(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80))
	w.noError(w.converge())
	w.create(w.newService("b", nil, 80))
	name := types.NamespacedName{Namespace: w.ns, Name: "b"}
	w.noError(w.Handle(t.Context(), name)) // it is taken over
	asked := 0
	w.fake.Fault = func(r *http.Request) openstacktest.Fault {
		asked++
		if r.Method == http.MethodPost {
			return openstacktest.Lose
		}
		return openstacktest.None
	}
	if err := w.Handle(t.Context(), name); err == nil || asked == 0 {
		t.Fatalf("%v after %d requests, want an answer that is lost", err, asked)
	}
	w.fake.Fault = func(*http.Request) openstacktest.Fault { asked++; return openstacktest.Refuse }
	for range 3 {
		w.noError(w.worker.Handle(t.Context(), types.NamespacedName{Namespace: w.ns, Name: "a"}))
	}
	if len(w.calls) > 0 {
		t.Errorf("it left %d calls to lanes", len(w.calls))
	}
	if err := w.Clean(t.Context()); err == nil {
		t.Error("with the cloud away all was given back")
	}
	w.fake.Fault = nil
	w.noError(w.converge())
	w.checkInvariants()
}

// A floating IP of other Services stays, even if another Service names it.
func TestFloatingIPInUse(t *testing.T) {
	for name, change := range map[string]func(*corev1.Service){
		"other families": func(s *corev1.Service) {
			s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
			s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		},
		"another pool": annotation(service.AnnotationPool, "second"),
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			settings := testSettings()
			second := settings.Pools[0]
			second.Name = "second"
			settings.Pools = append(settings.Pools, second)
			w.startWith(settings, nil)
			w.noError(w.Sync(t.Context()))
			w.create(w.newService("theirs", annotation(service.AnnotationFloatingIPAfterwards, "retain"), 80))
			w.noError(w.converge())
			addr := addresses(w.get("theirs"))[0]
			w.remove("theirs")
			w.noError(w.converge())
			named := annotation(service.AnnotationFloatingIP, addr)
			w.create(w.newService("a", named, 80))
			w.noError(w.converge())
			port := w.get("a").Annotations[service.AnnotationPort]
			w.create(w.newService("b", func(s *corev1.Service) { named(s); change(s) }, 443))
			for range 3 {
				w.noError(errors.Join(w.converge(), w.Sync(t.Context())))
				all, err := w.cloud.AllFloatingIPs(t.Context())
				w.noError(err)
				if len(all) != 1 || all[0].Port != port {
					t.Errorf("floating IPs %+v, want that of a to lead to %s", all, port)
				}
			}
			c := meta.FindStatusCondition(w.get("b").Status.Conditions, service.ConditionMapped)
			if c == nil || c.Reason != service.ReasonInvalid || !strings.Contains(c.Message, "leads to the address of service "+w.ns+"/a") {
				t.Errorf("b: %+v", c)
			}
		})
	}
}

// Unreadable sources let no client in if the previous ones are unknown.
func TestUnreadableSources(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"} }, 80))
	w.noError(w.converge())
	sources := func() []netip.Prefix { return w.gateways.states["gw1"].VIPs[0].Frontends[0].Sources }
	had := sources()
	w.edit("a", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"010.0.0.0/8"} })
	w.noError(w.converge())
	if got := sources(); len(had) != 1 || !slices.Equal(got, had) {
		t.Errorf("sources %v, before %v", got, had)
	}
	w.recover()
	if got := sources(); !slices.Equal(got, noSource) {
		t.Errorf("sources %v after a restart, want %v", got, noSource)
	}
}

// A Service deleted during an outage of the cloud stays until its objects are deleted.
func TestDeletedAfterCleanup(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80))
	w.noError(w.converge())
	w.fake.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodDelete {
			return openstacktest.Refuse
		}
		return openstacktest.None
	}
	w.remove("a")
	if err := w.converge(); err == nil || len(w.names()) != 1 {
		t.Errorf("with the cloud away: %v, Services %v", err, w.names())
	}
	w.fake.Fault = nil
	w.noError(w.converge())
	if ports, fips := w.fake.Objects(); len(ports)+len(fips)+len(w.names()) > 0 {
		t.Errorf("left: %v %v %v", ports, fips, w.names())
	}
}

// A port is created before the Service records it. If the record fails and the Service then asks for something else, the
// port is deleted without waiting for the next full sync.
func TestUnrecordedPorts(t *testing.T) {
	both := func(s *corev1.Service) {
		s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	}
	for name, tc := range map[string]struct {
		fails  string // the first write of this kind to the API server
		has    bool   // a previous port
		sync   bool   // by Sync
		change func(*testbed)
		wrong  bool // the next request
	}{
		"it asks for another one":          {fails: "Patch", change: func(w *testbed) { w.edit("a", both) }},
		"it asks for another one, at Sync": {fails: "Patch", sync: true, change: func(w *testbed) { w.edit("a", both) }},
		"it moves to another one":          {fails: "Patch", has: true, change: func(w *testbed) { w.edit("a", func(s *corev1.Service) { s.Spec.IPFamilies = s.Spec.IPFamilies[:1] }) }},
		"it moves, and its status is late": {fails: "Status", has: true, change: func(*testbed) {}},
		"it is deleted":                    {fails: "Patch", change: func(w *testbed) { w.remove("a") }},
		"it is released":                   {fails: "Patch", change: func(w *testbed) { w.edit("a", annotation(service.AnnotationManaged, "false")) }},
		"its request becomes invalid":      {fails: "Patch", change: func(w *testbed) { w.edit("a", annotation(service.AnnotationPool, "none such")) }, wrong: true},
		"cleanup runs, then it changes": {fails: "Patch", change: func(w *testbed) {
			w.noError(w.updateAndClean(w.t.Context()))
			w.edit("a", both)
		}},
		"cleanup runs, then it is deleted": {fails: "Patch", change: func(w *testbed) {
			w.noError(w.updateAndClean(w.t.Context()))
			w.remove("a")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			k := &crasher{crashMode: crashMode{kind: tc.fails, fails: true}}
			w.startWith(testSettings(), k)
			w.noError(w.Sync(t.Context()))
			s := w.newService("a", annotation(service.AnnotationManaged, "true"), 80)
			s.Finalizers = []string{service.Finalizer}
			w.create(s)
			if tc.has {
				w.noError(w.converge())
				w.edit("a", both)
			}
			k.armed = true
			if tc.sync {
				w.noError(w.Sync(t.Context()))
			} else if err := w.converge(); !errors.Is(err, errFailed) {
				t.Fatalf("%v, want that a write fails", err)
			}
			k.armed = false
			tc.change(w)
			w.noError(w.converge())
			if tc.wrong {
				if made, _ := w.fake.Objects(); len(made) > 0 {
					t.Errorf("ports %v leaked", made)
				}
				return
			}
			w.checkInvariants()
		})
	}
}

// A Service with externalTrafficPolicy Local reports whether its backends do not see client addresses.
func TestLocalWithoutClientAddresses(t *testing.T) {
	w := newTestbed(t)
	w.startWith(func() Settings {
		s := testSettings()
		s.Pools[1].Return = desired.Routed
		return s
	}(), nil)
	w.noError(w.Sync(t.Context()))
	policy := func(p corev1.ServiceExternalTrafficPolicy) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = p }
	}
	w.create(w.newService("snat", policy(corev1.ServiceExternalTrafficPolicyCluster), 80))
	w.create(w.newService("routed", func(s *corev1.Service) {
		policy(corev1.ServiceExternalTrafficPolicyLocal)(s)
		annotation(service.AnnotationPool, "list")(s)
	}, 80))
	says := func(name, want string) {
		t.Helper()
		w.noError(w.converge())
		if c := meta.FindStatusCondition(w.get(name).Status.Conditions, service.ConditionMapped); c == nil || c.Status != metav1.ConditionTrue || c.Message != want {
			t.Errorf("%s: %+v, want %q", name, c, want)
		}
	}
	says("snat", "addresses of pool public")
	says("routed", "addresses of pool list")
	w.edit("snat", policy(corev1.ServiceExternalTrafficPolicyLocal))
	says("snat", "addresses of pool public; externalTrafficPolicy is Local, but backends do not see client addresses: the pool's return is snat, and only routed keeps them")
	w.edit("snat", policy(corev1.ServiceExternalTrafficPolicyCluster))
	says("snat", "addresses of pool public")
}
