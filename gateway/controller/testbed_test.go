package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/probes"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var (
	apiServer apitest.Server
	scheme    = runtime.NewScheme()
)

func TestMain(m *testing.M) {
	if err := errors.Join(corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), eventsv1.AddToScheme(scheme), rbacv1.AddToScheme(scheme), admissionv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		panic(err)
	}
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &apiServer))
}

// testbed is a cluster in a namespace of the API server, an OpenStack project, and two gateways.
type testbed struct {
	t        *testing.T
	ns       string           // of the Services that the methods name; see as
	api      client.WithWatch // objects of the namespaces, and cluster-scoped ones
	all      *[]string        // namespaces
	fake     *openstacktest.Fake
	cloud    *openstack.Client
	gateways *fakeAgents
	writes   atomic.Int32
	events   []string
	requeued []types.NamespacedName // by requeue
	retries  []types.NamespacedName // keys that failed
	calls    []func()               // of lanes, which run in runCalls
	run      func(call func())
	*worker
}

var testbeds, uids atomic.Int32

// isthmusControllers are the values of managed-by labels of Isthmus.
var isthmusControllers = []string{"isthmus.dev", "federation.isthmus.dev"}

func testSettings() Settings {
	return Settings{
		Cluster: "cluster-a", FloatingIPs: "allocate", AddressPairs: PairPerVIP,
		Pools: []Pool{
			{Name: "public", Announce: desired.ByBGP, Return: desired.SNAT, Neutron: &NeutronPool{
				Network: openstacktest.Network, IPv4Subnet: openstacktest.Subnet4, IPv6Subnet: openstacktest.Subnet6, FloatingNetwork: openstacktest.External,
			}},
			{Name: "list", Announce: desired.ByVRRP, Return: desired.Masquerade, Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.8/30"), netip.MustParsePrefix("2001:db8::8/126")}},
		},
	}
}

// newTestbed returns a testbed with an in-memory API, which is fast enough for tests with many calls.
func newTestbed(t *testing.T) *testbed {
	t.Helper()
	// No test needs managed fields, and computing them takes a fifth of the time.
	objects := clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())
	return withGateways(newBareTestbed(t, fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(objects).WithStatusSubresource(&corev1.Service{}, &v1alpha1.GatewayNode{}).Build()))
}

// newAPITestbed returns a testbed with the API server. Tests with one run one after another, because they share it.
func newAPITestbed(t *testing.T) *testbed {
	t.Helper()
	config := apiServer.Config(t)
	config.QPS = -1
	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return withGateways(newBareTestbed(t, api))
}

func withGateways(w *testbed) *testbed {
	w.t.Helper()
	t := w.t
	for i, port := range []string{openstacktest.Gateway1, openstacktest.Gateway2} {
		n := gatewayNode(fmt.Sprintf("gw%d", i+1))
		n.Spec.NeutronPort = port
		w.create(n)
		t.Cleanup(func() { w.deleteNode(n.Name) })
	}
	w.start()
	return w
}

// deleteNode deletes a GatewayNode, whatever it waits for.
func (w *testbed) deleteNode(name string) {
	ctx := context.WithoutCancel(w.t.Context())
	n := gatewayNode(name)
	w.noError(client.IgnoreNotFound(w.api.Delete(ctx, n)))
	free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	w.noError(client.IgnoreNotFound(w.api.Patch(ctx, n, free)))
}

// newBareTestbed returns a testbed without gateways and worker.
func newBareTestbed(t *testing.T, api client.WithWatch) *testbed {
	t.Helper()
	w := &testbed{t: t, ns: fmt.Sprintf("testbed-%d", testbeds.Add(1)), fake: openstacktest.NewFake(t), gateways: newFakeAgents(), run: func(call func()) { call() }}
	if err := api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}}); err != nil {
		t.Fatal(err)
	}
	w.all = &[]string{w.ns}
	w.api = namespaced{api, w.all}
	w.cloud = w.connect("cluster-a")
	t.Cleanup(w.end)
	return w
}

// addNamespace creates another namespace of the testbed.
func (w *testbed) addNamespace() string {
	w.t.Helper()
	ns := fmt.Sprintf("testbed-%d", testbeds.Add(1))
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	*w.all = append(*w.all, ns)
	return ns
}

// as calls a function in which the methods name Services of another namespace.
func (w *testbed) as(ns string, do func()) {
	w.t.Helper()
	defer func(had string) { w.ns = had }(w.ns)
	w.ns = ns
	do()
}

