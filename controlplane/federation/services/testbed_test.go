package services_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var a, b, c apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &a, &b, &c))
}

const (
	global     = "svc.global.federated.antreaplus.vmware-tanzu.com"
	namespaced = "svc.federated.antreaplus.vmware.com"
	system     = "isthmus-system"
	status     = "federation.isthmus.dev/service-status"
	markOf     = "cluster.federated.antreaplus.vmware-tanzu.com"
)

// testbed is a federation of a, b and c, with a namespace of the test for its member Services.
type testbed struct {
	*reconciletest.Federation

	t          *testing.T
	reconciler *services.Reconciler
	namespace  string
	resolve    func(context.Context, string) ([]netip.Addr, time.Duration, error) // of what restart makes
	probe      func(context.Context, []netip.AddrPort) liveness.Verdict           // likewise
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1beta1.Install, isthmus.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return s
}()

// namespaceOf returns the name of a namespace for a test.
func namespaceOf(t *testing.T) string {
	t.Helper()
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(t.Name()))
}

// newTestbed returns a testbed whose Federation has a spec. The objects of the test are deleted when it ends.
func newTestbed(t *testing.T, spec v1alpha1.FederationSpec) *testbed {
	t.Helper()
	w := &testbed{t: t, namespace: namespaceOf(t), resolve: func(context.Context, string) ([]netip.Addr, time.Duration, error) {
		return []netip.Addr{netip.MustParseAddr("203.0.113.77")}, time.Hour, nil
	}}
	w.restart(spec)
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		for _, ns := range []string{system, w.namespace} {
			w.create(id, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
		}
	}
	members := []*reconciletest.Member{w.Member("a"), w.Member("b"), w.Member("c")}
	t.Cleanup(func() {
		for _, m := range members {
			for _, o := range []client.Object{&corev1.Service{}, &discoveryv1.EndpointSlice{}, &v1beta1.ServiceImport{}} {
				for _, ns := range []string{system, w.namespace} {
					if err := m.Client().DeleteAllOf(context.Background(), o, client.InNamespace(ns)); err != nil {
						t.Error(err)
					}
				}
			}
		}
	})
	return w
}

// restart replaces the leader by another process.
func (w *testbed) restart(spec v1alpha1.FederationSpec) {
	w.t.Helper()
	var err error
	w.reconciler, err = services.New(services.Config{
		Namespace: system, Federation: spec, Log: slog.New(slog.DiscardHandler),
		Guard:   withdrawal.Config[clusterset.ServiceName]{Times: withdrawal.Times{Window: 10 * time.Millisecond, Grace: time.Millisecond}},
		Resolve: w.resolve, Probe: w.probe,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.Federation = reconciletest.New(w.t, scheme, w.reconciler, map[clusterset.ClusterID]*rest.Config{"a": a.Config(w.t), "b": b.Config(w.t), "c": c.Config(w.t)})
}

// runs runs the Reconciler, and returns a function that waits until it enqueues a key.
func (w *testbed) runs() func() {
	w.t.Helper()
	asked, done := make(chan reconcile.Key, 100), make(chan struct{})
	ctx, cancel := context.WithCancel(w.t.Context())
	go func() {
		defer close(done)
		_ = w.reconciler.Run(ctx, func(key reconcile.Key, _ ...clusterset.ClusterID) { asked <- key })
	}()
	w.t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() {
		w.t.Helper()
		select {
		case <-asked:
		case <-time.After(30 * time.Second):
			w.t.Fatal("no key is asked for again")
		}
	}
}

// sync reads all members and reconciles into, or all members that are not silent.
func (w *testbed) sync(into ...clusterset.ClusterID) {
	w.t.Helper()
	if err := w.Reconcile(w.t.Context(), into...); err != nil {
		w.t.Fatal(err)
	}
}

// succeed takes over as the leader of epoch 2 in every member, and reconciles a global Service there.
func (w *testbed) succeed(name string) {
	w.t.Helper()
	var members []reconcile.Member
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		members = append(members, w.Member(id))
	}
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		if err := w.reconciler.Reconcile(w.t.Context(), reconcile.Key{Kind: "Service", Namespace: system, Name: name}, w.Member(id).Lead(2), members); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *testbed) create(id clusterset.ClusterID, objects ...client.Object) {
	w.t.Helper()
	for _, o := range objects {
		if err := w.Member(id).Client().Create(w.t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
			w.t.Fatal(err)
		}
	}
}

// offer creates a Service in a cluster, annotated with a name, and a slice of pods for it.
func (w *testbed) offer(id clusterset.ClusterID, service, annotation, name string, change func(*corev1.Service), pods ...string) *corev1.Service {
	w.t.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: service, Annotations: map[string]string{annotation: name}},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	if change != nil {
		change(svc)
	}
	ingress := svc.Status.LoadBalancer
	w.create(id, svc)
	if len(ingress.Ingress) > 0 {
		svc.Status.LoadBalancer = ingress
		if err := w.Member(id).Client().Status().Update(w.t.Context(), svc); err != nil {
			w.t.Fatal(err)
		}
	}
	es := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.namespace, Name: service + "-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for _, p := range pods {
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{p}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
	}
	w.create(id, es)
	return svc
}

