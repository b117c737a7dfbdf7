package broker_test

import (
	"cmp"
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
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

// place is where a world stands: the API servers of the members and of the broker, for one world after the other.
type place struct{ a, b, broker apitest.Server }

var (
	// places are as many as worlds stand at a time: most of what a world does is to wait.
	places [2]place
	// free are the places without a world.
	free = make(chan *place, len(places))

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
	for i := range places {
		p := &places[i]
		servers = append(servers, &p.a, &p.b, &p.broker)
		free <- p
	}
	os.Exit(apitest.Run(m, servers...))
}

// world is a ClusterSet of the members a and b, with namespaces of its own on the servers of a place, which it has
// for itself, because a controller looks at all namespaces.
type world struct {
	t       *testing.T
	place   *place
	broker  client.Client
	ns      string // of the Services, on both members
	brokers string // the broker's namespace
	// patience is how long to wait for anything, where the usual is not enough.
	patience time.Duration
	a, b     *member
}

// member is one cluster, whose controller a test may start and stop.
type member struct {
	client.Client

	id      string
	world   *world
	config  *rest.Config
	install string // the installation namespace
	gate    *apitest.Gate
	via     *rest.Config // the broker, through the gate

	spec     v1alpha1.MemberSpec // its registration
	settings broker.Settings
	evidence liveness.Evidence // what its dataplane would say of others; that it does not know, at first
	askNames func(context.Context) error

	restarts bool // whether a controller that ends with an error is started again, as Kubernetes does

	local, remote *apitest.Writes // what the controller wrote: here, and on the broker
	stop          func()
	plane         *broker.ControlPlane
}

var worlds atomic.Int32

// blocks are the ClusterSetIPs of the members.
var blocks = map[string][]string{"a": {"243.10.0.0/16", "fd00:243:10::/64"}, "b": {"243.20.0.0/16", "fd00:243:20::/64"}}

// registration is that of member id, whose endpoints have the addresses that slice gives them.
func registration(id string) v1alpha1.MemberSpec {
	return v1alpha1.MemberSpec{
		ClusterID: id, ClusterSetID: "test", ClusterSetIPEnabled: true, ClusterSetIPCIDR: blocks[id], JoinTime: metav1.Now(),
		PodCIDRs:   []string{fmt.Sprintf("10.%d.0.0/16", id[0]), fmt.Sprintf("fd00:%d::/64", id[0])},
		ExtraCIDRs: []string{fmt.Sprintf("240.0.%d.0/24", id[0])},
		// Those of the API servers, which are the same, as they are in most clusters.
		ServiceCIDRs: []string{"10.96.0.0/16", "fd00:96::/112"},
	}
}

// newWorld returns a world whose controllers do not run yet. edit may change the registrations. The test runs beside
// others from here on.
func newWorld(t *testing.T, edit ...func(*v1alpha1.MemberSpec)) *world {
	t.Helper()
	return newWorldOn(t, func(p *place) *apitest.Server { return &p.broker }, edit...)
}

// newWorldOn is newWorld with the broker on a server of choice.
func newWorldOn(t *testing.T, server func(*place) *apitest.Server, edit ...func(*v1alpha1.MemberSpec)) *world {
	t.Helper()
	t.Parallel()
	p := <-free
	t.Cleanup(func() { free <- p }) // the first that is registered is the last that runs
	n := worlds.Add(1)
	w := &world{t: t, place: p, ns: fmt.Sprintf("demo-%d", n), brokers: fmt.Sprintf("broker-%d", n)}
	brokerConfig := server(p).Config(t)
	w.broker = newClient(t, brokerConfig)
	w.create(w.broker, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.brokers}})
	w.create(w.broker, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokers, Name: "member"}, Rules: access.MemberBrokerRules()})
	w.a = w.newMember("a", p.a.Config(t), brokerConfig, n, edit)
	w.b = w.newMember("b", p.b.Config(t), brokerConfig, n, edit)
	w.police()
	return w
}

// police holds the members by the broker's policies, as deploy-broker does.
func (w *world) police() {
	w.t.Helper()
	config := &v1alpha1.ClusterSetConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.brokers, Name: v1alpha1.ClusterSetConfigName},
		Spec:       v1alpha1.ClusterSetConfigSpec{ClusterSetID: "test", ClusterSetIPEnabled: true, ClusterSetIPCIDRRange: []string{"243.0.0.0/8", "fd00:243::/32"}},
	}
	var subjects []rbacv1.Subject
	for _, m := range []*member{w.a, w.b} {
		config.Spec.Members = append(config.Spec.Members, v1alpha1.MemberBlocks{ClusterID: m.id, ClusterSetIPCIDR: m.spec.ClusterSetIPCIDR})
		subjects = append(subjects, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: w.brokers, Name: v1alpha1.MemberAccount(m.id)})
	}
	w.create(w.broker, config, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.brokers, Name: "member"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "member"},
		Subjects:   subjects,
	})
	policies, err := access.Policies(w.brokers)
	w.noError(err)
	w.create(w.broker, policies...)
	w.t.Cleanup(func() {
		for _, p := range policies {
			w.noError(w.broker.Delete(context.WithoutCancel(w.t.Context()), p))
		}
	})
}

