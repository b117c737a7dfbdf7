package federation_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

const (
	namespace = "isthmus-system"
	demo      = "demo" // where member Services are
	// factor makes Leases of 2 s.
	factor = 2.0 / 15
)

// ids are the members: a and b are supervisors, c is a child.
var (
	servers = map[clusterset.ClusterID]*apitest.Server{"a": {}, "b": {}, "c": {}}
	ids     = []clusterset.ClusterID{"a", "b", "c"}
)

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	ctrllog.SetLogger(logr.Discard())
	if pod := os.Getenv(spawnedPod); pod != "" {
		spawned(pod)
		return
	}
	os.Exit(apitest.Run(m, servers["a"], servers["b"], servers["c"]))
}

// testbed is a federation over the API servers of this package.
type testbed struct {
	t       *testing.T
	admin   map[clusterset.ClusterID]client.WithWatch
	gates   map[string]*apitest.Gate // "FROM TO"
	vips    bool                     // there are ClusterSetIPs
	refuses bool                     // a member refuses something, which is tried for ever
	probe   federation.Probe         // of endpoints, which nobody has here
}

// newTestbed forms a federation of a, b and c as isthmusctl does, with real accounts and rights. Between supervisors and
// members are gates. The federation ends with the test.
func newTestbed(t *testing.T) *testbed {
	t.Helper()
	scheme, err := membership.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	w := &testbed{t: t, admin: map[clusterset.ClusterID]client.WithWatch{}, gates: map[string]*apitest.Gate{}, probe: answering}
	for _, id := range ids {
		c, err := client.NewWithWatch(servers[id].Config(t), client.Options{Scheme: scheme})
		if err != nil {
			t.Fatal(err)
		}
		w.admin[id] = c
		w.furnish(id)
	}
	if err := w.form(w.clusters(ids...)...); err != nil {
		t.Fatal(err)
	}
	for _, supervisor := range ids[:2] {
		w.edit(supervisor, func(spec *federationv1alpha1.FederationSpec) {
			for i := range spec.Members {
				gate, through := apitest.NewGate(t, servers[ids[i]].Config(t))
				w.gates[string(supervisor+" "+ids[i])] = gate
				spec.Members[i].Server = through.Host
			}
		})
	}
	t.Cleanup(w.end)
	return w
}

// furnish creates what users have in a cluster.
func (w *testbed) furnish(id clusterset.ClusterID) {
	w.t.Helper()
	if _, err := envtest.InstallCRDs(servers[id].Config(w.t), envtest.CRDInstallOptions{Paths: []string{"testdata/antrea.yaml"}, ErrorIfPathMissing: true}); err != nil {
		w.t.Fatal(err)
	}
	w.create(id, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: demo}})
}

// clusters returns members as an administrator reaches them.
func (w *testbed) clusters(of ...clusterset.ClusterID) []bootstrap.Cluster {
	w.t.Helper()
	var all []bootstrap.Cluster
	for _, id := range of {
		c := servers[id].Config(w.t)
		all = append(all, bootstrap.Cluster{ID: id, Supervisor: id != "c", Context: string(id), Client: w.admin[id], Host: c.Host, CA: c.CAData})
	}
	return all
}

// form makes clusters a federation, or adds them to it, like isthmusctl federation create.
func (w *testbed) form(clusters ...bootstrap.Cluster) error {
	w.t.Helper()
	_, err := bootstrap.Form(w.t.Context(), bootstrap.Formation{ClusterSet: "green", Namespace: namespace, Clusters: clusters})
	return err
}

// switchOnVIPs enables ClusterSetIPs.
func (w *testbed) switchOnVIPs() {
	w.t.Helper()
	w.vips = true
	for _, id := range ids {
		w.edit(id, func(spec *federationv1alpha1.FederationSpec) {
			spec.ClusterSetIP = federationv1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"242.0.0.0/16"}}
		})
	}
}

