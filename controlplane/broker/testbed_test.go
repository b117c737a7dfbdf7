package broker_test

import (
	"context"
	"fmt"
	"log/slog"
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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

// serverSet contains the API servers of the members and of the broker, for one testbed after the other.
type serverSet struct{ a, b, broker apitest.Server }

var (
	// serverSets limit how many testbeds run at a time; a testbed mostly waits.
	serverSets [2]serverSet
	// free contains the serverSets without a testbed.
	free = make(chan *serverSet, len(serverSets))

	scheme = runtime.NewScheme()
)

func TestMain(m *testing.M) {
	for _, add := range []func(*runtime.Scheme) error{
		admissionv1.AddToScheme, coordinationv1.AddToScheme, eventsv1.AddToScheme, corev1.AddToScheme, discoveryv1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme, v1beta1.Install,
	} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	var servers []*apitest.Server
	for i := range serverSets {
		p := &serverSets[i]
		p.b.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.196.0.0/16"), netip.MustParsePrefix("fd00:196::/112")}
		servers = append(servers, &p.a, &p.b, &p.broker)
		free <- p
	}
	os.Exit(apitest.Run(m, servers...))
}

// testbed is a ClusterSet of the members a and b, with namespaces of its own. It uses its serverSet alone, because a
// controller watches all namespaces.
type testbed struct {
	t         *testing.T
	serverSet *serverSet
	broker    client.Client
	ns        string // of the Services, on both members
	brokerNS  string // the broker's namespace
	a, b      *member
}

// member is one cluster, whose controller a test may start and stop.
type member struct {
	client.Client

	id      string
	testbed *testbed
	config  *rest.Config
	install string // the installation namespace
	gate    *apitest.Gate
	via     *rest.Config // the broker, through the gate

	spec     v1alpha1.MemberSpec // its registration
	settings broker.Settings
	evidence liveness.Evidence // verdicts of its dataplane about others; Unknown by default
	checkDNS func(context.Context) error

	restarts bool // restart a controller that ends with an error, as Kubernetes does

	local, remote *apitest.Writes // writes of the controller to its own cluster and to the broker
	stop          func()
	controller    *broker.Controller
}

var testbeds atomic.Int32

// blocks are the ClusterSetIPs of the members.
var blocks = map[string][]string{"a": {"243.10.0.0/16", "fd00:243:10::/64"}, "b": {"243.20.0.0/16", "fd00:243:20::/64"}}

// registration returns the registration of member id, which covers the addresses of slice.
func registration(id string) v1alpha1.MemberSpec {
	services := []string{"10.96.0.0/16", "fd00:96::/112"}
	if id == "b" {
		services = []string{"10.196.0.0/16", "fd00:196::/112"}
	}
	return v1alpha1.MemberSpec{
		ClusterID: id, ClusterSetID: "test", ClusterSetIPEnabled: true, ClusterSetIPCIDR: blocks[id], JoinTime: metav1.Now(),
		PodCIDRs:     []string{fmt.Sprintf("10.%d.0.0/16", id[0]), fmt.Sprintf("fd00:%d::/64", id[0])},
		ExtraCIDRs:   []string{fmt.Sprintf("240.0.%d.0/24", id[0])},
		ServiceCIDRs: services, // those of its API server
	}
}

// newTestbed returns a testbed whose controllers do not run yet. edit may change the registrations. The test runs in
// parallel with others from here on.
func newTestbed(t *testing.T, edit ...func(*v1alpha1.MemberSpec)) *testbed {
	t.Helper()
	return newTestbedOn(t, func(p *serverSet) *apitest.Server { return &p.broker }, edit...)
}

// newTestbedOn is newTestbed with the broker on the given server.
func newTestbedOn(t *testing.T, server func(*serverSet) *apitest.Server, edit ...func(*v1alpha1.MemberSpec)) *testbed {
	t.Helper()
	t.Parallel()
	p := <-free
	t.Cleanup(func() { free <- p }) // the first that is registered is the last that runs
	n := testbeds.Add(1)
	w := &testbed{t: t, serverSet: p, ns: fmt.Sprintf("demo-%d", n), brokerNS: fmt.Sprintf("broker-%d", n)}
	brokerConfig := server(p).Config(t)
	w.broker = newClient(t, brokerConfig)
	w.create(w.broker, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.brokerNS}})
	w.create(w.broker, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "member"}, Rules: access.MemberBrokerRules()})
	w.a = w.newMember("a", p.a.Config(t), brokerConfig, n, edit)
	w.b = w.newMember("b", p.b.Config(t), brokerConfig, n, edit)
	w.police()
	return w
}

