package bystanders

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/typed/apis/v1beta1"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/broker/quotacontroller"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/view"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/hostile"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

const (
	brokerNamespace = "isthmus-broker"
	install         = "isthmus-system"
	shop            = "shop"     // the namespace of the bystanders
	mischief        = "mischief" // a namespace of hostile tenants alone

	// crook is the hostile member. Its id sorts before the others, so its objects are handled first.
	crook = "crook"
)

// numbers make the addresses of the members: pods in 10.N.0.0/16 and fd00:N::/64, ClusterSetIPs in 243.N.0.0/16.
var numbers = map[string]int{crook: 66, "east": 101, "north": 110, "west": 119}

// The ranges of ClusterSetIPs. All API servers have the Service CIDRs of apitest, as most clusters do.
var (
	ranges       = []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8"), netip.MustParsePrefix("fd00:243::/32")}
	serviceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}
)

// pods returns the addresses of a member's pods.
func pods(id string) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", numbers[id])), netip.MustParsePrefix(fmt.Sprintf("fd00:%d::/64", numbers[id]))}
}

// nodes are the addresses of a cluster's nodes, which pods in the network of their node have, too.
func nodes(id string) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("172.16.%d.0/24", numbers[id]))
}

// patience is how long anything may take that must happen.
const patience = 2 * time.Minute

// testbed is a ClusterSet with bystanders.
type testbed struct {
	t        testing.TB
	broker   client.Client // the administrator's
	crook    client.Client // on the broker
	clusters []*cluster

	bystanders []*bystander
	client     *connector
	scene      hostile.Scene
	round      int
	expectHarm bool          // do not wait for long until a change counts as one that never arrives
	baseline   time.Duration // the slowest change without hostile objects
	counts     map[string]int
	warnings   *warnings             // of all controllers and agents
	originals  map[key]client.Object // objects that hostile objects may change, as they were
	owned      map[key]bool          // hostile objects that exist
	ended      atomic.Pointer[error] // of the first component that ended
}

// cluster is one member with its controller and the agent of its only node.
type cluster struct {
	client.Client // the administrator's

	id     string
	tenant client.Client
	mirror cache.Cache // the objects of the cluster, as watches show them
	plane  *agent.Agent
	maps   *datapath.Reader
}

func newTestbed(t testing.TB) *testbed {
	t.Helper()
	netlab.Privileged(t)
	w := &testbed{t: t, warnings: &warnings{}, originals: map[key]client.Object{}, owned: map[key]bool{}}
	brokerConfig := servers.broker.Config(t)
	w.broker = newClient(t, brokerConfig)
	w.setUpBroker()
	crookConfig := asMember(brokerConfig, crook)
	w.crook = newClient(t, crookConfig)
	for id, server := range map[string]*apitest.Server{"east": &servers.east, "north": &servers.north, "west": &servers.west} {
		w.clusters = append(w.clusters, w.newCluster(id, server.Config(t)))
	}
	w.awaitPolicies()
	w.startQuotaController(brokerConfig)
	for _, c := range w.clusters {
		w.startController(c, brokerConfig)
	}
	for _, c := range w.clusters {
		w.startAgent(c)
	}
	w.makeLocal()
	w.renew()
	return w
}

func newClient(t testing.TB, config *rest.Config) client.Client {
	t.Helper()
	config = rest.CopyConfig(config)
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// asMember returns the configuration of a member on the broker.
func asMember(config *rest.Config, id string) *rest.Config {
	return as(config, "system:serviceaccount:"+brokerNamespace+":"+v1alpha1.MemberAccount(id), "system:serviceaccounts", "system:serviceaccounts:"+brokerNamespace)
}

func as(config *rest.Config, user string, groups ...string) *rest.Config {
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	return config
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

// eventually waits until check returns nil.
func (w *testbed) eventually(what string, check func() error) {
	w.t.Helper()
	if err := await.Poll(w.t.Context(), patience, check); err != nil {
		w.running()
		w.t.Fatalf("%s: %v", what, err)
	}
}

// setUpBroker leaves the broker as deploy-broker and four joins do.
func (w *testbed) setUpBroker() {
	w.t.Helper()
	w.create(w.broker, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: brokerNamespace}})
	config := &v1alpha1.ClusterSetConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: v1alpha1.ClusterSetConfigName},
		Spec:       v1alpha1.ClusterSetConfigSpec{ClusterSetID: "test", ClusterSetIPEnabled: true, ClusterSetIPCIDRRange: texts(ranges), Quotas: &quotas},
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: "member"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "member"},
	}
	for id := range numbers {
		spec := registration(id)
		config.Spec.Members = append(config.Spec.Members, v1alpha1.MemberBlocks{ClusterID: id, ClusterSetIPCIDR: spec.ClusterSetIPCIDR})
		binding.Subjects = append(binding.Subjects, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: brokerNamespace, Name: v1alpha1.MemberAccount(id)})
		w.create(w.broker, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: id}, Spec: spec})
	}
	w.create(w.broker, config, binding, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: "member"}, Rules: access.MemberBrokerRules()})
	w.create(w.broker, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: v1alpha1.QuotaController},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: v1alpha1.QuotaController},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: brokerNamespace, Name: v1alpha1.QuotaController}},
	}, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: v1alpha1.QuotaController}, Rules: access.QuotaControllerRules()})
	policies, err := access.Policies(brokerNamespace)
	w.noError(err)
	w.create(w.broker, policies...)
}

