package view

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var server apitest.Server

func TestMain(m *testing.M) { os.Exit(apitest.Run(m, &server)) }

// The writers of objects in TestManagedBy.
const ours, federation, another = v1alpha1.ManagedBy, "federation.isthmus.dev", "another.example.org"

// In a cluster with our controllers, only their objects count. A tenant's ServiceImport imports nothing, and an EndpointSlice that
// merely names an imported Service adds no backend to it, whether it is there from the start or comes later. Beside another
// implementation all objects count.
func TestManagedBy(t *testing.T) {
	config := server.Config(t)
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	mcs, err := mcsclient.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	w := &writer{t: t, kube: kube, mcs: mcs}
	for _, ns := range []string{"demo", "isthmus-broker"} {
		if _, err := kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	w.addImport("demo", "hello", ours)
	w.addImport("demo", "fed", federation)
	w.addImport("demo", "foreign", "")
	w.addImport("isthmus-broker", "hello.demo", ours) // an aggregate, by a member that gives it the label
	w.addSlice("hello-a", "hello", ours, "10.1.0.1")
	w.addSlice("hello-x", "hello", another, "10.9.0.1")
	w.addSlice("fed-a", "fed", federation, "10.1.0.2")

	guarded, open := w.watch(ours, federation), w.watch()
	w.await(guarded, "demo/fed [10.1.0.2]; demo/hello [10.1.0.1]")
	w.await(open, "demo/fed [10.1.0.2]; demo/foreign []; demo/hello [10.1.0.1 10.9.0.1]")

	w.addImport("demo", "later", another)
	w.addSlice("hello-y", "hello", "", "10.9.0.2")
	w.addSlice("hello-b", "hello", ours, "10.1.0.3")
	w.await(open, "demo/fed [10.1.0.2]; demo/foreign []; demo/hello [10.1.0.1 10.1.0.3 10.9.0.1 10.9.0.2]; demo/later []")
	w.await(guarded, "demo/fed [10.1.0.2]; demo/hello [10.1.0.1 10.1.0.3]")
}

// writer writes objects to a real API server.
type writer struct {
	t    *testing.T
	kube kubernetes.Interface
	mcs  mcsclient.Interface
}

func (w *writer) addImport(namespace, name, managedBy string) {
	w.t.Helper()
	imp := &mcsv1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{}},
		Spec: mcsv1beta1.ServiceImportSpec{
			Type: mcsv1beta1.ClusterSetIP, IPs: []string{"243.0.0.1"}, IPFamilies: ipv4Only,
			Ports: []mcsv1beta1.ServicePort{{Name: "http", Protocol: "TCP", Port: 80}},
		},
	}
	if managedBy != "" {
		imp.Labels[v1alpha1.LabelManagedBy] = managedBy
	}
	if _, err := w.mcs.MulticlusterV1beta1().ServiceImports(namespace).Create(w.t.Context(), imp, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) addSlice(name, service, managedBy, addr string) {
	w.t.Helper()
	es := endpointSlice(name, addr)
	es.Labels[mcsv1beta1.LabelServiceName] = service
	if managedBy != "" {
		es.Labels[discoveryv1.LabelManagedBy] = managedBy
	}
	if _, err := w.kube.DiscoveryV1().EndpointSlices("demo").Create(w.t.Context(), es, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// watch runs a View of the objects of these writers until the test ends.
func (w *writer) watch(managedBy ...string) *recorder {
	w.t.Helper()
	sink := &recorder{}
	cfg := Config{Sinks: map[string]Sink{"sink": sink}, ManagedBy: managedBy, Log: slog.New(slog.DiscardHandler)}
	v, err := New(cfg, w.mcs.MulticlusterV1beta1(), w.kube.DiscoveryV1())
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error)
	go func() { done <- v.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	return sink
}

// await waits until the last Snapshot has these Services with these endpoints.
func (w *writer) await(sink *recorder, want string) {
	w.t.Helper()
	var have string
	tick, late := time.NewTicker(10*time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for {
		if calls := sink.seen(); len(calls) > 0 {
			var services []string
			for _, s := range calls[len(calls)-1].snapshot.Services {
				var addrs []string
				for _, slice := range s.Slices {
					for _, e := range slice.Endpoints {
						addrs = append(addrs, e.Addrs[0].String())
					}
				}
				services = append(services, fmt.Sprint(s.Service, " ", addrs))
			}
			if have = strings.Join(services, "; "); have == want {
				return
			}
		}
		select {
		case <-tick.C:
		case <-late:
			w.t.Fatalf("the last Snapshot has\n%s\nwant\n%s", have, want)
		}
	}
}