// police installs the broker's admission policies, as deploy-broker does.
func (w *testbed) police() {
	w.t.Helper()
	config := &v1alpha1.ClusterSetConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName},
		Spec:       v1alpha1.ClusterSetConfigSpec{ClusterSetID: "test", ClusterSetIPEnabled: true, ClusterSetIPCIDRRange: []string{"243.0.0.0/8", "fd00:243::/32"}},
	}
	var subjects []rbacv1.Subject
	for _, m := range []*member{w.a, w.b} {
		config.Spec.Members = append(config.Spec.Members, v1alpha1.MemberBlocks{ClusterID: m.id, ClusterSetIPCIDR: m.spec.ClusterSetIPCIDR})
		subjects = append(subjects, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: w.brokerNS, Name: v1alpha1.MemberAccount(m.id)})
	}
	w.create(w.broker, config, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "member"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "member"},
		Subjects:   subjects,
	})
	policies, err := access.Policies(w.brokerNS)
	w.noError(err)
	w.create(w.broker, policies...)
	w.t.Cleanup(func() {
		for _, p := range policies {
			w.noError(w.broker.Delete(context.WithoutCancel(w.t.Context()), p))
		}
	})
}

func (w *testbed) newMember(id string, config, broker *rest.Config, n int32, edit []func(*v1alpha1.MemberSpec)) *member {
	w.t.Helper()
	m := &member{Client: newClient(w.t, config), testbed: w, install: fmt.Sprintf("isthmus-%d", n), stop: func() {}, evidence: evidence{}}
	spec := registration(id)
	for _, e := range edit {
		e(&spec)
	}
	m.spec = spec
	if m.id = spec.ClusterID; clusterset.ClusterID(m.id).Validate() != nil {
		m.id = id
	}
	w.create(m, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: m.install}})
	w.create(m, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}})
	w.create(m, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: m.install, Name: m.id}, Spec: spec})
	w.create(w.broker, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: m.id}, Spec: spec})
	m.grant()
	m.fence()
	m.config = rest.CopyConfig(config)
	m.config.Impersonate.UserName = m.account()
	m.gate, m.via = apitest.NewGate(w.t, broker)
	m.via.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + w.brokerNS + ":" + v1alpha1.MemberAccount(m.id),
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + w.brokerNS, "system:authenticated"},
	}
	m.local, m.remote = apitest.CountWrites(m.config), apitest.CountWrites(m.via)
	w.t.Cleanup(func() {
		m.stop()
		for _, obj := range []client.Object{&v1beta1.ServiceExport{}, &v1beta1.ServiceImport{}, &corev1.Service{}, &discoveryv1.EndpointSlice{}} {
			w.noError(m.DeleteAllOf(context.WithoutCancel(w.t.Context()), obj, client.InNamespace(w.ns)))
		}
	})
	return m
}

// account returns the user name of the controller's account.
func (m *member) account() string {
	return "system:serviceaccount:" + m.install + ":isthmus-controller"
}

// fence restricts the controller as every member cluster does. Members of other tests have policies of their own. The policy of
// reserved labels is left out: it would reserve them to the controller of this test.
func (m *member) fence() {
	t := m.testbed.t
	t.Helper()
	policies, err := fences.Policies(m.install)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range apitest.OwnPolicy(policies, fences.ControllerName, m.install) {
		m.testbed.create(m, p)
		t.Cleanup(func() { m.testbed.noError(client.IgnoreNotFound(m.Delete(context.WithoutCancel(t.Context()), p))) })
	}
}