// namespaced lists objects of some namespaces, and cluster-scoped ones.
type namespaced struct {
	client.WithWatch
	namespaces *[]string
}

func (c namespaced) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	switch list.(type) {
	case *corev1.NodeList, *v1alpha1.GatewayNodeList:
	default:
		return c.listAll(ctx, list, opts)
	}
	return c.WithWatch.List(ctx, list, opts...)
}

func (c namespaced) listAll(ctx context.Context, list client.ObjectList, opts []client.ListOption) error {
	var all []runtime.Object
	for _, ns := range *c.namespaces {
		some := list.DeepCopyObject().(client.ObjectList)
		if err := c.WithWatch.List(ctx, some, append(slices.Clone(opts), client.InNamespace(ns))...); err != nil {
			return err
		}
		items, err := meta.ExtractList(some)
		if err != nil {
			return err
		}
		all = append(all, items...)
	}
	return meta.SetList(list, all)
}

// end removes the Services' finalizers: they would stay for ever.
func (w *testbed) end() {
	ctx := context.WithoutCancel(w.t.Context())
	var list corev1.ServiceList
	w.noError(w.api.List(ctx, &list))
	for i := range list.Items {
		s := &list.Items[i]
		before := s.DeepCopy()
		s.Finalizers = nil
		w.noError(client.IgnoreNotFound(w.api.Patch(ctx, s, client.MergeFrom(before))))
		w.noError(client.IgnoreNotFound(w.api.Delete(ctx, s)))
	}
}

func (w *testbed) connect(cluster string) *openstack.Client {
	w.t.Helper()
	c, err := openstack.Connect(w.t.Context(), openstack.Config{Cloud: "test", File: w.fake.CloudsYAML(w.t), Cluster: cluster})
	w.noError(err)
	return c
}

// start creates a new worker, as after a crash.
func (w *testbed) start() { w.startWith(testSettings(), nil) }

// startWith is start with a crasher around all calls of the worker; nil for none.
func (w *testbed) startWith(s Settings, k *crasher) {
	w.t.Helper()
	w.noError(s.Complete())
	if k == nil {
		k = &crasher{}
	}
	api := k.client(interceptor.NewClient(w.api, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			w.writes.Add(1)
			return c.Patch(ctx, obj, patch, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			w.writes.Add(1)
			return c.SubResource(sub).Patch(ctx, obj, patch, opts...)
		},
	}))
	w.worker = &worker{
		configured: s, namespace: w.ns, managedBy: isthmusControllers, client: api, live: api, cloud: killableCloud{w.cloud, k}, agents: killableAgents{w.gateways, k},
		probes: probes.New(w.t.Context(), probes.Config{Changed: func() {}}),
		events: recorder{w}, log: slog.New(slog.DiscardHandler), requeue: func(n types.NamespacedName) { w.requeued = append(w.requeued, n) },
	}
	w.calls, w.requeued, w.retries = nil, nil, nil
	wake := func(n types.NamespacedName) {
		if n != resultsKey { // runCalls collects all results; calls that hang end beside the test
			w.requeue(n)
		}
	}
	w.lanes = newLanes(w.t.Context(), wake, func(call func()) { w.calls = append(w.calls, call) }, w.log)
	w.lanes.later = func(_ time.Duration, wake func()) { wake() }
	w.init()
}

// runCalls makes the calls that the worker has left to lanes, until it leaves none. Failed lanes do not pause. It returns
// the errors, and whether any call succeeded.
func (w *testbed) runCalls() (progress bool, err error) {
	w.t.Helper()
	var errs []error
	for len(w.calls) > 0 {
		calls := w.calls
		w.calls = nil
		for _, call := range calls {
			w.run(call)
			err := w.Collect()
			progress = progress || err == nil
			errs = append(errs, err)
		}
		if w.rebuildNeeded {
			errs = append(errs, w.rebuild(w.t.Context()))
		}
	}
	for _, of := range w.lanes.byName {
		of.next, of.pause = time.Time{}, 0
	}
	return progress, errors.Join(errs...)
}

// Sync is the worker's, with the calls that it leaves to lanes.
func (w *testbed) Sync(ctx context.Context) error {
	w.t.Helper()
	return w.withCalls(func() error { return w.worker.Sync(ctx) })
}

// Refresh is the worker's, as Sync.
func (w *testbed) Refresh(ctx context.Context) error {
	w.t.Helper()
	return w.withCalls(func() error { return w.worker.Refresh(ctx) })
}

