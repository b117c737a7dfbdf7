package federation_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
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
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/tools/apitest"
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

// world is a federation over the API servers of this package.
type world struct {
	t     *testing.T
	admin map[clusterset.ClusterID]client.WithWatch
	gates map[string]*apitest.Gate // "FROM TO"
}

// newWorld makes a, b and c a federation, as isthmusctl does, with gates between supervisors and members. It ends with
// the test.
func newWorld(t *testing.T) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, about.AddToScheme, federationv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	w := &world{t: t, admin: map[clusterset.ClusterID]client.WithWatch{}, gates: map[string]*apitest.Gate{}}
	for _, id := range ids {
		c, err := client.NewWithWatch(servers[id].Config(t), client.Options{Scheme: scheme})
		if err != nil {
			t.Fatal(err)
		}
		w.admin[id] = c
		for _, name := range []string{namespace, demo} {
			w.create(id, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		w.create(id, claim(federationv1alpha1.ClaimID, string(id)))
		if id != "c" {
			w.create(id, claim(federationv1alpha1.ClaimSupervisor, "true"))
		}
		for _, obj := range slices.Concat(admission.Fence(namespace, id), admission.Own(namespace), admission.Claims()) {
			w.create(id, obj)
		}
	}
	for _, supervisor := range []clusterset.ClusterID{"a", "b"} {
		f := &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}, Spec: federationv1alpha1.FederationSpec{ClusterSet: "green"}}
		for _, id := range ids {
			gate, through := apitest.NewGate(t, servers[id].Config(t))
			w.gates[string(supervisor+" "+id)] = gate
			w.create(supervisor, w.secret(supervisor, id))
			f.Spec.Members = append(f.Spec.Members, federationv1alpha1.MemberCluster{ClusterID: string(id), Server: through.Host, Secret: "federation-" + string(id)})
		}
		w.create(supervisor, f)
	}
	t.Cleanup(w.end)
	return w
}

// end removes what a federation has in its clusters.
func (w *world) end() {
	ctx := context.Background()
	for _, id := range ids {
		_ = w.admin[id].Delete(ctx, &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}})
		for _, ns := range []string{namespace, demo} {
			for _, kind := range []client.Object{&corev1.Service{}, &discoveryv1.EndpointSlice{}, &corev1.Secret{}, &coordinationv1.Lease{}} {
				if err := w.admin[id].DeleteAllOf(ctx, kind, client.InNamespace(ns)); err != nil {
					w.t.Error(err)
				}
			}
		}
		_ = w.admin[id].DeleteAllOf(ctx, &about.ClusterProperty{})
		// The API server holds on for a moment to the policy that keeps claims of a Federation.
		eventually(w.t, "claims can be deleted", func() bool { return w.admin[id].DeleteAllOf(ctx, &federationv1alpha1.ClusterClaim{}) == nil })
	}
}

// claim is a ClusterClaim, all of whose names here are in lower case.
func claim(name, value string) *federationv1alpha1.ClusterClaim {
	return &federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: federationv1alpha1.ClusterClaimSpec{Name: name, Value: value}}
}

func (w *world) create(id clusterset.ClusterID, obj client.Object) {
	w.t.Helper()
	if err := w.admin[id].Create(w.t.Context(), obj); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
}

// secret makes the account of a supervisor in a member, and returns the Secret with its token, for the supervisor.
func (w *world) secret(supervisor, id clusterset.ClusterID) *corev1.Secret {
	w.t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: federationv1alpha1.SupervisorAccount(supervisor), Labels: map[string]string{"federation.isthmus.dev/supervisor": string(supervisor)},
	}}
	w.create(id, account)
	w.create(id, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account.Name}},
	})
	request := &authenticationv1.TokenRequest{}
	if err := w.admin[id].SubResource("token").Create(w.t.Context(), account, request); err != nil {
		w.t.Fatal(err)
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "federation-" + string(id)},
		Data:       map[string][]byte{federationv1alpha1.SecretToken: []byte(request.Status.Token), federationv1alpha1.SecretCA: servers[id].Config(w.t).CAData},
	}
}

// supervise runs a supervisor's process until the returned function is called, or the test ends.
func (w *world) supervise(id clusterset.ClusterID, pod string) (*federation.Federation, func()) {
	w.t.Helper()
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("supervisor", id)
	}
	f, err := newFederation(servers[id].Config(w.t), pod, log)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			w.t.Error(err)
		}
	})
	stop := func() { cancel(); running.Wait() }
	w.t.Cleanup(stop)
	return f, stop
}

// newFederation is a supervisor's part of a process.
func newFederation(local *rest.Config, pod string, log *slog.Logger) (*federation.Federation, error) {
	return federation.New(federation.Config{
		Local: local, Namespace: namespace, Pod: pod, Times: federation.Scaled(factor),
		Parts: federation.Parts(namespace, factor, log), Log: log,
	})
}

// offer makes a Service of a member one of the global federated Service name, with endpoints.
func (w *world) offer(id clusterset.ClusterID, name string, addresses ...string) {
	w.t.Helper()
	w.create(id, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: demo, Name: name, Annotations: map[string]string{federationv1alpha1.AnnotationGlobalService: name}},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
	})
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: demo, Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for _, a := range addresses {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
	}
	w.create(id, slice)
}

// federated returns what stands in a member for a federated Service: the addresses, and each object's name with its
// resourceVersion.
func (w *world) federated(id clusterset.ClusterID, name string) (addresses, versions []string) {
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
func (w *world) awaitEverywhere(name string, addresses ...string) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%s leads to %v everywhere", name, addresses), func() bool {
		for _, id := range ids {
			if have, _ := w.federated(id, name); !slices.Equal(have, addresses) {
				return false
			}
		}
		return true
	})
}

// status returns what the Federation of a supervisor says of a member.
func (w *world) status(supervisor, id clusterset.ClusterID) federationv1alpha1.MemberStatus {
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

// eventually waits until done is true.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); !done(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute for: %s", what)
		}
	}
}