// grant gives the controller its generated rules, and no others.
func (m *member) grant() {
	m.testbed.t.Helper()
	m.testbed.create(m, apitest.Rights(m.testbed.t, "../rbac/role.yaml", m.install, m.account())...)
}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// controllerConfig returns the config of m's controller, with its production rights.
func (m *member) controllerConfig() broker.Config {
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(m.testbed.t.Output(), nil))
	}
	settings := m.settings
	if settings.TimeScale == 0 {
		settings.TimeScale = timeScale
	}
	return broker.Config{
		Local: m.config, Namespace: m.install, Broker: m.via, BrokerNamespace: m.testbed.brokerNS,
		Settings: settings, Evidence: m.evidence, CheckDNS: m.checkDNS, Log: log,
	}
}

func inNamespace(n string) client.DeleteAllOfOption { return client.InNamespace(n) }

// run starts the controllers of members, both by default, until the test ends or stop is called.
func (w *testbed) run(members ...*member) *testbed {
	w.t.Helper()
	if len(members) == 0 {
		members = []*member{w.a, w.b}
	}
	for _, m := range members {
		controller, err := broker.New(w.t.Context(), m.controllerConfig())
		w.noError(err)
		ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
		done := make(chan error, 1)
		go func() {
			err := controller.Run(ctx)
			for ; m.restarts && err != nil && ctx.Err() == nil; <-time.After(again) {
				var again *broker.Controller
				if again, err = broker.New(ctx, m.controllerConfig()); err == nil {
					err = again.Run(ctx)
				}
			}
			if m.restarts {
				err = nil // the error was transient, or the test ended
			}
			done <- err
		}()
		m.controller = controller
		m.stop = func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("controller of %s: %v", m.id, err)
			}
			m.stop = func() {}
		}
	}
	return w
}

func (w *testbed) noError(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *testbed) create(c client.Client, objs ...client.Object) {
	w.t.Helper()
	for _, obj := range objs {
		w.noError(c.Create(w.t.Context(), obj))
	}
}

// timeScale shortens five minutes to fifteen seconds.
const timeScale = 0.05

// fullLength reports whether tests use real times and the full number of tries.
func fullLength() bool { return os.Getenv("ISTHMUS_FULL_LENGTH") != "" }

// evidence is a dataplane with a fixed verdict for each member.
type evidence map[clusterset.ClusterID]liveness.Verdict

func (e evidence) Answers(_ context.Context, id clusterset.ClusterID) liveness.Verdict { return e[id] }

// Deadlines of waiting.
const (
	patience = await.Patience
	settle   = 300 * time.Millisecond
	again    = 250 * time.Millisecond // until a controller that ended is started again
)

// eventually waits until check returns nil.
func (w *testbed) eventually(check func() error) {
	w.t.Helper()
	w.eventuallyWithin(patience, check)
}

func (w *testbed) eventuallyWithin(d time.Duration, check func() error) {
	w.t.Helper()
	if err := await.Poll(w.t.Context(), d, check); err != nil {
		w.t.Fatalf("after %s: %v", d, err)
	}
}

// quiet waits until the controllers of members, both by default, have not written for a moment.
func (w *testbed) quiet(members ...*member) {
	w.t.Helper()
	tick := time.NewTicker(settle)
	defer tick.Stop()
	for range int(patience / settle) {
		<-tick.C
		if len(w.writes(members...)) == 0 {
			return
		}
	}
	w.t.Fatalf("controllers still write after %s", patience)
}