// end deletes the objects of the federation and of users in its clusters.
func (w *testbed) end() {
	ctx := context.Background()
	for _, id := range ids {
		_ = w.admin[id].Delete(ctx, &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}})
		for _, ns := range []string{namespace, federationv1alpha1.SecretNamespace, demo} {
			for _, kind := range []client.Object{
				&corev1.Service{}, &discoveryv1.EndpointSlice{}, &mcsv1beta1.ServiceImport{}, &networkingv1.NetworkPolicy{},
				&corev1.ConfigMap{}, &corev1.Secret{}, &coordinationv1.Lease{},
			} {
				if err := w.admin[id].DeleteAllOf(ctx, kind, client.InNamespace(ns)); err != nil {
					w.t.Error(err)
				}
			}
		}
		for _, kind := range []client.Object{clusterPolicy(""), &about.ClusterProperty{}} {
			if err := w.admin[id].DeleteAllOf(ctx, kind); err != nil {
				w.t.Error(err)
			}
		}
		// The API server holds on for a moment to the policy that keeps claims of a Federation.
		await.True(w.t, "claims can be deleted", func() bool { return w.admin[id].DeleteAllOf(ctx, &federationv1alpha1.ClusterClaim{}) == nil })
	}
}

// claim returns a ClusterClaim. All names here are in lower case.
func claim(name, value string) *federationv1alpha1.ClusterClaim {
	return &federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: federationv1alpha1.ClusterClaimSpec{Name: name, Value: value}}
}

func (w *testbed) create(id clusterset.ClusterID, obj client.Object) {
	w.t.Helper()
	if err := w.admin[id].Create(w.t.Context(), obj); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
}

// secret returns a supervisor's Secret for a member, ready to be written.
func (w *testbed) secret(supervisor, id clusterset.ClusterID) *corev1.Secret {
	w.t.Helper()
	have := &corev1.Secret{}
	if err := w.admin[supervisor].Get(w.t.Context(), client.ObjectKey{Namespace: federationv1alpha1.SecretNamespace, Name: "federation-" + string(id)}, have); err != nil {
		w.t.Fatal(err)
	}
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: have.Namespace, Name: have.Name}, Data: have.Data}
}

// supervise runs a supervisor process until the returned function is called or the test ends.
func (w *testbed) supervise(id clusterset.ClusterID, pod string) (*federation.Federation, func()) {
	w.t.Helper()
	return w.superviseWith(id, pod, factor)
}

// superviseWith is supervise, with the times of the withdrawal guards multiplied by guards. The guards judge together what
// vanishes within a second of the last, multiplied: where many objects must vanish in one step, 2 leaves a busy API server
// the time.
func (w *testbed) superviseWith(id clusterset.ClusterID, pod string, guards float64) (*federation.Federation, func()) {
	w.t.Helper()
	config := configOf(servers[id].Config(w.t), pod, w.log(id))
	config.Reconcilers = federation.Reconcilers(namespace, guards, w.probe, config.Log)
	f, err := federation.New(config)
	if err != nil {
		w.t.Fatal(err)
	}
	return f, w.run(f)
}

// log returns the log of a process.
func (*testbed) log(id clusterset.ClusterID) *slog.Logger {
	if testing.Verbose() {
		return slog.New(slog.NewTextHandler(os.Stderr, nil)).With("process", id)
	}
	return slog.New(slog.DiscardHandler)
}

// run runs a process until the returned function is called or the test ends.
func (w *testbed) run(f *federation.Federation) (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			w.t.Error(err)
		}
	})
	stop = func() { cancel(); running.Wait() }
	w.t.Cleanup(stop)
	return stop
}

// newFederation returns the federation of a process.
func newFederation(local *rest.Config, pod string, log *slog.Logger) (*federation.Federation, error) {
	return federation.New(configOf(local, pod, log))
}

func configOf(local *rest.Config, pod string, log *slog.Logger) federation.Config {
	return federation.Config{
		Local: local, Namespace: namespace, Pod: pod, Times: federation.Scaled(factor),
		Reconcilers: federation.Reconcilers(namespace, factor, answering, log), Log: log,
	}
}

