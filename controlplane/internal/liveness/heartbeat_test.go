package liveness

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var server apitest.Server

func TestMain(m *testing.M) { os.Exit(apitest.Run(m, &server)) }

// journal is a log that tests may read while it is written.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// count returns how many lines contain words.
func (j *journal) count(words string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.text.String(), words)
}

const (
	renewedLine = "this member renews its lease"
	failedLine  = "this member cannot renew"
)

// fastTimes make a Heartbeat renew ten times a second.
func fastTimes() Times { return DefaultTimes().Scale(0.02) }

// heartbeatTest runs a Heartbeat in a namespace of its own.
type heartbeatTest struct {
	t      *testing.T
	admin  client.Client
	key    client.ObjectKey
	log    journal
	writes *apitest.Writes
	gate   *apitest.Gate
	client client.Client // of the Heartbeat
	stated atomic.Pointer[map[string]string]
}

// statements is what the member states.
func (p *heartbeatTest) statements() map[string]string {
	if stated := p.stated.Load(); stated != nil {
		return *stated
	}
	return nil
}

// newHeartbeatTest returns a test without a Lease, whose Heartbeat does not run yet.
func newHeartbeatTest(t *testing.T) *heartbeatTest {
	t.Helper()
	config := server.Config(t)
	p := &heartbeatTest{t: t}
	p.admin = newClient(t, config)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "broker-"}}
	if err := p.admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	p.key = client.ObjectKey{Namespace: ns.Name, Name: "member-a.b"}
	gate, through := apitest.NewGate(t, config)
	p.gate, p.writes = gate, apitest.CountWrites(through)
	p.client = newClient(t, through)
	return p
}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	config.QPS = -1
	mapper := meta.NewDefaultRESTMapper(nil) // asking for one would take its own time
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Namespace"), meta.RESTScopeRoot)
	c, err := client.New(config, client.Options{Scheme: scheme.Scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// start runs the Heartbeat until the test ends.
func (p *heartbeatTest) start() {
	h := &Heartbeat{Self: "a.b", Client: p.client, Namespace: p.key.Namespace, Times: fastTimes(), Statements: p.statements, Log: slog.New(slog.NewTextHandler(&p.log, nil))}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Start(ctx) }()
	p.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Errorf("Start returned %v", err)
		}
	})
}

// eventually waits until check holds.
func (p *heartbeatTest) eventually(what string, check func() bool) {
	p.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !check() {
		select {
		case <-tick.C:
		case <-deadline:
			p.t.Fatalf("%s: not within 20 s", what)
		}
	}
}

// lease reads the Lease, and reports whether there is one.
func (p *heartbeatTest) lease() (*coordinationv1.Lease, bool) {
	p.t.Helper()
	var l coordinationv1.Lease
	err := p.admin.Get(p.t.Context(), p.key, &l)
	if client.IgnoreNotFound(err) != nil {
		p.t.Fatal(err)
	}
	return &l, err == nil
}

// renewals waits for n renewals from now on.
func (p *heartbeatTest) renewals(n int) {
	p.t.Helper()
	var last metav1.MicroTime
	if l, ok := p.lease(); ok && l.Spec.RenewTime != nil {
		last = *l.Spec.RenewTime
	}
	for range n {
		p.eventually("a renewal", func() bool {
			l, ok := p.lease()
			if !ok || l.Spec.RenewTime == nil || l.Spec.RenewTime.Equal(&last) {
				return false
			}
			last = *l.Spec.RenewTime
			return true
		})
	}
}

func TestHeartbeatCreatesAndRenews(t *testing.T) {
	p := newHeartbeatTest(t)
	before := time.Now()
	p.start()
	p.renewals(5)
	l, _ := p.lease()
	id, seconds := "a.b", int32(1)
	want := coordinationv1.LeaseSpec{HolderIdentity: &id, LeaseDurationSeconds: &seconds, AcquireTime: l.Spec.AcquireTime, RenewTime: l.Spec.RenewTime}
	if diff := cmp.Diff(want, l.Spec); diff != "" {
		t.Errorf("lease (-want +have):\n%s", diff)
	}
	if l.Name != v1alpha1.MemberLease(id) || l.Labels[v1alpha1.LabelCluster] != id {
		t.Errorf("lease %s has labels %v", l.Name, l.Labels)
	}
	if acquired, renewed := l.Spec.AcquireTime.Time, l.Spec.RenewTime.Time; acquired.Before(before.Truncate(time.Microsecond)) ||
		!renewed.After(acquired) || renewed.After(time.Now()) {
		t.Errorf("acquired %v, renewed %v, the test began %v", acquired, renewed, before)
	}
	if writes := p.writes.Take(); len(writes) > 0 {
		t.Errorf("it wrote more than its Lease: %v", writes)
	}
	if n, failed := p.log.count(renewedLine), p.log.count("ERROR"); n != 1 || failed > 0 {
		t.Errorf("the log has %d lines of success and %d of failure, want 1 and 0", n, failed)
	}
}

// The Lease says what the member states. An empty statement removes the former one, and without a statement it stays.
func TestHeartbeatStates(t *testing.T) {
	p := newHeartbeatTest(t)
	p.start()
	states := func(want string, there bool) {
		t.Helper()
		p.eventually("the statement "+want, func() bool {
			l, _ := p.lease()
			have, ok := l.Annotations[v1alpha1.AnnotationExports]
			return ok == there && have == want
		})
	}
	p.renewals(1)
	states("", false)
	for _, s := range []string{"1-a.1-b", "2-c.2-d"} {
		p.stated.Store(&map[string]string{v1alpha1.AnnotationExports: s})
		states(s, true)
	}
	p.stated.Store(&map[string]string{v1alpha1.AnnotationPodCIDRs: "10.128.0.0/24"})
	p.renewals(2)
	states("2-c.2-d", true)
	p.stated.Store(&map[string]string{v1alpha1.AnnotationExports: ""})
	states("", false)
	if l, _ := p.lease(); l.Annotations[v1alpha1.AnnotationPodCIDRs] != "10.128.0.0/24" {
		t.Errorf("the other statement is %v", l.Annotations)
	}
}

