package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

// await waits until a condition holds.
func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !is() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("it did not come to pass that %s", what)
		}
	}
}

// balancerPart is a balancer that does nothing.
type idleBalancer struct{}

func (idleBalancer) Name() string                                   { return desired.ComponentBalancer }
func (idleBalancer) Apply(context.Context, *desired.State) error    { return nil }
func (idleBalancer) Drift(context.Context) ([]desired.Fault, error) { return nil, nil }
func (idleBalancer) Close(context.Context, bool) error              { return nil }

// realGateway starts a gateway's agent. It returns the agent, its URL, and the TLS configuration of a controller.
func realGateway(t *testing.T, identity string) (*agent.Agent, string, func(string) *tls.Config) {
	t.Helper()
	return realGatewayWith(t, identity, idleBalancer{})
}

func realGatewayWith(t *testing.T, identity string, balancer agent.Component) (*agent.Agent, string, func(string) *tls.Config) {
	t.Helper()
	authority, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	source := func(identity string) *certs.Source {
		dir := t.TempDir()
		pair, err := authority.Issue(identity, time.Now(), time.Hour)
		files := certs.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
		if err := errors.Join(err, os.WriteFile(files.Cert, pair.Cert, 0o600), os.WriteFile(files.Key, pair.Key, 0o600), os.WriteFile(files.CA, authority.Cert, 0o600)); err != nil {
			t.Fatal(err)
		}
		s, err := certs.Open(files, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a, err := agent.New(agent.Config{
		Cluster: "cluster-a", Balancer: balancer, StatePath: filepath.Join(t.TempDir(), "state.json"), Version: "test", Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- a.Serve(ctx, listener, source(identity), certs.Controller) }()
	t.Cleanup(func() {
		stop()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
	return a, "https://" + listener.Addr().String(), source(certs.Controller).Client
}

// TestRun runs the controller as in a pod, with the rights of its role, against a real API server and the agent of a
// gateway: a Service is created, applied, and deleted again.
func TestRun(t *testing.T) {
	w := newAPITestbed(t)
	a, url, connect := realGateway(t, "gw1")
	n := w.gateway("gw1")
	n.Spec.URL = url
	n.Spec.BGP.Peers[0].PasswordSecret = "router"
	w.noError(w.api.Update(t.Context(), n))
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "router"}, Data: map[string][]byte{"password": []byte("s3cret")}})
	w.create(w.newService("a", annotation(service.AnnotationExternalIPs, "true"), 80), w.endpointSlice("a", []int32{80}, "10.1.0.2", "10.1.0.1"))

	quotaLimit.Reset() // of other tests
	first, second := w.runController(connect), w.runController(connect)
	await(t, "the Service is reached", func() bool {
		c := meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionApplied)
		return len(addresses(w.get("a"))) == 1 && c != nil && c.Status == metav1.ConditionTrue
	})
	ports, fips := w.fake.Objects()
	if len(ports) != 1 || len(fips) != 1 {
		t.Errorf("ports %v, floating IPs %v", ports, fips)
	}
	await(t, "the quota is published", func() bool { return gauges(t)["isthmus_gateway_quota_limit port"] == -1 })
	generation := a.Stats().Status.Generation
	slice := w.endpointSlice("a", []int32{80}, "10.1.0.1", "10.1.0.3")
	slice.Name = "a-2"
	w.create(slice)
	await(t, "a new endpoint is at the gateway", func() bool { return a.Stats().Status.Generation > generation })
	foreign := w.importSlice("hello", "x", "p443", "10.9.0.1")
	foreign.Labels[discoveryv1.LabelManagedBy] = "another.example.org"
	imports := w.newService("b", annotation(service.AnnotationServiceImport, "hello"), 443)
	imports.Spec.Selector = nil
	w.create(foreign, imports)
	await(t, "slices of other controllers are ignored", func() bool {
		c := meta.FindStatusCondition(w.get("b").Status.Conditions, service.ConditionApplied)
		return c != nil && c.Reason == service.ReasonForeignSlices
	})
	w.remove("b")
	await(t, "the Service before an import was deleted", func() bool { return len(w.names()) == 1 })
	await(t, "the GatewayNode says what is applied", func() bool {
		s := w.gateway("gw1").Status
		return s.Hash == a.Stats().Status.Hash && s.AppliedGeneration == int64(a.Stats().Status.Generation) && meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReachable)
	})
	if c := meta.FindStatusCondition(w.gateway("gw2").Status.Conditions, v1alpha1.ConditionReachable); c == nil || c.Status != metav1.ConditionFalse {
		t.Errorf("gw2, which is nowhere: %+v", c)
	}

	// When the holder of the Lease ends, the other replica takes over and changes nothing.
	had := addresses(w.get("a"))
	leader, standby := first, second
	if !isElected(first) {
		leader, standby = second, first
	}
	w.noError(leader.stop())
	await(t, "the other takes over", func() bool { return isElected(standby) && standby.Ready() == nil })
	w.remove("a")
	await(t, "the Service was deleted", func() bool { return len(w.names()) == 0 })
	if ports, fips := w.fake.Objects(); len(ports)+len(fips) > 0 {
		t.Errorf("of a Service at %v are left: ports %v, floating IPs %v", had, ports, fips)
	}
	w.noError(standby.stop())
}

