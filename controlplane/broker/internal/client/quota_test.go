package client

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// quotaBroker is the client of member west, which reads what east and others have on a broker without an API server.
type quotaBroker struct {
	*Broker
	t    testing.TB
	fake client.WithWatch // the objects that exist
}

func newQuotaBroker(t testing.TB, limits quota.Amounts) *quotaBroker {
	t.Helper()
	b, err := New(t.Context(), Config{
		REST: &rest.Config{Host: "127.0.0.1:1"}, Namespace: "broker", Self: "west", Log: discard,
		Decided: func(withdrawal.Decision) {}, Left: func(clusterset.ClusterID, bool) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	q := &quotaBroker{b, t, fake.NewClientBuilder().WithScheme(b.client.Scheme()).Build()}
	b.client = q.fake
	b.quotas.setLimits(limits)
	for _, id := range []string{"east", "west", "north"} {
		b.member(&v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Name: id}, Spec: v1alpha1.MemberSpec{ClusterID: id, PodCIDRs: []string{"10.0.0.0/8"}}}, true)
	}
	return q
}

func webService(n int) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: "shop", Name: fmt.Sprintf("web-%04d", n)}
}

// record returns the record of a member about Service n, which the broker created at second age.
func (q *quotaBroker) record(id clusterset.ClusterID, n, age, ports int) *v1alpha1.ExportRecord {
	e := clusterset.Export{
		Cluster: id, Service: webService(n), ExportedAt: time.Unix(int64(age), 0), Type: clusterset.ClusterSetIP,
		Families: []clusterset.Family{clusterset.IPv4}, IPs: []netip.Addr{netip.AddrFrom4([4]byte{243, 0, byte(n >> 8), byte(n)})},
	}
	for i := range ports {
		e.Ports = append(e.Ports, clusterset.Port{Name: fmt.Sprint("p", i), Protocol: clusterset.TCP, Port: uint16(i + 1)})
	}
	r := mcs.ExportRecord(e)
	r.Namespace, r.UID, r.CreationTimestamp = "broker", "1", metav1.Unix(int64(age), 0)
	return r
}

// slice returns slice n of a member for a Service.
func (q *quotaBroker) slice(id clusterset.ClusterID, of, n, age, endpoints int) *discoveryv1.EndpointSlice {
	source := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint(n), Labels: map[string]string{discoveryv1.LabelServiceName: webService(of).Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for i := range endpoints {
		source.Endpoints = append(source.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{netip.AddrFrom4([4]byte{10, byte(n), byte(i >> 8), byte(i)}).String()},
			Hostname:  new(fmt.Sprintf("host-%d-%d", n, i)), NodeName: new(fmt.Sprint("node-", i%100)),
		})
	}
	es := mcs.BrokerSlice(source, id)
	es.Namespace, es.CreationTimestamp = "broker", metav1.Unix(int64(age), 0)
	return es
}

// send creates or updates objects, as a watch sees it.
func (q *quotaBroker) send(objs ...client.Object) {
	q.t.Helper()
	for _, obj := range objs {
		_ = q.fake.Delete(q.t.Context(), obj.DeepCopyObject().(client.Object)) //nolint:forcetypeassert // it is a copy
		if err := q.fake.Create(q.t.Context(), obj.DeepCopyObject().(client.Object)); err != nil {
			q.t.Fatal(err)
		}
		var err error
		switch obj.(type) {
		case *v1alpha1.ExportRecord:
			err = q.records.Add(obj)
		default:
			err = q.slices.Add(obj)
		}
		if err != nil {
			q.t.Fatal(err)
		}
	}
}

func (q *quotaBroker) delete(obj client.Object) {
	q.t.Helper()
	var err error
	switch obj.(type) {
	case *v1alpha1.ExportRecord:
		err = q.records.Delete(obj)
	default:
		err = q.slices.Delete(obj)
	}
	if err != nil {
		q.t.Fatal(err)
	}
}