func TestHeartbeatTakesOverAnExistingLease(t *testing.T) {
	p := newHeartbeatTest(t)
	other, seconds, long := "another", int32(3600), metav1.NewMicroTime(time.Now().Add(-time.Hour))
	err := p.admin.Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.key.Namespace, Name: p.key.Name, Labels: map[string]string{"colour": "blue"}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &other, LeaseDurationSeconds: &seconds, RenewTime: &long, AcquireTime: &long},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.start()
	p.renewals(3)
	l, _ := p.lease()
	if *l.Spec.HolderIdentity != "a.b" || *l.Spec.LeaseDurationSeconds != 1 || l.Spec.AcquireTime.Equal(&long) {
		t.Errorf("the Lease is %v", l.Spec)
	}
	if l.Labels["colour"] != "blue" || l.Labels[v1alpha1.LabelCluster] != "a.b" {
		t.Errorf("labels are %v", l.Labels)
	}
}

// Another client writes and deletes the Lease all the time.
func TestHeartbeatSurvivesForeignWrites(t *testing.T) {
	p := newHeartbeatTest(t)
	p.start()
	p.renewals(1)
	for i := range 10 {
		l, ok := p.lease()
		if !ok {
			continue
		}
		var err error
		if i%2 == 0 {
			l.Annotations = map[string]string{"meddled": l.ResourceVersion}
			err = p.admin.Update(t.Context(), l)
		} else {
			err = p.admin.Delete(t.Context(), l)
		}
		if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		p.renewals(2)
	}
	// A busy API server may miss the timeout of a renewal, which is an error; a conflict, which the next try repairs, is none.
	for _, conflict := range []string{"the object has been modified", "already exists", "not found"} {
		if n := p.log.count(conflict); n > 0 {
			t.Errorf("the log has %d errors of the kind %q, which the next try repairs", n, conflict)
		}
	}
}

func TestHeartbeatWithoutBroker(t *testing.T) {
	p := newHeartbeatTest(t)
	p.gate.Shut()
	p.start()
	p.eventually("an error", func() bool { return p.log.count(failedLine) == 1 })
	p.gate.Open()
	p.renewals(3)
	p.gate.Shut()
	p.eventually("another error", func() bool { return p.log.count(failedLine) == 2 })
	p.gate.Open()
	p.renewals(3)
	if n, failed := p.log.count(renewedLine), p.log.count(failedLine); n != 2 || failed != 2 {
		t.Errorf("away twice and back twice; the log has %d failures and %d successes", failed, n)
	}
}

// A broker that accepts connections and never answers blocks no renewal for longer than Renew, nor the end of Start.
func TestHeartbeatWithSilentBroker(t *testing.T) {
	p := newHeartbeatTest(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	calls := make(chan struct{}, 1000)
	var answering sync.WaitGroup
	answering.Go(func() {
		var conns []net.Conn
		for {
			conn, err := listener.Accept()
			if err != nil {
				break
			}
			conns = append(conns, conn)
			calls <- struct{}{}
		}
		for _, c := range conns {
			_ = c.Close()
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		answering.Wait()
	})
	config := server.Config(t)
	config.Host = "https://" + listener.Addr().String()
	p.client = newClient(t, config)
	p.start()
	for range 5 {
		select {
		case <-calls:
		case <-time.After(20 * time.Second):
			t.Fatal("it waits for an answer")
		}
	}
	if n := p.log.count(failedLine); n != 1 {
		t.Errorf("the log has %d errors", n)
	}
}

// faulty is a client whose requests fail as configured.
type faulty struct {
	client.Client

	fail map[string]error
}

func (f *faulty) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return f.fail["get"]
}

func (f *faulty) Create(context.Context, client.Object, ...client.CreateOption) error {
	return f.fail["create"]
}

func (f *faulty) Update(context.Context, client.Object, ...client.UpdateOption) error {
	return f.fail["update"]
}

// A stale cache and a denied request end a renewal with an error instead of a loop.
func TestRenewEnds(t *testing.T) {
	resource := coordinationv1.Resource("leases")
	missing, exists := apierrors.NewNotFound(resource, "member-a"), apierrors.NewAlreadyExists(resource, "member-a")
	denied := apierrors.NewForbidden(resource, "member-a", errors.New("no"))
	for name, tc := range map[string]struct {
		fail map[string]error
		want error
	}{
		"a stale cache":       {map[string]error{"get": missing, "create": exists}, exists},
		"denied read":         {map[string]error{"get": denied}, denied},
		"denied create":       {map[string]error{"get": missing, "create": denied}, denied},
		"a missing namespace": {map[string]error{"get": missing, "create": missing}, missing},
	} {
		t.Run(name, func(t *testing.T) {
			h := &Heartbeat{Self: "a", Client: &faulty{fail: tc.fail}, Namespace: "b", Times: DefaultTimes(), Statements: func() map[string]string { return nil }, Log: slog.New(slog.DiscardHandler)}
			lease, err := h.renew(t.Context(), nil)
			if lease != nil || !errors.Is(err, tc.want) {
				t.Errorf("renew returns %v, %v; want %v", lease, err, tc.want)
			}
		})
	}
}
