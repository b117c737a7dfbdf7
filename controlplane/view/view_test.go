package view

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientfeatures "k8s.io/client-go/features"
	clientfeaturestesting "k8s.io/client-go/features/testing"
	kubefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsfake "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/fake"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// recorder is a Sink that records Snapshots, and fails a given number of times.
type recorder struct {
	mu    sync.Mutex
	calls []call
	fail  error
	hang  bool // until ctx is done
}

type call struct {
	at       time.Time
	snapshot *clusterset.Snapshot
}

func (r *recorder) Sync(ctx context.Context, s *clusterset.Snapshot) error {
	r.mu.Lock()
	r.calls = append(r.calls, call{time.Now(), s})
	fail, hang := r.fail, r.hang
	r.mu.Unlock()
	if hang {
		<-ctx.Done()
	}
	return fail
}

func (r *recorder) failWith(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = err
}

func (r *recorder) seen() []call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]call(nil), r.calls...)
}

func (r *recorder) last(t *testing.T) *clusterset.Snapshot {
	t.Helper()
	calls := r.seen()
	if len(calls) == 0 {
		t.Fatal("nothing was synced")
	}
	return calls[len(calls)-1].snapshot
}

// testbed is a fake API server, the View on it, and the View's log.
type testbed struct {
	t      *testing.T
	mcs    *mcsfake.Clientset
	kube   *kubefake.Clientset
	view   *View
	log    *bytes.Buffer
	cancel context.CancelFunc
	done   chan struct{}
}

// newTestbed prepares a View that run starts. Call it inside a synctest bubble.
func newTestbed(t *testing.T, cfg Config) *testbed {
	t.Helper()
	// The fake clients know list and watch, not the streaming list.
	clientfeaturestesting.SetFeatureDuringTest(t, clientfeatures.WatchListClient, false)
	w := &testbed{t: t, mcs: mcsfake.NewSimpleClientset(), kube: kubefake.NewClientset(), log: &bytes.Buffer{}, done: make(chan struct{})}
	cfg.Log = slog.New(slog.NewTextHandler(w.log, nil))
	v, err := New(cfg, w.mcs.MulticlusterV1beta1(), w.kube.DiscoveryV1())
	if err != nil {
		t.Fatal(err)
	}
	w.view = v
	return w
}

func (w *testbed) run() {
	ctx, cancel := context.WithCancel(w.t.Context())
	w.cancel = cancel
	go func() {
		defer close(w.done)
		if err := w.view.Run(ctx); err != nil {
			w.t.Errorf("Run: %v", err)
		}
	}()
}

// stop ends the View and lets what client-go starts on its own run out.
func (w *testbed) stop() {
	w.cancel()
	<-w.done
	synctest.Wait()
}

func (w *testbed) addImport(name string) {
	w.t.Helper()
	imp := &mcsv1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name},
		Spec: mcsv1beta1.ServiceImportSpec{
			Type: mcsv1beta1.ClusterSetIP, IPs: []string{"243.0.0.1"}, IPFamilies: ipv4Only,
			Ports: []mcsv1beta1.ServicePort{{Name: "http", Protocol: "TCP", Port: 80}},
		},
	}
	if _, err := w.mcs.MulticlusterV1beta1().ServiceImports("demo").Create(w.t.Context(), imp, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *testbed) addSlice(name, addr string) {
	w.t.Helper()
	if _, err := w.kube.DiscoveryV1().EndpointSlices("demo").Create(w.t.Context(), endpointSlice(name, addr), metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// later lets d pass.
func later(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestNothingIsSyncedBeforeAllCaches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}})
		release := make(chan struct{})
		w.kube.PrependReactor("list", "endpointslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			<-release
			return false, nil, nil
		})
		w.addImport("hello")
		w.run()
		defer w.stop()

		later(10 * time.Minute)
		if n := len(sink.seen()); n != 0 {
			t.Errorf("synced %d times with half a world", n)
		}
		if s := w.view.Status(); s.Synced || !s.Built.IsZero() {
			t.Errorf("status claims to have synced: %+v", s)
		}
		close(release)
		later(time.Second)
		if n := len(sink.seen()); n != 1 {
			t.Errorf("synced %d times once all was there, want 1", n)
		}
		if s := w.view.Status(); !s.Synced || s.Services != 1 || s.Sinks["sink"].Synced.IsZero() {
			t.Errorf("status after the first sync: %+v", s)
		}
	})
}