// Only the holder of the Lease works. When another holder takes the Lease, the previous one is fenced before its next
// sync and before each write to Neutron, and the other replica waits.
func TestTwoControllersAndALease(t *testing.T) {
	w := newAPITestbed(t)
	one, two := w.runController(noTLS), w.runController(noTLS)
	await(t, "one of them works", func() bool { return isElected(one) && one.Ready() == nil || isElected(two) && two.Ready() == nil })
	if isElected(one) == isElected(two) {
		t.Fatal("both work")
	}
	leader, standby := one, two
	if isElected(two) {
		leader, standby = two, one
	}
	w.noError(leader.fence(t.Context()))
	var lease coordinationv1.Lease
	w.noError(w.api.Get(t.Context(), types.NamespacedName{Namespace: w.ns, Name: leaseName}, &lease))
	taken := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"holderIdentity":"third","leaseDurationSeconds":3600}}`))
	w.noError(w.api.Patch(t.Context(), &lease, taken))
	if err := leader.fence(t.Context()); err == nil || !strings.Contains(err.Error(), "the Lease belongs to third") {
		t.Errorf("the one that lost it: %v", err)
	}
	var asked atomic.Int32 // writes; it may still read
	w.fake.SetFaults(func(r *http.Request) openstacktest.Fault {
		if r.Method != http.MethodGet {
			asked.Add(1)
		}
		return openstacktest.None
	}, nil)
	if _, err := (&loop{worker: w.worker, controller: leader.Controller}).sync(t.Context()); err == nil || asked.Load() > 0 {
		t.Errorf("its next look: %v, %d writes to Neutron", err, asked.Load())
	}
	for what, err := range writes(t.Context(), fenced{w.cloud, leader.fence}) {
		if err == nil || !strings.Contains(err.Error(), "the Lease belongs to third") || asked.Load() > 0 {
			t.Errorf("%s: %v, %d writes to Neutron", what, err, asked.Load())
		}
	}
	if isElected(standby) {
		t.Error("the other one works")
	}
	w.noError(standby.stop())
	_ = leader.stop() // it may have noticed
	t.Logf("1 of 2 worked, and then none; %d writes to Neutron", asked.Load())
}

// writes makes each write of a cloud once.
func writes(ctx context.Context, c Cloud) map[string]error {
	port, floating, addr := openstacktest.Gateway1, "floating", openstacktest.GatewayAddrs[0]
	_, created := c.CreatePort(ctx, openstack.PortRequest{Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4}, Purpose: "public.x"})
	_, made := c.CreateFloatingIP(ctx, openstacktest.External, port, addr)
	_, reserved := c.ReserveFloatingIP(ctx, openstacktest.External, "moving.x")
	return map[string]error{
		"CreatePort": created, "CreateFloatingIP": made, "ReserveFloatingIP": reserved,
		"DeletePort": c.DeletePort(ctx, port), "DeleteFloatingIP": c.DeleteFloatingIP(ctx, floating), "RetainFloatingIP": c.RetainFloatingIP(ctx, floating, "demo"),
		"AssociateFloatingIP": c.AssociateFloatingIP(ctx, floating, port, addr), "SetAddressPairs": c.SetAddressPairs(ctx, port, nil, []netip.Prefix{netip.PrefixFrom(addr, 32)}),
	}
}

// A fenced cloud refuses all writes and allows reads; otherwise it passes everything on.
func TestFencedCloud(t *testing.T) {
	w := newTestbed(t)
	asked, out := 0, errors.New("the Lease is another's")
	w.fake.Fault = func(*http.Request) openstacktest.Fault { asked++; return openstacktest.None }
	all := writes(t.Context(), fenced{w.cloud, func(context.Context) error { return out }})
	for what, err := range all {
		if !errors.Is(err, out) {
			t.Errorf("%s: %v", what, err)
		}
	}
	reads := []string{"Ports", "FloatingIPs", "AllFloatingIPs", "Quota"}
	if n := reflect.TypeFor[Cloud]().NumMethod(); asked > 0 || n != len(all)+len(reads) {
		t.Errorf("%d requests of Neutron by %d writes; a cloud has %d methods, %d of which read", asked, len(all), n, len(reads))
	}
	if _, err := (fenced{w.cloud, func(context.Context) error { return out }}).Ports(t.Context()); err != nil {
		t.Errorf("it reads: %v", err)
	}
	asked = 0
	for what, err := range writes(t.Context(), fenced{w.cloud, func(context.Context) error { return nil }}) {
		if errors.Is(err, out) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if asked < len(all) {
		t.Errorf("%d writes ask Neutron %d times", len(all), asked)
	}
}

// noTLS is the TLS configuration for gateways that do not exist.
func noTLS(string) *tls.Config { return new(tls.Config) }

// running is a running controller.
type running struct {
	*Controller
	cancel context.CancelFunc
	ended  chan error
}

func isElected(r *running) bool {
	select {
	case <-r.manager.Elected():
		return true
	default:
		return false
	}
}

func (r *running) stop() error {
	r.cancel()
	return <-r.ended
}

// runController starts a controller with only the rights of its role.
func (w *testbed) runController(connect func(string) *tls.Config) *running {
	w.t.Helper()
	return w.runControllerOn(w.cloud, connect)
}

// runControllerOn is runController with another cloud.
func (w *testbed) runControllerOn(cloud Cloud, connect func(string) *tls.Config) *running {
	w.t.Helper()
	return w.runControllerWith(func(c *Config) { c.Cloud, c.TLS = cloud, connect })
}

// runControllerWith is runController with a changed configuration.
func (w *testbed) runControllerWith(change func(*Config)) *running {
	w.t.Helper()
	w.grant()
	w.fence()
	config := rest.CopyConfig(apiServer.Config(w.t))
	config.Impersonate.UserName = w.account()
	cfg := Config{Settings: testSettings(), Local: config, Namespace: w.ns, ManagedBy: isthmusControllers, Cloud: w.cloud, TLS: noTLS, Log: slog.New(slog.DiscardHandler)}
	change(&cfg)
	c, err := New(cfg)
	w.noError(err)
	ctx, cancel := context.WithCancel(w.t.Context())
	r := &running{c, cancel, make(chan error, 1)}
	go func() { r.ended <- c.Run(ctx) }()
	w.t.Cleanup(cancel)
	return r
}

// account returns the user name of the controller's account.
func (w *testbed) account() string {
	return "system:serviceaccount:" + w.ns + ":isthmus-gateway-controller"
}

// fence restricts the controller as every member cluster does.
func (w *testbed) fence() {
	w.t.Helper()
	policies, err := fences.Policies(w.ns)
	w.noError(err)
	w.ensure(apitest.OwnPolicy(policies, fences.GatewayControllerName, w.ns)...)
}

// grant gives the controller's account the rights of the generated roles, the namespaced one in the testbed's namespace.
func (w *testbed) grant() {
	w.t.Helper()
	rights := apitest.Rights(w.t, "rbac/role.yaml", w.ns, w.account())
	for _, o := range rights {
		if role, ok := o.(*rbacv1.Role); ok {
			// The chart adds the Secrets of its values passwordSecrets, authoritySecret and certsSecret.
			role.Rules = append(role.Rules,
				rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"router", authoritySecret}, Verbs: []string{"get"}},
				rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{ownSecret, gatewaysSecret}, Verbs: []string{"get", "update"}})
		}
	}
	w.ensure(rights...)
}

// ensure creates missing objects.
func (w *testbed) ensure(objs ...client.Object) {
	w.t.Helper()
	for _, o := range objs {
		if err := w.api.Create(w.t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
			w.t.Fatal(err)
		}
	}
}

// TestGatewayNodes verifies that the API server refuses invalid GatewayNodes, and names the field.
func TestGatewayNodes(t *testing.T) {
	w := newAPITestbed(t)
	for name, tc := range map[string]struct {
		change func(*v1alpha1.GatewayNodeSpec)
		says   string
	}{
		"no TLS":             {func(s *v1alpha1.GatewayNodeSpec) { s.URL = "http://192.0.2.1:9479" }, "spec.url"},
		"no host":            {func(s *v1alpha1.GatewayNodeSpec) { s.URL = "https:///x" }, "spec.url"},
		"unknown balancer":   {func(s *v1alpha1.GatewayNodeSpec) { s.Balancer = "ipvs" }, "spec.balancer"},
		"IPv6 router id":     {func(s *v1alpha1.GatewayNodeSpec) { s.BGP.RouterID = "2001:db8::1" }, "spec.bgp.routerID"},
		"no peers":           {func(s *v1alpha1.GatewayNodeSpec) { s.BGP.Peers = nil }, "spec.bgp.peers"},
		"a peer twice":       {func(s *v1alpha1.GatewayNodeSpec) { s.BGP.Peers = append(s.BGP.Peers, s.BGP.Peers[0]) }, "spec.bgp.peers[1]"},
		"a hold time of 1 s": {func(s *v1alpha1.GatewayNodeSpec) { s.BGP.Peers[0].HoldTime = 1 }, "spec.bgp.peers[0].holdTime"},
		"AS 0":               {func(s *v1alpha1.GatewayNodeSpec) { s.BGP.ASN = 0 }, "spec.bgp.asn"},
		"an interval of 15":  {func(s *v1alpha1.GatewayNodeSpec) { s.VRRP.IntervalMillis = 15 }, "spec.vrrp.intervalMillis"},
		"a router twice": {func(s *v1alpha1.GatewayNodeSpec) {
			s.VRRP.Routers = []v1alpha1.VirtualRouter{{RouterID: s.VRRP.RouterID, Priority: 1}}
		}, "routers must have other ids than routerID"},
		"VRRP of two families": {func(s *v1alpha1.GatewayNodeSpec) { s.VRRP.Peers = []string{"2001:db8::1"} }, "source and peers must be of one family"},
	} {
		n := gatewayNode("refused")
		tc.change(&n.Spec)
		if err := w.api.Create(t.Context(), n); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	n := gatewayNode("least")
	n.Spec = v1alpha1.GatewayNodeSpec{URL: "https://192.0.2.1:9479"}
	w.create(n)
	if n.Spec.Group != "default" || n.Spec.Balancer != "nftables" {
		t.Errorf("defaults: %+v", n.Spec)
	}
	w.noError(w.api.Delete(t.Context(), n))
}