// writes returns the write requests of the controllers of members, both by default, since the last call, whether or not
// they succeeded.
func (w *testbed) writes(members ...*member) []string {
	if len(members) == 0 {
		members = []*member{w.a, w.b}
	}
	var all []string
	for _, m := range members {
		for _, s := range m.local.Take() {
			all = append(all, m.id+": "+s)
		}
		for _, s := range m.remote.Take() {
			all = append(all, m.id+" on the broker: "+s)
		}
	}
	return all
}

// changesWithin returns the writes during d, without events: a leader election sends those whenever a controller starts.
func (w *testbed) changesWithin(d time.Duration, members ...*member) []string {
	w.t.Helper()
	<-time.After(d)
	return slices.DeleteFunc(w.writes(members...), func(s string) bool { return strings.HasSuffix(s, "/events") })
}

// service creates a Service with one EndpointSlice per family, as Kubernetes would.
func (m *member) service(name string, edits ...func(*corev1.Service)) *corev1.Service {
	m.testbed.t.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": name},
			Ports:    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	for _, e := range edits {
		e(svc)
	}
	m.testbed.create(m, svc)
	for _, f := range svc.Spec.IPFamilies {
		m.slice(svc, f, 1)
	}
	return svc
}

// slice creates an EndpointSlice of svc with one endpoint, whose last part is host.
func (m *member) slice(svc *corev1.Service, family corev1.IPFamily, host int) *discoveryv1.EndpointSlice {
	m.testbed.t.Helper()
	address := fmt.Sprintf("10.%d.0.%d", m.id[0], host)
	if family == corev1.IPv6Protocol {
		address = fmt.Sprintf("fd00:%d::%d", m.id[0], host)
	}
	ready, node, zone, hostname := true, "node-1", "zone-1", fmt.Sprintf("%s-%d", svc.Name, host)
	es := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: svc.Namespace,
			Name:      fmt.Sprintf("%s-%s-%d", svc.Name, strings.ToLower(string(family)), host),
			Labels:    map[string]string{discoveryv1.LabelServiceName: svc.Name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
		},
		AddressType: discoveryv1.AddressType(family),
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			NodeName: &node, Zone: &zone, Hostname: &hostname,
			Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: hostname},
		}},
	}
	for _, p := range svc.Spec.Ports {
		target := p.Port + 8000
		es.Ports = append(es.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &target})
	}
	m.testbed.create(m, es)
	return es
}

func (m *member) export(name string) *v1beta1.ServiceExport {
	m.testbed.t.Helper()
	e := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}
	m.testbed.create(m, e)
	return e
}

func (m *member) unexport(name string) {
	m.testbed.t.Helper()
	m.testbed.noError(m.Delete(m.testbed.t.Context(), &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}))
}

// imported returns the ServiceImport and the imported slices of a Service; nil if missing.
func (m *member) imported(name string) (*v1beta1.ServiceImport, []discoveryv1.EndpointSlice) {
	m.testbed.t.Helper()
	return m.importedIn(m.testbed.ns, name)
}

func (m *member) importedIn(namespace, name string) (*v1beta1.ServiceImport, []discoveryv1.EndpointSlice) {
	m.testbed.t.Helper()
	si := &v1beta1.ServiceImport{}
	err := m.Get(m.testbed.t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, si)
	if client.IgnoreNotFound(err) != nil {
		m.testbed.t.Fatal(err)
	}
	if err != nil {
		si = nil
	}
	var slices discoveryv1.EndpointSliceList
	m.testbed.noError(m.List(m.testbed.t.Context(), &slices, client.InNamespace(namespace), client.MatchingLabels{v1beta1.LabelServiceName: name}))
	return si, slices.Items
}

// expect describes an import; zero fields match anything.
type expect struct {
	typ       v1beta1.ServiceImportType
	ips       int      // how many, for a ClusterSetIP
	clusters  []string // status.clusters
	ports     []string // "name/number"
	endpoints []string // "address:port,port" of all slices
}