func (w *world) newMember(id string, config, broker *rest.Config, n int32, edit []func(*v1alpha1.MemberSpec)) *member {
	w.t.Helper()
	m := &member{Client: newClient(w.t, config), world: w, install: fmt.Sprintf("isthmus-%d", n), stop: func() {}, evidence: evidence{}}
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
	w.create(w.broker, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokers, Name: m.id}, Spec: spec})
	m.grant()
	m.config = rest.CopyConfig(config)
	m.config.Impersonate.UserName = "isthmus-controller"
	m.gate, m.via = apitest.NewGate(w.t, broker)
	m.via.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + w.brokers + ":" + v1alpha1.MemberAccount(m.id),
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + w.brokers, "system:authenticated"},
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

// grant gives the controller the rules that are generated for it, and no others.
func (m *member) grant() {
	t := m.world.t
	t.Helper()
	text, err := os.ReadFile("rbac/role.yaml")
	if err != nil {
		t.Fatal(err)
	}
	subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "isthmus-controller"}}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatal(err)
		}
		switch kind.Kind {
		case "ClusterRole":
			role := &rbacv1.ClusterRole{}
			m.world.noError(yaml.Unmarshal([]byte(doc), role))
			role.Name = m.install
			m.world.create(m, role)
			m.world.create(m, &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: m.install}, Subjects: subjects,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: m.install},
			})
		case "Role":
			role := &rbacv1.Role{}
			m.world.noError(yaml.Unmarshal([]byte(doc), role))
			role.Namespace = m.install
			m.world.create(m, role)
			m.world.create(m, &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: m.install, Name: role.Name}, Subjects: subjects,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
			})
		}
	}
}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// controllerConfig is that of m's controller, with the rights that it has in production.
func (m *member) controllerConfig() broker.Config {
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(m.world.t.Output(), nil))
	}
	settings := m.settings
	if settings.TimeScale == 0 {
		settings.TimeScale = timeScale
	}
	return broker.Config{
		Local: m.config, Namespace: m.install, Broker: m.via, BrokerNamespace: m.world.brokers,
		Settings: settings, Evidence: m.evidence, AskNames: m.askNames, Log: log,
	}
}

func inNamespace(n string) client.DeleteAllOfOption { return client.InNamespace(n) }

// run starts the controllers of members, both without arguments, until the test ends or stop is called.
func (w *world) run(members ...*member) *world {
	w.t.Helper()
	if len(members) == 0 {
		members = []*member{w.a, w.b}
	}
	for _, m := range members {
		plane, err := broker.New(w.t.Context(), m.controllerConfig())
		w.noError(err)
		ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
		done := make(chan error, 1)
		go func() {
			err := plane.Run(ctx)
			for ; m.restarts && err != nil && ctx.Err() == nil; <-time.After(slowPoll) {
				var again *broker.ControlPlane
				if again, err = broker.New(ctx, m.controllerConfig()); err == nil {
					err = again.Run(ctx)
				}
			}
			if m.restarts {
				err = nil // whatever it was, it passed, or it is the end of the test
			}
			done <- err
		}()
		m.plane = plane
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

func (w *world) noError(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) create(c client.Client, objs ...client.Object) {
	w.t.Helper()
	for _, obj := range objs {
		w.noError(c.Create(w.t.Context(), obj))
	}
}

// timeScale makes what takes five minutes take fifteen seconds.
const timeScale = 0.05

// fullLength reports whether tests take the real time, and the real number of tries.
func fullLength() bool { return os.Getenv("ISTHMUS_FULL_LENGTH") != "" }

// evidence is a dataplane that knows what it is told, by member.
type evidence map[clusterset.ClusterID]liveness.Verdict

func (e evidence) Answers(_ context.Context, id clusterset.ClusterID) liveness.Verdict { return e[id] }

// Deadlines of waiting: the second is a little longer than the longest retry of the controller.
const (
	patience = time.Minute
	settle   = 300 * time.Millisecond
	poll     = 20 * time.Millisecond  // at first;
	slowPoll = 250 * time.Millisecond // what takes long need not be asked for so often
)

// eventually waits until check returns nil.
func (w *world) eventually(check func() error) {
	w.t.Helper()
	w.eventuallyWithin(cmp.Or(w.patience, patience), check)
}

func (w *world) eventuallyWithin(d time.Duration, check func() error) {
	w.t.Helper()
	began, deadline := time.Now(), time.After(d)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			w.t.Fatalf("after %s: %v", d, err)
		case <-time.After(min(max(poll, time.Since(began)/8), slowPoll)):
		}
	}
}