// Clean is the worker's, as Sync.
func (w *testbed) Clean(ctx context.Context) error {
	w.t.Helper()
	return w.withCalls(func() error { return w.worker.Clean(ctx) })
}

// Handle is the worker's, until the Service no longer waits for calls that succeed.
func (w *testbed) Handle(ctx context.Context, name types.NamespacedName) error {
	w.t.Helper()
	for range rounds {
		err := w.worker.Handle(ctx, name)
		progress, failed := w.runCalls()
		if w.takeRequeued(cleanKey) {
			failed = errors.Join(failed, w.Clean(ctx))
			progress = progress || failed == nil
		}
		if !errors.Is(err, errWaiting) {
			return errors.Join(err, failed)
		}
		if !progress {
			return failed
		}
	}
	return fmt.Errorf("service %s still waits after %d rounds", name, rounds)
}

func (w *testbed) withCalls(do func() error) error {
	w.t.Helper()
	errs := []error{do()}
	for range rounds {
		_, failed := w.runCalls()
		errs = append(errs, failed)
		if failed != nil || !w.takeRequeued(cleanKey) {
			break
		}
		errs = append(errs, w.worker.Clean(w.t.Context()))
	}
	return errors.Join(errs...)
}

// takeRequeued reports whether a key was requeued, and takes it out.
func (w *testbed) takeRequeued(key types.NamespacedName) bool {
	had := len(w.requeued)
	w.requeued = slices.DeleteFunc(w.requeued, func(n types.NamespacedName) bool { return n == key })
	return len(w.requeued) < had
}

// recorder records events as "reason service: text".
type recorder struct{ w *testbed }

var _ events.EventRecorder = recorder{}

func (r recorder) Eventf(about, _ runtime.Object, _, reason, _, format string, args ...any) {
	r.w.events = append(r.w.events, fmt.Sprintf("%s %s: %s", reason, about.(client.Object).GetName(), fmt.Sprintf(format, args...)))
}

// hasEvent reports whether an event has a prefix, and clears the events.
func (w *testbed) hasEvent(prefix string) bool {
	defer func() { w.events = nil }()
	return slices.ContainsFunc(w.events, func(e string) bool { return strings.HasPrefix(e, prefix) })
}

func (w *testbed) noError(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *testbed) create(objs ...client.Object) {
	w.t.Helper()
	for _, o := range objs {
		w.noError(w.api.Create(w.t.Context(), o))
	}
}

// newService returns a Service for the gateways.
func (w *testbed) newService(name string, change func(*corev1.Service), ports ...int32) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.ns, Name: name, Annotations: map[string]string{}, UID: types.UID(fmt.Sprintf("uid-%d", uids.Add(1))), CreationTimestamp: metav1.Now(),
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(service.Class), IPFamilyPolicy: new(corev1.IPFamilyPolicySingleStack),
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, Selector: map[string]string{"app": name},
		},
	}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprintf("p%d", p), Protocol: corev1.ProtocolTCP, Port: p})
	}
	if change != nil {
		change(s)
	}
	return s
}

// endpointSlice returns a slice of a Service, with an endpoint for each address.
func (w *testbed) endpointSlice(svc string, ports []int32, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: svc + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: svc}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	for _, p := range ports {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: new(fmt.Sprintf("p%d", p)), Port: new(p + 8000), Protocol: new(corev1.ProtocolTCP)})
	}
	return s
}

func gatewayNode(name string) *v1alpha1.GatewayNode {
	return &v1alpha1.GatewayNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.GatewayNodeSpec{
		URL: "https://" + name + ".example.org:9479", Group: DefaultGroup, Balancer: string(desired.NFTables),
		BGP:  &v1alpha1.BGP{ASN: 65001, RouterID: "192.0.2.1", Peers: []v1alpha1.Peer{{Address: "192.0.2.254", ASN: 65000}}},
		VRRP: &v1alpha1.VRRP{Interface: "eth0", Source: "192.0.2.1", RouterID: 7, Priority: 100, IntervalMillis: 100},
	}}
}

func (w *testbed) get(name string) *corev1.Service {
	w.t.Helper()
	var s corev1.Service
	if err := w.api.Get(w.t.Context(), types.NamespacedName{Namespace: w.ns, Name: name}, &s); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	return &s
}

func (w *testbed) edit(name string, change func(*corev1.Service)) {
	w.t.Helper()
	s := w.get(name)
	change(s)
	w.noError(w.api.Update(w.t.Context(), s))
}

func (w *testbed) remove(name string) {
	w.t.Helper()
	w.noError(w.api.Delete(w.t.Context(), w.get(name)))
}

