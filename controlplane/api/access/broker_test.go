package access_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/mcs-api/pkg/apis/v1alpha1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

var server apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(s), isthmus.AddToScheme(s), v1beta1.Install(s), v1alpha1.Install(s)); err != nil {
		panic(err)
	}
	return s
}()

// blocks are what the members of every test may allocate. The names of a and a.b begin alike; to careless an
// administrator gave more rights than members have.
var blocks = map[string][]string{
	"a":        {"243.0.0.0/16", "fd00:243:0:1::/64"},
	"a.b":      {"243.1.0.0/16", "fd00:243:0:2::/64"},
	"b":        {"243.2.0.0/16", "fd00:243:0:3::/64"},
	"careless": nil,
}

// broker is one broker, as deploy-broker and three joins leave it: a namespace of the package's API server.
type broker struct {
	t         testing.TB
	namespace string
	admin     client.Client
}

var brokers atomic.Int32

// newBroker returns a broker whose policies are in force.
func newBroker(t testing.TB) *broker {
	t.Helper()
	b := &broker{t: t, namespace: fmt.Sprintf("broker-%d", brokers.Add(1)), admin: newClient(t, server.Config(t))}
	b.write(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.namespace}})
	config := &isthmus.ClusterSetConfig{ObjectMeta: b.meta(isthmus.ClusterSetConfigName), Spec: isthmus.ClusterSetConfigSpec{ClusterSetID: "test"}}
	b.write(&rbacv1.Role{ObjectMeta: b.meta("member"), Rules: access.MemberBrokerRules()})
	for id, cidrs := range blocks {
		config.Spec.Members = append(config.Spec.Members, isthmus.MemberBlocks{ClusterID: id, ClusterSetIPCIDR: cidrs})
		b.write(b.registration(id, cidrs))
		b.account(id)
	}
	b.write(config)
	b.write(&rbacv1.Role{ObjectMeta: b.meta("careless"), Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"isthmus.dev", "discovery.k8s.io", "multicluster.x-k8s.io", "coordination.k8s.io"},
		Resources: []string{"exportrecords", "endpointslices", "serviceimports", "serviceimports/status", "leases"},
		Verbs:     []string{"*"},
	}}})
	b.bind("careless", "careless")
	b.account("stranger") // has the rights, and is not a member
	policies, err := access.Policies(b.namespace)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range policies {
		b.write(p)
		t.Cleanup(func() { b.noError(b.admin.Delete(context.WithoutCancel(t.Context()), p)) })
	}
	b.awaitPolicies()
	return b
}

// registration returns the Member of id, as join writes it.
func (b *broker) registration(id string, blocks []string) *isthmus.Member {
	m := &isthmus.Member{ObjectMeta: b.meta(id), Spec: isthmus.MemberSpec{ClusterID: id, ClusterSetID: "test", ClusterSetIPCIDR: blocks, JoinTime: metav1.Now()}}
	m.Labels = map[string]string{isthmus.LabelCluster: id}
	m.Annotations = map[string]string{"isthmus.dev/cluster-uid": "uid of " + id}
	if id == "a" {
		m.Spec.PodCIDRs = []string{"10.77.0.0/16"}
	}
	return m
}

// account gives member id its account and rights.
func (b *broker) account(id string) {
	b.t.Helper()
	name := isthmus.MemberAccount(id)
	b.write(&corev1.ServiceAccount{ObjectMeta: b.meta(name)})
	b.bind("member", id)
}

// bind gives a role to member id.
func (b *broker) bind(role, id string) {
	b.t.Helper()
	name := isthmus.MemberAccount(id)
	b.write(&rbacv1.RoleBinding{
		ObjectMeta: b.meta(role + "-" + name),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: name, Namespace: b.namespace}},
	})
}

// config returns the client configuration of member id, who shows a token as in real life.
func (b *broker) config(id string) *rest.Config {
	b.t.Helper()
	token := &authenticationv1.TokenRequest{}
	account := &corev1.ServiceAccount{ObjectMeta: b.meta(isthmus.MemberAccount(id))}
	// While policies are new, an API server refuses tokens for a moment.
	await.NoError(b.t, "a token of "+id, func() error { return b.admin.SubResource("token").Create(b.t.Context(), account, token) })
	c := rest.AnonymousClientConfig(server.Config(b.t))
	c.BearerToken = token.Status.Token
	return c
}

func (b *broker) member(id string) client.Client {
	b.t.Helper()
	return newClient(b.t, b.config(id))
}