// wants waits until m's import matches e.
func (m *member) wants(name string, e expect) *v1beta1.ServiceImport {
	m.testbed.t.Helper()
	var si *v1beta1.ServiceImport
	m.testbed.eventually(func() error {
		var slices []discoveryv1.EndpointSlice
		if si, slices = m.imported(name); si == nil {
			return fmt.Errorf("%s has no import %s", m.id, name)
		}
		return e.check(m.id, si, slices)
	})
	return si
}

func (e expect) check(id string, si *v1beta1.ServiceImport, slices []discoveryv1.EndpointSlice) error {
	if si.Spec.Type != e.typ || len(si.Spec.IPs) != e.ips {
		return fmt.Errorf("in %s: %s %v, want %s with %d IPs", id, si.Spec.Type, si.Spec.IPs, e.typ, e.ips)
	}
	var clusters []string
	for _, c := range si.Status.Clusters {
		clusters = append(clusters, c.Cluster)
	}
	if err := same(id+": clusters", e.clusters, clusters); err != nil {
		return err
	}
	var ports []string
	for _, p := range si.Spec.Ports {
		ports = append(ports, fmt.Sprintf("%s/%d", p.Name, p.Port))
	}
	if err := same(id+": ports", e.ports, ports); err != nil {
		return err
	}
	if !meta.IsStatusConditionTrue(si.Status.Conditions, "Ready") || si.Status.EndpointSliceObjects != v1beta1.EndpointSliceObjectsPresent {
		return fmt.Errorf("in %s: status %+v", id, si.Status)
	}
	return same(id+": endpoints", e.endpoints, flatten(slices))
}

// flatten lists the endpoints of slices with their ports, sorted.
func flatten(es []discoveryv1.EndpointSlice) []string {
	var flat []string
	for _, s := range es {
		var ports []string
		for _, p := range s.Ports {
			ports = append(ports, fmt.Sprint(*p.Port))
		}
		for _, e := range s.Endpoints {
			for _, a := range e.Addresses {
				flat = append(flat, netip.MustParseAddr(a).String()+":"+strings.Join(ports, ","))
			}
		}
	}
	return flat
}

// wantsNone waits until m has no import of the Service.
func (m *member) wantsNone(name string) {
	m.testbed.t.Helper()
	m.testbed.eventually(func() error {
		if si, slices := m.imported(name); si != nil || len(slices) > 0 {
			return fmt.Errorf("%s still has %v and %d slices", m.id, si, len(slices))
		}
		return nil
	})
}

// condition waits until a condition of m's ServiceExport has a status and reason, and returns its message.
func (m *member) condition(name, typ string, status metav1.ConditionStatus, reason string) string {
	m.testbed.t.Helper()
	var message string
	m.testbed.eventually(func() error {
		var e v1beta1.ServiceExport
		m.testbed.noError(m.Get(m.testbed.t.Context(), types.NamespacedName{Namespace: m.testbed.ns, Name: name}, &e))
		c := meta.FindStatusCondition(e.Status.Conditions, typ)
		if c == nil || c.Status != status || c.Reason != reason {
			return fmt.Errorf("in %s: condition %s is %+v, want %s %s", m.id, typ, c, status, reason)
		}
		message = c.Message
		return nil
	})
	return message
}

// brokerEmpty waits until the broker has no object of any Service but tombstones.
func (w *testbed) brokerEmpty() {
	w.t.Helper()
	w.eventually(func() error {
		for _, list := range []client.ObjectList{&v1alpha1.ExportRecordList{}, &v1beta1.ServiceImportList{}, &discoveryv1.EndpointSliceList{}} {
			w.noError(w.broker.List(w.t.Context(), list, client.InNamespace(w.brokerNS)))
			if records, ok := list.(*v1alpha1.ExportRecordList); ok {
				records.Items = slices.DeleteFunc(records.Items, func(r v1alpha1.ExportRecord) bool { return r.Spec.WithdrawnAt != nil })
			}
			if n := meta.LenList(list); n > 0 {
				return fmt.Errorf("the broker has %d objects of %T", n, list)
			}
		}
		return nil
	})
}