// quotas are those of each member. Drawn objects stay below them, also with the records that were withdrawn in five minutes of a
// long run: these have a quota of the same size.
var quotas = v1alpha1.Quotas{Services: 2000, Ports: 20_000}

// startQuotaController runs the quota controller of the broker.
func (w *testbed) startQuotaController(brokerConfig *rest.Config) {
	w.t.Helper()
	account := as(brokerConfig, "system:serviceaccount:"+brokerNamespace+":"+v1alpha1.QuotaController, "system:serviceaccounts", "system:serviceaccounts:"+brokerNamespace)
	controller, err := quotacontroller.New(quotacontroller.Config{REST: account, Namespace: brokerNamespace, Log: w.log("quota controller")})
	w.noError(err)
	w.background("quota controller", controller.Run)
}

// joined is when all members joined: before anything was exported.
var joined = metav1.NewTime(time.Now().Add(-time.Hour))

func registration(id string) v1alpha1.MemberSpec {
	n := numbers[id]
	return v1alpha1.MemberSpec{
		ClusterID: id, ClusterSetID: "test", ClusterSetIPEnabled: true, JoinTime: joined,
		ClusterSetIPCIDR: []string{fmt.Sprintf("243.%d.0.0/16", n), fmt.Sprintf("fd00:243:%d::/64", n)},
		PodCIDRs:         texts(pods(id)), NodeCIDRs: []string{nodes(id).String()}, ServiceCIDRs: texts(serviceCIDRs),
	}
}

func texts[T fmt.Stringer](values []T) []string {
	var all []string
	for _, v := range values {
		all = append(all, v.String())
	}
	return all
}

// awaitPolicies waits until the broker's admission policies refuse crook's attempt on another member's record, and those of
// each cluster a tenant's use of a reserved label.
func (w *testbed) awaitPolicies() {
	w.t.Helper()
	scene := hostile.Scene{Member: "east", Broker: brokerNamespace, Namespace: shop, Now: time.Now()}
	self := hostile.Scene{Member: crook, Broker: brokerNamespace, Namespace: shop, Now: time.Now()}
	w.eventually("the admission policies are in force", func() error {
		err := w.crook.Create(w.t.Context(), scene.Record("probe"), client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), "writes only objects labelled crook") {
			return fmt.Errorf("the record of another member: %w", err)
		}
		return w.crook.Create(w.t.Context(), self.Record("probe"), client.DryRunAll)
	})
	for _, c := range w.clusters {
		w.eventually("the admission policies of "+c.id+" are in force", func() error {
			si := tenantImport(mischief, "probe", "243.0.0.1", 80)
			si.Labels = map[string]string{v1alpha1.LabelManagedBy: managedBy}
			if err := c.tenant.Create(w.t.Context(), si, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "marks objects of Isthmus") {
				return fmt.Errorf("an import with the controller's label: %w", err)
			}
			return nil
		})
	}
}

// controllerUser is the account of isthmus-controller in its own cluster.
const controllerUser = "system:serviceaccount:" + install + ":isthmus-controller"

func (w *testbed) newCluster(id string, config *rest.Config) *cluster {
	w.t.Helper()
	c := &cluster{id: id, Client: newClient(w.t, config), tenant: newClient(w.t, as(config, "tenant"))}
	for _, ns := range []string{install, shop, mischief} {
		w.create(c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	}
	w.create(c, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: install, Name: id}, Spec: registration(id)})
	w.create(c, apitest.Rights(w.t, "../../controlplane/rbac/role.yaml", install, controllerUser)...) // and no others
	w.create(c, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "tenant"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"*"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"*"}},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceexports", "serviceimports"}, Verbs: []string{"*"}},
	}})
	for _, p := range tenants {
		if p.Cluster == id {
			w.create(c, &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: "tenant"},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "tenant"},
				Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "tenant"}},
			})
		}
	}
	policies, err := fences.Policies(install)
	w.noError(err)
	w.create(c, policies...)
	c.mirror, err = cache.New(config, cache.Options{Scheme: scheme, ByObject: map[client.Object]cache.ByObject{
		&v1beta1.ServiceImport{}: {}, &discoveryv1.EndpointSlice{}: {}, &v1beta1.ServiceExport{}: {},
	}})
	w.noError(err)
	for _, obj := range []client.Object{&v1beta1.ServiceImport{}, &discoveryv1.EndpointSlice{}, &v1beta1.ServiceExport{}} {
		_, err := c.mirror.GetInformer(w.t.Context(), obj, cache.BlockUntilSynced(false))
		w.noError(err)
	}
	w.background("mirror of "+id, c.mirror.Start)
	return c
}