func newClient(t testing.TB, c *rest.Config) client.Client {
	t.Helper()
	c.QPS = -1
	c.WarningHandler = rest.NoWarnings{}
	made, err := client.New(c, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// awaitPolicies returns when each policy has refused something and all let pass what is right. An API server
// needs a moment to learn of a policy, its binding and its parameter.
func (b *broker) awaitPolicies() {
	b.t.Helper()
	a, stranger := b.member("a"), b.member("stranger")
	foreign := b.record("stranger", "probe", "demo")
	b.write(foreign)
	probes := map[string]func() error{
		"members.delete": func() error { return stranger.Delete(b.t.Context(), foreign, client.DryRunAll) },
		"members":        func() error { return b.dryRun(stranger, b.lease("stranger")) },
		"exportrecords":  func() error { return b.dryRun(a, b.record("b", "probe", "demo")) },
		"endpointslices": func() error { return b.dryRun(a, b.slice("b", "probe", "demo")) },
		"leases":         func() error { return b.dryRun(a, b.lease("b")) },
		"aggregates":     func() error { return b.dryRun(a, b.aggregate("probe", "kube-system", "")) },
		"clustersetips":  func() error { return b.dryRun(a, b.aggregate("probe", "demo", "a", "10.0.0.1")) },
	}
	await.NoError(b.t, "the policies are in force", func() error {
		for policy, probe := range probes {
			bound := "with binding 'isthmus." + b.namespace + "." + policy + "'"
			if err := probe(); err == nil || !strings.Contains(err.Error(), bound) || strings.Contains(err.Error(), "failed to configure") {
				return fmt.Errorf("policy %s: %w", policy, err)
			}
		}
		return errors.Join(b.dryRun(a, b.lease("a")), b.dryRun(a, b.aggregate("probe", "demo", "a", "243.0.0.1")))
	})
	b.noError(b.admin.Delete(b.t.Context(), foreign))
}

func (b *broker) dryRun(c client.Client, obj client.Object) error {
	return c.Create(b.t.Context(), obj, client.DryRunAll)
}

func (b *broker) noError(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// write creates obj as the administrator.
func (b *broker) write(obj client.Object) {
	b.t.Helper()
	b.noError(b.admin.Create(b.t.Context(), obj))
}

func (b *broker) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: b.namespace, Name: name}
}

// record returns what member id writes when it exports a Service, made by the code that makes it in real life.
func (b *broker) record(id, service, namespace string) *isthmus.ExportRecord {
	r := mcs.ExportRecord(clusterset.Export{
		Cluster: clusterset.ClusterID(id), Service: clusterset.ServiceName{Namespace: namespace, Name: service},
		ExportedAt: time.Now(), Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4},
		Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	})
	r.Namespace = b.namespace
	return r
}

// slice returns an EndpointSlice of member id, as its export writes it.
func (b *broker) slice(id, service, namespace string, addresses ...string) *discoveryv1.EndpointSlice {
	source := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: service + "-x7k2p", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for _, a := range addresses {
		source.Endpoints = append(source.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: new("node-1"), Zone: new("z1")})
	}
	es := mcs.BrokerSlice(source, clusterset.ClusterID(id))
	es.Namespace = b.namespace
	return es
}

// aggregate returns an aggregate as member by, or a, creates it; without ips, no member has allocated one.
func (b *broker) aggregate(service, namespace, by string, ips ...string) *v1beta1.ServiceImport {
	a := clusterset.Aggregate{Service: clusterset.ServiceName{Namespace: namespace, Name: service}, Type: clusterset.ClusterSetIP}
	for _, ip := range ips {
		a.IPs = append(a.IPs, netip.MustParseAddr(ip))
	}
	if len(ips) > 0 {
		a.AllocatedBy = clusterset.ClusterID(by)
	}
	si := mcs.Aggregate(a)
	si.Namespace = b.namespace
	metav1.SetMetaDataAnnotation(&si.ObjectMeta, isthmus.AnnotationCreatedBy, cmp.Or(by, "a"))
	return si
}

// lease returns the Lease of member id.
func (b *broker) lease(id string) *coordinationv1.Lease {
	now := metav1.NowMicro()
	return &coordinationv1.Lease{
		ObjectMeta: b.meta(isthmus.MemberLease(id)),
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &id, RenewTime: &now, LeaseDurationSeconds: new(int32(30))},
	}
}

// exporting puts on the broker what clusters have there that export a Service together: records, slices and
// the aggregate, whose ClusterSetIP is the first cluster's.
func (b *broker) exporting(service, ip string, clusters ...string) {
	b.t.Helper()
	si := b.aggregate(service, "demo", clusters[0], ip)
	b.write(si)
	for _, id := range clusters {
		b.write(b.record(id, service, "demo"))
		b.write(b.slice(id, service, "demo", "10.0.0.1"))
	}
	b.list(si, clusters...)
}

// list makes the aggregate say that clusters export.
func (b *broker) list(si *v1beta1.ServiceImport, clusters ...string) {
	b.t.Helper()
	si.Status.Clusters = nil
	for _, id := range slices.Sorted(slices.Values(clusters)) {
		si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: id})
	}
	b.noError(b.admin.Status().Update(b.t.Context(), si))
}

// alter returns obj after edit.
func alter[T client.Object](obj T, edit func(T)) T {
	edit(obj)
	return obj
}

// refused reports why err is not the refusal that reason says, or nil. The API server refuses in two ways:
// for lack of a right or by a policy (Forbidden), and because the object is wrong for everybody (Invalid).
func refused(err error, reason string) error {
	switch {
	case err == nil:
		return errors.New("it was allowed")
	case !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err):
		return fmt.Errorf("it failed for another reason: %w", err)
	case !strings.Contains(err.Error(), reason):
		return fmt.Errorf("it was refused, but not because of %q: %w", reason, err)
	}
	return nil
}
