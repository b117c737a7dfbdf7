package broker_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// roundTripper is a function between a client and its API server.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// faults lets every kind of request fail several times before it succeeds, each time in another way.
type faults struct {
	mu    sync.Mutex
	calls map[string]int // so far, by kind of call
}

// The ways in which a request fails. The last one is the worst: the write succeeded, but its response was lost.
var ways = []func(next http.RoundTripper, req *http.Request) (*http.Response, error){
	func(_ http.RoundTripper, req *http.Request) (*http.Response, error) {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		status := `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"out of order, says the test","reason":"InternalError","code":500}`
		return &http.Response{
			Status: "500 Internal Server Error", StatusCode: http.StatusInternalServerError, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(status)), Request: req,
		}, nil
	},
	func(next http.RoundTripper, req *http.Request) (*http.Response, error) {
		resp, err := next.RoundTrip(req)
		if err != nil {
			return nil, err
		}
		_ = resp.Body.Close()
		return nil, errors.New("answer lost by the test")
	},
}

// kind is what a call does, such as "PUT serviceimports/status", without the name and namespace.
func kind(req *http.Request) string {
	path := regexp.MustCompile(`^/(?:api|apis/[^/]+)/[^/]+/(?:namespaces/[^/]+/)?([^/]+)(?:/[^/]+(/[^/]+)?)?$`).FindStringSubmatch(req.URL.Path)
	if path == nil {
		return req.Method + " " + req.URL.Path
	}
	return req.Method + " " + path[1] + path[2]
}

// spared are kinds of requests that do not fail: they do not concern Services, or a controller sends them first and
// ends when they fail, to be restarted.
var spared = regexp.MustCompile(` (leases|events|members|/api|/apis|/apis/[^/]+|/api/[^/]+|/apis/[^/]+/[^/]+)$`)

// inject makes clients of config fail.
func inject(config *rest.Config) *faults {
	f := &faults{calls: map[string]int{}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			k := kind(req)
			if req.URL.Query().Get("watch") != "" || spared.MatchString(k) {
				return next.RoundTrip(req)
			}
			f.mu.Lock()
			n := f.calls[k]
			f.calls[k]++
			f.mu.Unlock()
			if n < len(ways) && (req.Method != http.MethodGet || n == 0) {
				return ways[n](next, req)
			}
			return next.RoundTrip(req)
		})
	})
	return f
}

// failed returns the kinds of calls that failed in every way and then worked.
func (f *faults) failed() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []string
	for k, n := range maps.All(f.calls) {
		if n > len(ways) {
			all = append(all, k)
		}
	}
	return slices.Sorted(slices.Values(all))
}

// Every kind of request of a controller, to its own API server and to the broker, fails in several ways before it
// succeeds. The clusters reach their desired state, and no object is left after everything is unexported.
func TestTransientErrorsLeaveNoTrace(t *testing.T) {
	w := newTestbed(t)
	local, remote := inject(w.a.config), inject(w.a.via)
	w.run()
	svc := w.a.service("hello")
	w.a.export("hello")
	w.a.wants("hello", helloOfA)
	w.b.wants("hello", helloOfA)
	w.b.service("hello")
	w.b.export("hello")
	for _, m := range w.both() {
		m.wants("hello", onBoth)
	}
	enough := w.b.keeps("hello", "10.98.0.1")

	// Twice, because the first time is not enough for every call to fail in every way.
	for i := range 2 {
		second := w.a.slice(svc, corev1.IPv4Protocol, 2+i)
		more := onBoth
		more.endpoints = append(slices.Clone(onBoth.endpoints), w.a.address(2+i)+":8080")
		w.a.wants("hello", more)
		w.b.wants("hello", more)
		edit(w, w.a.Client, second, func(es *discoveryv1.EndpointSlice) { es.Endpoints[0].Addresses = []string{w.a.address(200 + i)} })
		more.endpoints[2] = w.a.address(200+i) + ":8080"
		w.a.wants("hello", more)
		w.b.wants("hello", more)
		w.noError(w.a.Delete(t.Context(), second))
		w.a.unexport("hello")
		onlyB := onBoth
		onlyB.clusters, onlyB.endpoints = []string{"b"}, []string{"10.98.0.1:8080"}
		for _, m := range w.both() {
			m.wants("hello", onlyB)
		}
		w.a.service(fmt.Sprint("alone-", i))
		w.a.export(fmt.Sprint("alone-", i))
		w.b.wants(fmt.Sprint("alone-", i), helloOfA)
		w.a.unexport(fmt.Sprint("alone-", i))
		w.a.wantsNone(fmt.Sprint("alone-", i))
		w.b.wantsNone(fmt.Sprint("alone-", i))
		w.a.export("hello")
		for _, m := range w.both() {
			m.wants("hello", onBoth)
		}
		w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	}
	for what, have := range map[string][]string{"the member's API server": local.failed(), "the broker": remote.failed()} {
		for _, resource := range []string{"endpointslices", "serviceimports"} {
			if !slices.ContainsFunc(have, func(k string) bool { return strings.Contains(k, resource) }) {
				t.Errorf("no call about %s to %s has failed in every way: %v", resource, what, have)
			}
		}
	}
	t.Logf("failed in every way: here %v, on the broker %v", local.failed(), remote.failed())

	enough()
	w.a.unexport("hello")
	w.b.unexport("hello")
	w.brokerEmpty()
	conformance.Holds(t, "L48")
}