func (w *testbed) names() (all []types.NamespacedName) {
	w.t.Helper()
	var list corev1.ServiceList
	w.noError(w.api.List(w.t.Context(), &list))
	for i := range list.Items {
		all = append(all, nameOf(&list.Items[i]))
	}
	return all
}

// rounds bounds the rounds of converge.
const rounds = 12

// converge reconciles every Service until nothing changes, as events would. The error is that of the last round.
func (w *testbed) converge() (err error) {
	w.t.Helper()
	quiet := 0 // rounds without writes to the API server
	for range rounds {
		before := w.writes.Load()
		names := slices.Concat(w.names(), w.requeued, w.retries)
		for _, m := range w.sorted() {
			names = append(names, m.name) // includes deleted ones
		}
		w.requeued, w.retries = nil, nil
		slices.SortFunc(names, func(a, b types.NamespacedName) int { return cmp.Compare(a.String(), b.String()) })
		var progress bool
		err = nil
		for _, name := range slices.Compact(names) {
			handled := w.handle(name)
			if handled != nil {
				w.retries = append(w.retries, name)
			}
			moved, failed := w.runCalls()
			err, progress = errors.Join(err, handled, failed), progress || moved
		}
		if w.writes.Load() == before {
			quiet++
		}
		again := progress || err == nil && slices.Contains(w.requeued, cleanKey)
		if errors.Is(err, errKilled) || w.writes.Load() == before && (!again || quiet > 3) {
			return err
		}
	}
	return errors.Join(err, fmt.Errorf("it still writes after %d rounds", rounds))
}

// handle handles one key. A Service that waits for calls is no error.
func (w *testbed) handle(name types.NamespacedName) error {
	w.t.Helper()
	switch name {
	case gatewaysKey:
		return w.worker.Refresh(w.t.Context())
	case cleanKey:
		if err := w.worker.Clean(w.t.Context()); err == nil {
			return nil
		}
		return w.worker.Clean(w.t.Context()) // after a pause
	}
	if err := w.worker.Handle(w.t.Context(), name); !errors.Is(err, errWaiting) {
		return err
	}
	return nil
}

// recover starts a new worker and lets it converge.
func (w *testbed) recover() {
	w.t.Helper()
	w.recoverWith(testSettings())
}

// recoverWith is recover with other settings.
func (w *testbed) recoverWith(s Settings) {
	w.t.Helper()
	w.startWith(s, nil)
	w.noError(w.Sync(w.t.Context()))
	w.noError(w.converge())
}

// addresses returns the addresses in a Service's status.
func addresses(s *corev1.Service) (all []string) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		all = append(all, i.IP)
	}
	return all
}

// portsNow returns all ports of all pools by id, as the cloud has them now.
func (w *testbed) portsNow(ctx context.Context) (map[string]port, error) {
	all := map[string]port{}
	ports, err := w.list.ports(w.held()), error(nil)
	for _, src := range w.sources {
		more, read := src.read(ctx)
		ports, err = append(ports, more...), errors.Join(err, read)
	}
	for _, p := range ports {
		all[p.ID] = p
	}
	return all, err
}