// answering is a probe of endpoints that all answer.
func answering(context.Context, []netip.AddrPort) liveness.Verdict { return liveness.Answering }

// offer creates a Service that is a member of the global federated Service name, with endpoints of one family. The
// endpoints come first, so that everything becomes visible at once.
func (w *testbed) offer(id clusterset.ClusterID, name string, addresses ...string) {
	w.t.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: demo, Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: demo, Name: name, Annotations: map[string]string{federationv1alpha1.AnnotationGlobalService: name}},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	for _, a := range addresses {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
		if netip.MustParseAddr(a).Is6() {
			slice.AddressType, svc.Spec.IPFamilies = discoveryv1.AddressTypeIPv6, []corev1.IPFamily{corev1.IPv6Protocol}
		}
	}
	w.create(id, slice)
	w.create(id, svc)
}

// serve changes the endpoints of a member Service.
func (w *testbed) serve(id clusterset.ClusterID, name, address string) {
	w.t.Helper()
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: demo, Name: name + "-1"}}
	patch := fmt.Appendf(nil, `{"endpoints":[{"addresses":[%q],"conditions":{"ready":true}}]}`, address)
	if err := w.admin[id].Patch(w.t.Context(), slice, client.RawPatch(types.MergePatchType, patch)); err != nil {
		w.t.Fatal(err)
	}
}

// decline removes the annotation of a member Service, as its owner does.
func (w *testbed) decline(id clusterset.ClusterID, name string) {
	w.t.Helper()
	w.annotate(id, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: demo, Name: name}}, federationv1alpha1.AnnotationGlobalService, nil)
}

// annotate writes an annotation, as its owner does; nil removes it.
func (w *testbed) annotate(id clusterset.ClusterID, obj client.Object, key string, value *string) {
	w.t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{key: value}}})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := w.admin[id].Patch(w.t.Context(), obj, client.RawPatch(types.MergePatchType, patch)); err != nil {
		w.t.Fatal(err)
	}
}

// federated returns the objects of a federated Service in a member: the addresses, and each object's name with its
// resourceVersion.
func (w *testbed) federated(id clusterset.ClusterID, name string) (addresses, versions []string) {
	w.t.Helper()
	svc := &corev1.Service{}
	if err := w.admin[id].Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, svc); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	} else if err == nil {
		versions = append(versions, "Service "+svc.ResourceVersion)
	}
	var list discoveryv1.EndpointSliceList
	if err := w.admin[id].List(w.t.Context(), &list, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelServiceName: name}); err != nil {
		w.t.Fatal(err)
	}
	for _, s := range list.Items {
		versions = append(versions, fmt.Sprintf("EndpointSlice %s %s", s.Name, s.ResourceVersion))
		for _, e := range s.Endpoints {
			addresses = append(addresses, e.Addresses...)
		}
	}
	slices.Sort(addresses)
	return addresses, versions
}

// awaitEverywhere waits until a federated Service leads to addresses in all members.
func (w *testbed) awaitEverywhere(name string, addresses ...string) {
	w.t.Helper()
	await.True(w.t, fmt.Sprintf("%s leads to %v everywhere", name, addresses), func() bool {
		for _, id := range ids {
			if have, _ := w.federated(id, name); !slices.Equal(have, addresses) {
				return false
			}
		}
		return true
	})
}

// status returns the status of a member in a supervisor's Federation.
func (w *testbed) status(supervisor, id clusterset.ClusterID) federationv1alpha1.MemberStatus {
	w.t.Helper()
	f := &federationv1alpha1.Federation{}
	if err := w.admin[supervisor].Get(w.t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
		w.t.Fatal(err)
	}
	for _, m := range f.Status.Members {
		if m.ClusterID == string(id) {
			return m
		}
	}
	return federationv1alpha1.MemberStatus{}
}
