package services_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// simulated is a member without an API server. Its cache has each write at once, or never has annotations.
type simulated struct {
	*objectcache.Cache

	id             clusterset.ClusterID
	writes, events int
	behind         bool // the cache never has annotations
	annotated      bool // an annotation was written that the cache does not have
}

func (m *simulated) ID() clusterset.ClusterID                                    { return m.id }
func (m *simulated) Reachable() bool                                             { return true }
func (*simulated) Dead() bool                                                    { return false }
func (m *simulated) Supervisor() bool                                            { return true }
func (m *simulated) Epoch() int64                                                { return 1 }
func (m *simulated) TryCreate(context.Context, client.Object) error              { return nil }
func (m *simulated) Create(_ context.Context, o client.Object) error             { return m.put(o) }
func (m *simulated) Replace(_ context.Context, o client.Object) error            { return m.put(o) }
func (m *simulated) ApplyStatus(context.Context, client.Object) error            { return nil }
func (m *simulated) Delete(context.Context, client.Object) error                 { return nil }
func (m *simulated) Event(client.Object, string, string, string)                 { m.events++ }
func (m *simulated) Apply(_ context.Context, o client.Object, _ ...string) error { return m.put(o) }
func (m *simulated) Annotate(_ context.Context, o client.Object, annotations map[string]string) error {
	if m.annotated {
		return apierrors.NewConflict(schema.GroupResource{}, o.GetName(), errors.New("it was annotated since it was read"))
	}
	if m.behind {
		m.annotated = true
		return nil
	}
	o = o.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
	o.SetAnnotations(annotations)
	return m.put(o)
}

// simulate returns a simulated member with only the namespace of global federated Services.
func simulate(tb testing.TB, p *services.Reconciler, id clusterset.ClusterID) *simulated {
	tb.Helper()
	m := &simulated{id: id}
	var err error
	if m.Cache, err = objectcache.NewCache(scheme, reconcile.Kinds(p.Watches()), nil, nil); err != nil {
		tb.Fatal(err)
	}
	for _, k := range m.Informers() {
		_ = k.Replace(nil, "")
	}
	_ = m.Informers()[3].Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}})
	return m
}

// Live returns the cache: it has everything.
func (m *simulated) Live() client.Reader { return m }

// put stores an object as an API server would.
func (m *simulated) put(o client.Object) error {
	m.writes++
	o.SetUID(uuid.NewUUID())
	o.SetResourceVersion(strconv.Itoa(m.writes))
	return m.kind(o).Add(o.DeepCopyObject())
}

// kind returns where objects like o are kept.
func (m *simulated) kind(o client.Object) *objectcache.ObjectInformer {
	switch o.(type) {
	case *corev1.Service:
		return m.Informers()[0]
	case *discoveryv1.EndpointSlice:
		return m.Informers()[1]
	default:
		panic(fmt.Sprintf("%T is not simulated", o))
	}
}

// BenchmarkTwentyMembers reconciles one Service after another in 20 members that one process leads. Each member has a
// member Service with 20 endpoints for each of 500 names. It reports the memory that stays in use, and the cost of one
// change.
func BenchmarkTwentyMembers(b *testing.B) {
	const members, names, endpoints = 20, 500, 20
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	p, err := services.New(services.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	var all []reconcile.Member
	var led []*simulated
	for i := range members {
		m := simulate(b, p, clusterset.ClusterID(fmt.Sprintf("cluster-%02d", i)))
		for j := range names {
			svc, es := simulatedService(i, j, endpoints)
			_, _ = m.put(svc), m.put(es)
		}
		led, all = append(led, m), append(all, m)
	}
	sync := func(name string) {
		for _, m := range led {
			if err := p.Reconcile(b.Context(), reconcile.Key{Kind: "Service", Namespace: system, Name: name}, m, all); err != nil {
				b.Fatal(err)
			}
		}
	}
	begun := time.Now()
	for j := range names {
		sync(fmt.Sprint("shop-", j))
	}
	b.Logf("all that there is is written in %v", time.Since(begun))
	runtime.GC()
	runtime.ReadMemStats(&after)
	for i := 0; b.Loop(); i++ {
		_, es := simulatedService(3, i%names, endpoints-1-i/names%2)
		_ = led[3].put(es)
		sync(fmt.Sprint("shop-", i%names))
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/(1<<20), "MiB")
	runtime.KeepAlive(all)
}

// simulatedService returns a member Service of a cluster and its slice.
func simulatedService(cluster, i, endpoints int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	name := fmt.Sprint("web-", i)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, Annotations: map[string]string{global: fmt.Sprint("shop-", i)}},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": name}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	es := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "demo", Name: name + "-abcde", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for j := range endpoints {
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", cluster, i%250, i/250*100+j+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new("node-1"), Zone: new("zone-1"),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: fmt.Sprintf("%s-%d", name, j)},
		})
	}
	return svc, es
}

// A member Service gets one event, although it is reconciled again before its annotation is in the cache.
func TestOneEventForOneChange(t *testing.T) {
	t.Parallel()
	p, err := services.New(services.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	m := simulate(t, p, "a")
	m.behind = true
	svc, es := simulatedService(0, 0, 1)
	if err := errors.Join(m.put(svc), m.put(es)); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		err := p.Reconcile(t.Context(), reconcile.Key{Kind: "Service", Namespace: system, Name: "shop-0"}, m, []reconcile.Member{m})
		if i == 0 && err != nil || i > 0 && !apierrors.IsConflict(err) {
			t.Fatalf("call %d: %v, want success of the first and a conflict of the others", i, err)
		}
	}
	if m.events != 1 {
		t.Errorf("%d events, want 1", m.events)
	}
}