// tenants are the places of hostile tenants. The one in west shares the namespace of the bystanders with the other members;
// it owns neither their Services nor their endpoints.
var tenants = []hostile.Place{{Cluster: "west", Namespace: shop}, {Cluster: "west", Namespace: mischief}, {Cluster: "east", Namespace: mischief}, {Cluster: "north", Namespace: mischief}}

// background runs f until the test ends. The test fails soon after f fails: a controller that lost its Lease on a busy machine
// looks like one that hostile objects stopped.
func (w *testbed) background(name string, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() {
		err := f(ctx)
		if ctx.Err() == nil {
			w.ended.CompareAndSwap(nil, new(fmt.Errorf("%s ended: %w", name, err)))
		}
		done <- err
	}()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("%s: %v", name, err)
		}
	})
}

// running fails the test if a component has ended.
func (w *testbed) running() {
	w.t.Helper()
	if err := w.ended.Load(); err != nil {
		w.t.Fatal(*err)
	}
}

// log returns the log of a component. Its warnings and errors are part of what is told; with ISTHMUS_HOSTILE_LOG set, all of it
// is in the output.
func (w *testbed) log(component string) *slog.Logger {
	var out io.Writer = w.warnings
	level := slog.LevelWarn
	if os.Getenv("ISTHMUS_HOSTILE_LOG") != "" {
		out, level = io.MultiWriter(w.warnings, w.t.Output()), slog.LevelInfo
	}
	return slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: level})).With("component", component)
}

// warnings keeps the end of a log.
type warnings struct {
	mu   sync.Mutex
	text []byte
}

func (l *warnings) Write(line []byte) (int, error) {
	const most = 1 << 20
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, line...)
	l.text = l.text[max(0, len(l.text)-most):]
	return len(line), nil
}

// take returns the log since the last call.
func (l *warnings) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := string(l.text)
	l.text = nil
	return text
}

func (w *testbed) startController(c *cluster, brokerConfig *rest.Config) {
	w.t.Helper()
	controller, err := broker.New(w.t.Context(), broker.Config{
		Local: as(w.config(c.id), controllerUser, "system:serviceaccounts", "system:serviceaccounts:"+install), Namespace: install,
		Broker: asMember(brokerConfig, c.id), BrokerNamespace: brokerNamespace, Log: w.log("controller of " + c.id),
	})
	w.noError(err)
	w.background("controller of "+c.id, controller.Run)
}

// config returns the administrator's configuration of a cluster.
func (w *testbed) config(id string) *rest.Config {
	return map[string]*apitest.Server{"east": &servers.east, "north": &servers.north, "west": &servers.west}[id].Config(w.t)
}

// startAgent runs the agent of c on the real dataplane, in a cgroup of its own. The test itself is a client in east's cgroup.
func (w *testbed) startAgent(c *cluster) {
	w.t.Helper()
	cfg := agent.Config{BPFFS: netlab.BPFFS(w.t), Topology: agent.Topology{
		Node: lb.Node{Cluster: clusterset.ClusterID(c.id), Name: "node-1"}, Ranges: ranges, Own: own(c.id),
	}}
	if c.id == "east" {
		cfg.CgroupRoot = netlab.NewTestCgroup(w.t).Path
	} else {
		group, err := netlab.NewCgroup()
		w.noError(err)
		w.t.Cleanup(func() { w.noError(os.Remove(group.Path)) })
		cfg.CgroupRoot = group.Path
	}
	var err error
	c.plane, err = agent.New(w.t.Context(), cfg, w.log("agent of "+c.id))
	w.noError(err)
	w.t.Cleanup(func() { w.noError(errors.Join(c.plane.Close(), agent.Cleanup(cfg))) })
	c.maps, err = datapath.Read(datapath.Config{CgroupRoot: cfg.CgroupRoot, BPFFS: cfg.BPFFS})
	w.noError(err)
	w.t.Cleanup(func() { w.noError(c.maps.Close()) })
	imports, err := mcsclient.NewForConfig(w.config(c.id))
	w.noError(err)
	slices, err := discoveryclient.NewForConfig(w.config(c.id))
	w.noError(err)
	source, err := view.New(view.Config{Sinks: map[string]view.Sink{"dataplane": c.plane}, ManagedBy: []string{managedBy}, Log: w.log("view of " + c.id)}, imports, slices)
	w.noError(err)
	w.background("view of "+c.id, source.Run)
}

// own returns the addresses that a cluster itself uses.
func own(id string) []lb.Own {
	var all []lb.Own
	for use, prefixes := range map[string][]netip.Prefix{
		"Services": serviceCIDRs, "pods": pods(id), "nodes": {nodes(id)},
	} {
		for _, p := range prefixes {
			all = append(all, lb.Own{Prefix: p, Use: use})
		}
	}
	return all
}

// renew renews the Lease of crook, which no controller does.
func (w *testbed) renew() {
	w.t.Helper()
	now := metav1.NowMicro()
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: brokerNamespace, Name: v1alpha1.MemberLease(crook)},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: new(crook), RenewTime: &now, LeaseDurationSeconds: new(int32(30))},
	}
	w.restore("", lease)
	w.originals[keyOf("", lease)] = lease
}