// checkInvariants verifies a converged testbed: nothing leaks, nothing is missing, and all sides agree.
func (w *testbed) checkInvariants() {
	w.t.Helper()
	ctx := w.t.Context()
	ports, err := w.portsNow(ctx)
	w.noError(err)
	used := map[string]bool{}
	vips := map[string]bool{}
	moving := port{} // with a failover IP
	var list corev1.ServiceList
	w.noError(w.api.List(ctx, &list))
	for i := range list.Items {
		s := &list.Items[i]
		if !w.settings.services().Takes(s) {
			if s.Annotations[service.AnnotationPort]+s.Annotations[service.AnnotationOwnExternalIPs] != "" || s.Annotations[service.AnnotationManaged] == "true" || len(s.Finalizers) > 0 || len(addresses(s)) > 0 || len(s.Status.Conditions) > 0 {
				w.t.Errorf("service %s was let go and has %v, %v, %+v", s.Name, s.Annotations, s.Finalizers, s.Status)
			}
			continue
		}
		id := s.Annotations[service.AnnotationPort]
		p, ok := ports[id]
		if !ok {
			w.t.Errorf("service %s has port %q, which is none", s.Name, id)
			continue
		}
		used[id] = true
		want := []string{}
		families := common(s.Spec.IPFamilies, w.settings.pool(p.Pool).familiesWith(p))
		for _, a := range p.external(families) {
			want = append(want, a.String())
		}
		for _, i := range s.Status.LoadBalancer.Ingress {
			if len(i.Ports) != len(s.Spec.Ports) {
				w.t.Errorf("service %s says that it has the ports %+v", s.Name, i.Ports)
			}
		}
		if w.settings.pool(p.Pool).FailoverIP != nil {
			moving = p
		} else {
			for _, a := range p.vips(families) {
				vips[a.String()] = true
			}
		}
		if !slices.Equal(addresses(s), want) {
			w.t.Errorf("service %s has the addresses %v, its port %v", s.Name, addresses(s), want)
		}
	}
	made, floating := w.fake.Objects()
	for _, id := range made {
		if !used[id] {
			w.t.Errorf("port %s leaked", id)
		}
	}
	all, err := w.cloud.AllFloatingIPs(ctx)
	w.noError(err)
	for _, f := range all {
		if f.Ours && !used[f.Port] && !used[f.ID] {
			w.t.Errorf("floating IP %+v leaked; there are %v", f, floating)
		}
	}
	for _, gateway := range []string{openstacktest.Gateway1, openstacktest.Gateway2} {
		have := map[string]bool{}
		pairs, err := w.cloud.AddressPairs(ctx, gateway)
		w.noError(err)
		for _, p := range pairs {
			have[p.Addr().String()] = true
		}
		if !maps.Equal(have, vips) {
			w.t.Errorf("port %s may send as %v, want %v", gateway, have, vips)
		}
	}
	if moving.ID != "" && moving.Floating.Port != openstacktest.Gateway1 && moving.Floating.Port != openstacktest.Gateway2 {
		w.t.Errorf("floating IP %+v leads to no gateway", moving.Floating)
	}
	if len(w.gateways.states) != 2 {
		w.t.Errorf("%d gateways received a state, want 2", len(w.gateways.states))
	}
	for name, state := range w.gateways.states {
		have, want := map[string]bool{}, maps.Clone(vips)
		for _, v := range state.VIPs {
			have[v.Addr.String()] = true
		}
		if moving.ID != "" {
			want[w.gateway(name).Spec.Address] = true
		}
		if !maps.Equal(have, want) {
			w.t.Errorf("gateway %s has the VIPs %v, want %v", name, have, want)
		}
		if faults := state.Validate(); len(faults) > 0 {
			w.t.Errorf("gateway %s: %v", name, faults)
		}
	}
}

// fakeAgents are gateways that apply states at once.
type fakeAgents struct {
	states  map[string]desired.State
	refuse  map[string]*agents.Refused // by gateway: the whole state
	without map[string][]desired.Fault // by gateway: Services that it does not apply
	away    map[string]error
	targets map[string]agents.Target
	sets    int

	announced    map[string][]netip.Addr
	certificates map[string]certs.Validity
}

func newFakeAgents() *fakeAgents {
	return &fakeAgents{states: map[string]desired.State{}, refuse: map[string]*agents.Refused{}, without: map[string][]desired.Fault{}, away: map[string]error{}}
}

func (f *fakeAgents) ReadGenerations(context.Context, map[string]agents.Target) {}

func (f *fakeAgents) Set(_ context.Context, targets map[string]agents.Target) {
	f.targets = targets
	f.sets++
	for name, t := range targets {
		if !t.Hold && f.away[name] == nil && f.refuse[name] == nil {
			f.states[name] = t.State
		}
	}
}

// refusal is the answer of a gateway whose map has no room for a Service.
func (w *testbed) refusal(name string) *agents.Refused {
	fault := desired.Fault{Component: desired.ComponentBalancer, Services: []string{w.ns + "/" + name}, Message: "map full"}
	return &agents.Refused{Status: 422, Refusal: desired.Refusal{Message: "no", Faults: []desired.Fault{fault}}}
}

func (f *fakeAgents) Reports() map[string]agents.Report {
	all := map[string]agents.Report{}
	for name, t := range f.targets {
		s, known := f.states[name]
		if t.Hold {
			if !known {
				continue
			}
			t.State = s
		}
		all[name] = agents.Report{
			Err: f.away[name], Refused: f.refuse[name], Applied: f.away[name] == nil && s.Hash() == t.State.Hash(), Asked: true,
			Status:      desired.Status{Generation: 1, Hash: s.Hash(), Version: "test", Announced: f.announced[name], Refused: f.without[name]},
			Certificate: f.certificates[name],
		}
	}
	return all
}