// While both controllers are down, Services and exports are deleted, and objects without an exporter appear. The
// started controllers remove them.
func TestStaleObjectsAreRemovedAtStart(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("kept")
	w.a.export("kept")
	w.a.service("service-gone")
	w.a.export("service-gone")
	w.a.service("export-gone")
	w.a.export("export-gone")
	headless := w.a.service("slice-gone", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	gone := w.a.slice(headless, corev1.IPv4Protocol, 2)
	w.a.export("slice-gone")
	for _, name := range []string{"kept", "service-gone", "export-gone"} {
		w.b.wants(name, helloOfA)
	}
	two := expect{
		typ: v1beta1.Headless, clusters: []string{"a"}, ports: []string{"http/80"},
		endpoints: []string{"10.97.0.1:8080", "10.97.0.2:8080"},
	}
	w.b.wants("slice-gone", two)
	w.quiet()
	for _, m := range w.both() {
		m.stop()
	}

	w.a.deleteService("service-gone")
	w.a.unexport("export-gone")
	w.noError(w.a.Delete(t.Context(), gone))
	// b lists itself on an aggregate without exporting the Service.
	aggregate := &v1beta1.ServiceImport{}
	aggregate.Namespace, aggregate.Name = w.brokerNS, "kept."+w.ns
	w.noError(w.broker.Get(t.Context(), client.ObjectKeyFromObject(aggregate), aggregate))
	aggregate.Status.Clusters = append(aggregate.Status.Clusters, v1beta1.ClusterStatus{Cluster: "b"})
	w.noError(w.broker.Status().Update(t.Context(), aggregate))
	// b has a slice and a record on the broker of a Service that it never exported.
	never := mcs.BrokerSlice(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: "x", Labels: map[string]string{discoveryv1.LabelServiceName: "never"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.98.0.77"}}},
	}, "b")
	record := mcs.ExportRecord(clusterset.Export{
		Cluster: "b", Service: clusterset.ServiceName{Namespace: w.ns, Name: "never"}, ExportedAt: time.Now(), Type: clusterset.ClusterSetIP,
		Families: []clusterset.Family{clusterset.IPv4}, Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	})
	never.Namespace, record.Namespace = w.brokerNS, w.brokerNS
	w.create(w.broker, never, record)
	// b has an import without an exporter, and an extra slice of an exported Service.
	stale := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "stale", Labels: map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.Headless, Ports: []v1beta1.ServicePort{}},
	}
	w.create(w.b, stale)
	for _, name := range []string{"stale", "kept"} {
		w.create(w.b, &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name + "-stale", Labels: map[string]string{
				v1beta1.LabelServiceName: name, v1beta1.LabelSourceCluster: "a", discoveryv1.LabelManagedBy: v1alpha1.ManagedBy,
			}},
			AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.97.0.66"}}},
		})
	}

	w.run()
	two.endpoints = []string{"10.97.0.1:8080"}
	for _, m := range w.both() {
		m.wants("kept", helloOfA)
		m.wants("slice-gone", two)
		for _, name := range []string{"service-gone", "export-gone", "never", "stale"} {
			m.wantsNone(name)
		}
	}
	w.a.condition("service-gone", "Valid", metav1.ConditionFalse, "NoService")
	conformance.Holds(t, "L46")
	w.eventually(func() error {
		w.noError(w.broker.Get(t.Context(), client.ObjectKeyFromObject(aggregate), aggregate))
		var clusters []string
		for _, c := range aggregate.Status.Clusters {
			clusters = append(clusters, c.Cluster)
		}
		return same("clusters of the aggregate", []string{"a"}, clusters)
	})
	conformance.Holds(t, "L47")
	w.a.unexport("service-gone")
	w.a.unexport("kept")
	w.a.unexport("slice-gone")
	w.brokerEmpty()
}