// A cluster that is both broker and member also has the aggregates of the ClusterSet.
func TestAggregatesAreNotImports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}})
		w.addImport("hello")
		aggregate := &mcsv1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-broker", Name: "hello.demo", Labels: map[string]string{
				v1alpha1.LabelServiceName: "hello", v1alpha1.LabelServiceNamespace: "demo",
			}},
			Spec: mcsv1beta1.ServiceImportSpec{Type: mcsv1beta1.ClusterSetIP, IPs: []string{"243.0.0.1"}},
		}
		if _, err := w.mcs.MulticlusterV1beta1().ServiceImports("isthmus-broker").Create(t.Context(), aggregate, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.run()
		defer w.stop()

		later(time.Second)
		if s := sink.last(t); len(s.Services) != 1 || s.Services[0].Service.Name != "hello" {
			t.Errorf("want the import demo/hello alone, got %+v", s.Services)
		}
	})
}

func TestChangesAreCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		const gap = 100 * time.Millisecond
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}, MinInterval: gap, MaxInterval: time.Hour})
		w.run()
		defer w.stop()
		later(time.Second)

		w.addImport("hello")
		for i := range 50 {
			w.addSlice(fmt.Sprintf("hello-%02d", i), fmt.Sprintf("10.1.0.%d", i+1))
			later(10 * time.Millisecond)
		}
		later(gap)
		calls := sink.seen()
		if n := len(calls); n > 8 { // the first, five in half a second, and the last one
			t.Errorf("51 changes in 500 ms made %d syncs with %s between them", n, gap)
		}
		for i := 1; i < len(calls); i++ {
			if d := calls[i].at.Sub(calls[i-1].at); d < gap {
				t.Errorf("syncs %d and %d are only %s apart", i-1, i, d)
			}
		}
		if n := len(sink.last(t).Services[0].Slices); n != 50 {
			t.Errorf("the last snapshot has %d slices, want 50", n)
		}
	})
}

func TestMaxIntervalRepeatsTheSameSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}, MaxInterval: time.Minute})
		w.addImport("hello")
		w.run()
		defer w.stop()
		later(5*time.Minute + 30*time.Second)
		calls := sink.seen()
		if len(calls) != 6 {
			t.Errorf("%d syncs in five and a half silent minutes, want 6", len(calls))
		}
		for _, c := range calls {
			if c.snapshot != calls[0].snapshot {
				t.Error("silence made another snapshot")
			}
		}
	})
}

func TestSinksFailAlone(t *testing.T) {
	errFull := errors.New("map is full")
	synctest.Test(t, func(t *testing.T) {
		good, bad, hung := &recorder{}, &recorder{fail: errFull}, &recorder{hang: true}
		w := newTestbed(t, Config{
			Sinks:         map[string]Sink{"good": good, "bad": bad, "hung": hung},
			RetryInterval: 200 * time.Millisecond, MaxInterval: time.Hour,
		})
		w.addImport("hello")
		w.run()
		defer w.stop()

		later(time.Second)
		w.addImport("world")
		later(10 * time.Second)
		if n := len(good.last(t).Services); n != 2 {
			t.Errorf("the good sink has %d services, want 2", n)
		}
		// Tried at 0, 0.2, 0.6, then by the change at 1.0, and from there after 0.8, 1.6, 3.2 s ...
		if n := len(bad.seen()); n < 5 || n > 8 {
			t.Errorf("the bad sink was tried %d times in 11 s; backoff should make it 5 to 8", n)
		}
		if err := w.view.Status().Sinks["bad"].Err; !errors.Is(err, errFull) {
			t.Errorf("status of the bad sink: %v", err)
		}
		if n := strings.Count(w.log.String(), "map is full"); n != 1 {
			t.Errorf("one lasting failure was logged %d times", n)
		}

		bad.failWith(nil)
		later(time.Minute)
		if st := w.view.Status().Sinks["bad"]; st.Err != nil || st.Synced.IsZero() {
			t.Errorf("the sink works again, its status says %+v", st)
		}
	})
}

func TestBadObjectIsSkippedAndLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}})
		w.addImport("hello")
		w.addSlice("bad", "not-an-address")
		w.addSlice("good", "10.1.0.1")
		w.run()
		defer w.stop()

		later(time.Hour)
		got := sink.last(t).Services
		if len(got) != 1 || len(got[0].Slices) != 1 || got[0].Slices[0].Name != "good" {
			t.Errorf("want the good slice alone, have %+v", got)
		}
		if n := strings.Count(w.log.String(), "name=bad"); n != 1 {
			t.Errorf("one bad object was logged %d times:\n%s", n, w.log)
		}
	})
}

func TestDeletedObjectsLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}})
		w.addImport("hello")
		w.addSlice("one", "10.1.0.1")
		w.run()
		defer w.stop()
		later(time.Second)
		if err := w.kube.DiscoveryV1().EndpointSlices("demo").Delete(t.Context(), "one", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		later(time.Second)
		if n := len(sink.last(t).Services[0].Slices); n != 0 {
			t.Errorf("%d slices are left", n)
		}
		if err := w.mcs.MulticlusterV1beta1().ServiceImports("demo").Delete(t.Context(), "hello", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		later(time.Second)
		if n := len(sink.last(t).Services); n != 0 {
			t.Errorf("%d services are left", n)
		}
	})
}

func TestUnreachableServerIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		w := newTestbed(t, Config{Sinks: map[string]Sink{"sink": sink}})
		down := errors.New("connection refused")
		var mu sync.Mutex
		w.mcs.PrependReactor("list", "serviceimports", func(clienttesting.Action) (bool, runtime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			return down != nil, nil, down
		})
		w.run()
		defer w.stop()
		later(time.Minute)
		if err := w.view.Status().WatchErr; err == nil {
			t.Error("status does not say that nothing can be read")
		}
		mu.Lock()
		down = nil
		mu.Unlock()
		later(2 * time.Minute)
		if s := w.view.Status(); s.WatchErr != nil || !s.Synced {
			t.Errorf("the server is back, status says %+v", s)
		}
	})
}

func TestTransformsKeepNoMoreThanNeeded(t *testing.T) {
	slice := endpointSlice("one", "10.1.0.1")
	slice.ResourceVersion = "7"
	slice.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "x"}}
	slice.Annotations = map[string]string{"much": "text"}
	once, err := cachedSlice(slice)
	if err != nil {
		t.Fatal(err)
	}
	want := &metav1.ObjectMeta{Namespace: "demo", Name: "one", ResourceVersion: "7"}
	if diff := cmp.Diff(metav1.Object(want), once.(metav1.ObjectMetaAccessor).GetObjectMeta()); diff != "" {
		t.Errorf("what the cache keeps of an object (-want +have):\n%s", diff)
	}
	if twice, err := cachedSlice(once); err != nil || twice != once {
		t.Errorf("translating again gives %v, %v", twice, err)
	}
	imp, err := cachedImport(&mcsv1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello", Labels: map[string]string{"much": "text"}},
		Spec:       mcsv1beta1.ServiceImportSpec{Type: mcsv1beta1.Headless, Ports: []mcsv1beta1.ServicePort{{Port: 80}}},
	})
	if c := imp.(*cached[clusterset.Import]); err != nil || c.err != nil || c.value.Labels != nil {
		t.Errorf("of an import the cache keeps %+v, %v", c, err)
	}
}

var ipv4Only = []corev1.IPFamily{"IPv4"}

// endpointSlice is a slice of Service demo/hello with one endpoint.
func endpointSlice(name, addr string) *discoveryv1.EndpointSlice {
	port, portName, tcp, ready := int32(8080), "http", corev1.Protocol("TCP"), true
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, Labels: map[string]string{
			mcsv1beta1.LabelServiceName: "hello", mcsv1beta1.LabelSourceCluster: "a",
		}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Protocol: &tcp, Port: &port}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
}