// get returns an object of a cluster, and whether it exists.
func get[T any, P interface {
	*T
	client.Object
}](w *testbed, id clusterset.ClusterID, namespace, name string) (P, bool) {
	w.t.Helper()
	o := P(new(T))
	err := w.Member(id).Client().Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, o)
	if client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	return o, err == nil
}

// edit changes a Service of a cluster.
func (w *testbed) edit(id clusterset.ClusterID, namespace, name string, change func(*corev1.Service)) {
	w.t.Helper()
	svc, _ := get[corev1.Service](w, id, namespace, name)
	change(svc)
	if err := w.Member(id).Client().Update(w.t.Context(), svc); err != nil {
		w.t.Fatal(err)
	}
}

func (w *testbed) delete(id clusterset.ClusterID, o client.Object) {
	w.t.Helper()
	if err := w.Member(id).Client().Delete(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

// slices returns the slices of a federated Service in a cluster, as "CLUSTER: ADDRESS:PORT ADDRESS:PORT", sorted.
func (w *testbed) slices(id clusterset.ClusterID, namespace, name string) []string {
	w.t.Helper()
	var list discoveryv1.EndpointSliceList
	err := w.Member(id).Client().List(w.t.Context(), &list, client.InNamespace(namespace), client.MatchingLabels{
		discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "federation.isthmus.dev",
	})
	if err != nil {
		w.t.Fatal(err)
	}
	var all []string
	for _, es := range list.Items {
		line := es.Annotations[markOf] + ":"
		for _, e := range es.Endpoints {
			line += fmt.Sprintf(" %s:%d", e.Addresses[0], *es.Ports[0].Port)
		}
		all = append(all, line)
	}
	slices.Sort(all)
	return all
}

// versions returns the resource versions of all objects in the namespaces of the test. They differ after any write.
func (w *testbed) versions() map[string]string {
	w.t.Helper()
	all := map[string]string{}
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		for _, list := range []client.ObjectList{&corev1.ServiceList{}, &discoveryv1.EndpointSliceList{}, &v1beta1.ServiceImportList{}} {
			for _, ns := range []string{system, w.namespace} {
				if err := w.Member(id).Client().List(w.t.Context(), list, client.InNamespace(ns)); err != nil {
					w.t.Fatal(err)
				}
				err := meta.EachListItem(list, func(item runtime.Object) error {
					o := item.(client.Object)
					all[fmt.Sprintf("%s %T %s/%s", id, o, o.GetNamespace(), o.GetName())] = o.GetResourceVersion()
					return nil
				})
				if err != nil {
					w.t.Fatal(err)
				}
			}
		}
	}
	return all
}