// quiet waits until no controller of members, both without arguments, has written anything for a moment.
func (w *world) quiet(members ...*member) {
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

// writes returns what the controllers of members, both without arguments, asked to write since the last
// call, whether or not it was done.
func (w *world) writes(members ...*member) []string {
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

// changesWithin returns what writes returns after d, without events: those of a leader election come
// whenever a controller starts.
func (w *world) changesWithin(d time.Duration, members ...*member) []string {
	w.t.Helper()
	<-time.After(d)
	return slices.DeleteFunc(w.writes(members...), func(s string) bool { return strings.HasSuffix(s, "/events") })
}

// service creates a Service with one EndpointSlice a family, as a member's own controllers would.
func (m *member) service(name string, edits ...func(*corev1.Service)) *corev1.Service {
	m.world.t.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.world.ns, Name: name},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": name},
			Ports:    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	for _, e := range edits {
		e(svc)
	}
	m.world.create(m, svc)
	for _, f := range svc.Spec.IPFamilies {
		m.slice(svc, f, 1)
	}
	return svc
}

// slice creates an EndpointSlice of svc with one endpoint, whose last part is host.
func (m *member) slice(svc *corev1.Service, family corev1.IPFamily, host int) *discoveryv1.EndpointSlice {
	m.world.t.Helper()
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
	m.world.create(m, es)
	return es
}

func (m *member) export(name string) *v1beta1.ServiceExport {
	m.world.t.Helper()
	e := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.world.ns, Name: name}}
	m.world.create(m, e)
	return e
}

func (m *member) unexport(name string) {
	m.world.t.Helper()
	m.world.noError(m.Delete(m.world.t.Context(), &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.world.ns, Name: name}}))
}

// imported returns the ServiceImport and the imported slices of a Service, which may be missing.
func (m *member) imported(name string) (*v1beta1.ServiceImport, []discoveryv1.EndpointSlice) {
	m.world.t.Helper()
	return m.importedIn(m.world.ns, name)
}

func (m *member) importedIn(namespace, name string) (*v1beta1.ServiceImport, []discoveryv1.EndpointSlice) {
	m.world.t.Helper()
	si := &v1beta1.ServiceImport{}
	err := m.Get(m.world.t.Context(), types.NamespacedName{Namespace: namespace, Name: name}, si)
	if client.IgnoreNotFound(err) != nil {
		m.world.t.Fatal(err)
	}
	if err != nil {
		si = nil
	}
	var slices discoveryv1.EndpointSliceList
	m.world.noError(m.List(m.world.t.Context(), &slices, client.InNamespace(namespace), client.MatchingLabels{v1beta1.LabelServiceName: name}))
	return si, slices.Items
}

// expect is what an import should look like; zero fields are not looked at.
type expect struct {
	typ       v1beta1.ServiceImportType
	ips       int      // how many, for a ClusterSetIP
	clusters  []string // status.clusters
	ports     []string // "name/number"
	endpoints []string // "address:port,port" of all slices
}

// wants waits until m's import looks like e.
func (m *member) wants(name string, e expect) *v1beta1.ServiceImport {
	m.world.t.Helper()
	var si *v1beta1.ServiceImport
	m.world.eventually(func() error {
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

// wantsNone waits until nothing of the Service is imported in m.
func (m *member) wantsNone(name string) {
	m.world.t.Helper()
	m.world.eventually(func() error {
		if si, slices := m.imported(name); si != nil || len(slices) > 0 {
			return fmt.Errorf("%s still has %v and %d slices", m.id, si, len(slices))
		}
		return nil
	})
}

// condition waits until a condition of m's export has a status and reason, and returns its message.
func (m *member) condition(name, typ string, status metav1.ConditionStatus, reason string) string {
	m.world.t.Helper()
	var message string
	m.world.eventually(func() error {
		var e v1beta1.ServiceExport
		m.world.noError(m.Get(m.world.t.Context(), types.NamespacedName{Namespace: m.world.ns, Name: name}, &e))
		c := meta.FindStatusCondition(e.Status.Conditions, typ)
		if c == nil || c.Status != status || c.Reason != reason {
			return fmt.Errorf("in %s: condition %s is %+v, want %s %s", m.id, typ, c, status, reason)
		}
		message = c.Message
		return nil
	})
	return message
}

// brokerEmpty waits until nothing of any Service is left on the broker but tombstones.
func (w *world) brokerEmpty() {
	w.t.Helper()
	w.eventually(func() error {
		for _, list := range []client.ObjectList{&v1alpha1.ExportRecordList{}, &v1beta1.ServiceImportList{}, &discoveryv1.EndpointSliceList{}} {
			w.noError(w.broker.List(w.t.Context(), list, client.InNamespace(w.brokers)))
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
