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

// journal is a log that tests read while it is written.
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
	renewedLine = "is renewed"
	failedLine  = "cannot be renewed"
)

// fastTimes are those of a heart that beats ten times a second.
func fastTimes() Times { return DefaultTimes().Scale(0.02) }

// patient is a chest with a heart in it, and a way to look inside.
type patient struct {
	t      *testing.T
	admin  client.Client
	key    client.ObjectKey
	log    journal
	writes *apitest.Writes
	gate   *apitest.Gate
	beats  client.Client // as the heart sees the broker
}

// newPatient returns one in a namespace of its own, without a Lease. Its heart does not beat yet.
func newPatient(t *testing.T) *patient {
	t.Helper()
	config := server.Config(t)
	p := &patient{t: t}
	p.admin = newClient(t, config)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "broker-"}}
	if err := p.admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	p.key = client.ObjectKey{Namespace: ns.Name, Name: "member-a.b"}
	gate, through := apitest.NewGate(t, config)
	p.gate, p.writes = gate, apitest.CountWrites(through)
	p.beats = newClient(t, through)
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

// start makes the heart beat until the test ends.
func (p *patient) start() {
	h := &Heart{Self: "a.b", Client: p.beats, Namespace: p.key.Namespace, Times: fastTimes(), Log: slog.New(slog.NewTextHandler(&p.log, nil))}
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
func (p *patient) eventually(what string, check func() bool) {
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
func (p *patient) lease() (*coordinationv1.Lease, bool) {
	p.t.Helper()
	var l coordinationv1.Lease
	err := p.admin.Get(p.t.Context(), p.key, &l)
	if client.IgnoreNotFound(err) != nil {
		p.t.Fatal(err)
	}
	return &l, err == nil
}

// renewals waits for n renewals from now on.
func (p *patient) renewals(n int) {
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

func TestHeartCreatesAndRenews(t *testing.T) {
	p := newPatient(t)
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
		t.Errorf("it wrote more than its lease: %v", writes)
	}
	if n, failed := p.log.count(renewedLine), p.log.count("ERROR"); n != 1 || failed > 0 {
		t.Errorf("all is well, and the log says so %d times and otherwise %d times", n, failed)
	}
}

func TestHeartTakesOverWhatIsThere(t *testing.T) {
	p := newPatient(t)
	other, seconds, long := "somebody", int32(3600), metav1.NewMicroTime(time.Now().Add(-time.Hour))
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
		t.Errorf("lease says %v", l.Spec)
	}
	if l.Labels["colour"] != "blue" || l.Labels[v1alpha1.LabelCluster] != "a.b" {
		t.Errorf("labels are %v", l.Labels)
	}
}

// Somebody else writes and deletes the Lease all the time.
func TestHeartSurvivesMeddling(t *testing.T) {
	p := newPatient(t)
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
	if n := p.log.count("ERROR"); n > 0 {
		t.Errorf("the log complains %d times of what is mended at once", n)
	}
}

func TestHeartWithoutBroker(t *testing.T) {
	p := newPatient(t)
	p.gate.Shut()
	p.start()
	p.eventually("a complaint", func() bool { return p.log.count(failedLine) == 1 })
	p.gate.Open()
	p.renewals(3)
	p.gate.Shut()
	p.eventually("another complaint", func() bool { return p.log.count(failedLine) == 2 })
	p.gate.Open()
	p.renewals(3)
	if n, failed := p.log.count(renewedLine), p.log.count(failedLine); n != 2 || failed != 2 {
		t.Errorf("away twice and back twice; the log says %d and %d", failed, n)
	}
}

// A broker that takes connections and says nothing holds no beat for longer than Renew, and does not keep the
// heart from ending.
func TestHeartOfSilentBroker(t *testing.T) {
	p := newPatient(t)
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
	p.beats = newClient(t, config)
	p.start()
	for range 5 {
		select {
		case <-calls:
		case <-time.After(20 * time.Second):
			t.Fatal("it waits for an answer")
		}
	}
	if n := p.log.count(failedLine); n != 1 {
		t.Errorf("the log complains %d times", n)
	}
}

// A client whose first words fail as told.
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

// A cache that is behind for ever, and a broker that denies, end a beat with an error, not with a loop.
func TestBeatEnds(t *testing.T) {
	resource := coordinationv1.Resource("leases")
	missing, exists := apierrors.NewNotFound(resource, "member-a"), apierrors.NewAlreadyExists(resource, "member-a")
	denied := apierrors.NewForbidden(resource, "member-a", errors.New("no"))
	for name, tc := range map[string]struct {
		fail map[string]error
		want error
	}{
		"a cache that is behind":   {map[string]error{"get": missing, "create": exists}, exists},
		"reading is denied":        {map[string]error{"get": denied}, denied},
		"creating is denied":       {map[string]error{"get": missing, "create": denied}, denied},
		"the namespace is missing": {map[string]error{"get": missing, "create": missing}, missing},
	} {
		t.Run(name, func(t *testing.T) {
			h := &Heart{Self: "a", Client: &faulty{fail: tc.fail}, Namespace: "b", Times: DefaultTimes(), Log: slog.New(slog.DiscardHandler)}
			lease, err := h.beat(t.Context(), nil)
			if lease != nil || !errors.Is(err, tc.want) {
				t.Errorf("beat returns %v, %v; want %v", lease, err, tc.want)
			}
		})
	}
}