// exported returns the Services below n that a member's readable records export, and how many readable slices they have.
func (q *quotaBroker) exported(id clusterset.ClusterID, n int) (services []int, count int) {
	for i := range n {
		for _, e := range q.Exports(webService(i)) {
			if e.Cluster == id {
				services = append(services, i)
			}
		}
		for _, es := range q.Slices(webService(i), false) {
			if mcs.OwnerOf(es) == id {
				count++
			}
		}
	}
	return services, count
}

func (q *quotaBroker) want(when string, id clusterset.ClusterID, services []int, count int) {
	q.t.Helper()
	if got, n := q.exported(id, 20); !slices.Equal(got, services) || n != count {
		q.t.Errorf("%s: %s exports %v with %d slices, want %v with %d", when, id, got, n, services, count)
	}
}

// The cache keeps no content of tombstones, which count for no quota, but the addresses that must not be given again.
func TestTombstonesAreSmall(t *testing.T) {
	q := newQuotaBroker(t, smallLimits())
	r := q.record("east", 0, 1, 30)
	r.Spec.ExportedLabels, r.Spec.WithdrawnAt = map[string]string{"team": "shop"}, new(metav1.Now())
	q.send(r)
	have := q.Broker.record("east", webService(0))
	if e := have.export; len(e.Ports) > 0 || len(e.Labels) > 0 || len(e.IPs) != 1 || !have.isWithdrawn() {
		t.Errorf("of a tombstone is cached: %+v", e)
	}
}

func smallLimits() quota.Amounts {
	return quota.Amounts{Services: 3, Ports: 100, PortsPerService: 40, Slices: 4, Endpoints: 100, MetadataBytes: 1 << 20}
}

// A member exports more than its quota allows. Its youngest objects wait from the moment they arrive, the others and another
// member's are read as before, and the waiting ones follow when others go, when the quota is raised, and after a restart.
func TestTheYoungestWait(t *testing.T) {
	q := newQuotaBroker(t, smallLimits())
	q.send(q.record("north", 1, 1, 1), q.slice("north", 1, 1, 1, 1))
	for n := range 5 {
		q.send(q.record("east", n, 10+n, 1), q.slice("east", n, 1, 10+n, 1))
	}
	q.want("before a judgement", "east", []int{0, 1, 2}, 3)
	q.judge(t.Context())
	q.want("after it", "east", []int{0, 1, 2}, 3)
	q.want("bystander", "north", []int{1}, 1)

	restarted := newQuotaBroker(t, smallLimits())
	for n := 4; n >= 0; n-- {
		restarted.send(restarted.slice("east", n, 1, 10+n, 1), restarted.record("east", n, 10+n, 1))
	}
	restarted.judge(t.Context())
	restarted.want("after a restart", "east", []int{0, 1, 2}, 3)

	q.delete(q.record("east", 1, 11, 1))
	q.judge(t.Context())
	q.want("after one went", "east", []int{0, 2, 3}, 3)
	more := smallLimits()
	more.Services, more.Slices = 10, 10
	q.quotas.setLimits(more)
	q.judge(t.Context())
	q.want("after the quota was raised", "east", []int{0, 2, 3, 4}, 5)
	q.send(q.record("east", 9, 99, 1))
	q.want("within its quota again", "east", []int{0, 2, 3, 4, 9}, 5)
}

// A record that changes stays admitted, and one with too many ports of its own waits alone.
func TestAnAdmittedRecordStays(t *testing.T) {
	q := newQuotaBroker(t, smallLimits())
	for n := range 5 {
		q.send(q.record("east", n, 10+n, 1))
	}
	q.judge(t.Context())
	q.send(q.record("east", 0, 10, 2))
	q.want("after a change", "east", []int{0, 1, 2}, 0)
	q.send(q.record("east", 1, 11, 41))
	q.judge(t.Context())
	q.want("after one has too many ports", "east", []int{0, 2, 3}, 0)
}

// A member far beyond its quota costs memory for its quota, not for what it sends. What is admitted later is read then.
func TestWaitingObjectsAreStubs(t *testing.T) {
	q := newQuotaBroker(t, smallLimits())
	var all []any
	q.send(q.record("east", 1, 1, 1))
	const slicesSent, each = 50, 20
	for n := range slicesSent {
		es := q.slice("east", 1, n, 100-n, each) // the list has the youngest first
		if err := q.fake.Create(t.Context(), es.DeepCopy()); err != nil {
			t.Fatal(err)
		}
		a, err := q.slices.Transformer()(es)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, a)
	}
	if err := q.slices.Replace(all, "9"); err != nil {
		t.Fatal(err)
	}
	full := func() (n int) {
		for _, p := range q.slices.All() {
			if !p.IsStub() {
				n += p.Len()
			}
		}
		return n
	}
	most := stubFactor*smallLimits().Endpoints + each
	if n := full(); n > most {
		t.Errorf("%d endpoints are cached before the judgement, want at most %d", n, most)
	}
	if !q.judge(t.Context()) {
		t.Error("not all admitted slices could be read")
	}
	if n := full(); n > most {
		t.Errorf("%d endpoints are cached, want at most %d", n, most)
	}
	q.want("far beyond its quota", "east", []int{1}, 4)
	for _, es := range q.Slices(webService(1), false) {
		if len(es.Endpoints) != each || es.Labels == nil {
			t.Errorf("slice %s has %d endpoints, want %d", es.Name, len(es.Endpoints), each)
		}
	}
	for n := 49; n > 44; n-- {
		q.delete(q.slice("east", 1, n, 100-n, each))
	}
	q.judge(t.Context())
	q.want("after the oldest went", "east", []int{1}, 4)
}

// This member sees its own overrun.
func TestOwnOverrun(t *testing.T) {
	q := newQuotaBroker(t, smallLimits())
	for n := range 4 {
		q.send(q.record("west", n, 10+n, 1))
	}
	for n := range 6 {
		q.send(q.slice("west", 0, n, 10+n, 1))
	}
	q.judge(t.Context())
	record, _, _ := q.Waiting(webService(3))
	if record == nil || record.Kind != quota.Services || record.Used != 3 || record.Limit != 3 {
		t.Errorf("the youngest export waits for %+v, want 3 of 3 services", record)
	}
	record, slices, count := q.Waiting(webService(0))
	if record != nil || slices == nil || slices.Kind != quota.Slices || count != 2 {
		t.Errorf("the oldest export waits for %+v, %d slices for %+v; want two slices", record, count, slices)
	}
	if record, slices, _ := q.Waiting(webService(1)); record != nil || slices != nil {
		t.Errorf("an admitted export waits for %+v and %+v", record, slices)
	}
}

// The memory that the slices of one member take, with the default quotas and with none.
func BenchmarkWorstMember(b *testing.B) {
	const none = 1 << 30
	for name, limits := range map[string]quota.Amounts{
		"default quotas": quota.Defaults(),
		"no quotas":      {Services: none, Ports: none, PortsPerService: none, Slices: none, Endpoints: none, MetadataBytes: none},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				fillWorst(b, limits)
			}
		})
	}
}

// fillWorst sends 2,000 slices of 1,000 endpoints, and reports the memory that they take and the slices that are read.
func fillWorst(b *testing.B, limits quota.Amounts) {
	b.Helper()
	q := newQuotaBroker(b, limits)
	before := heap()
	var all []any
	for n := range 2000 {
		a, err := q.slices.Transformer()(q.slice("east", 1, n, n, 1000))
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, a)
	}
	if err := q.slices.Replace(all, "9"); err != nil {
		b.Fatal(err)
	}
	clear(all)
	q.send(q.record("east", 1, 1, 1))
	began := time.Now()
	q.judge(b.Context())
	b.ReportMetric(time.Since(began).Seconds()*1000, "ms/judgement")
	_, count := q.exported("east", 2)
	b.ReportMetric(float64(count), "slices")
	b.ReportMetric(float64(heap()-before)/(1<<20), "MiB")
	runtime.KeepAlive(q)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
