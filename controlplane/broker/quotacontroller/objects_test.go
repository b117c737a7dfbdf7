package quotacontroller

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// exported returns the record of Service n and a slice of it with endpoints, as the broker stores them.
func exported(n, endpoints int) (*v1alpha1.ExportRecord, *discoveryv1.EndpointSlice) {
	name := clusterset.ServiceName{Namespace: "demo", Name: fmt.Sprint("web-", n)}
	r := mcs.ExportRecord(clusterset.Export{
		Cluster: "a", Service: name, ExportedAt: time.Unix(0, 0), Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4},
		Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}}, Labels: map[string]string{"tier": "front"}, ServiceLabels: map[string]string{"app": "web"},
	})
	source := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "demo", Name: name.Name, Labels: map[string]string{discoveryv1.LabelServiceName: name.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for host := range endpoints {
		source.Endpoints = append(source.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", host/250, host%250+1)}})
	}
	es := mcs.BrokerSlice(source, "a")
	for _, o := range []client.Object{r, es} {
		o.SetUID(types.UID(fmt.Sprintf("0d8a1c1e-0000-4000-8000-%012d", n)))
		o.SetCreationTimestamp(metav1.Unix(int64(n), 0))
	}
	return r, es
}

// Objects use of each quota what readers count, and their size.
func TestUses(t *testing.T) {
	t.Parallel()
	r, es := exported(1, 3)
	have := newRecord(r).uses()
	if want := (quota.Amounts{Services: 1, Ports: 1, MetadataBytes: 9}); have.Amounts != want || have.StorageBytes < 400 || have.StorageBytes > 2000 {
		t.Errorf("a record uses %+v, want %+v", have, want)
	}
	if have := newRecord(r).record().Labels; have != 6 {
		t.Errorf("its slices have labels of %d bytes, want 6", have)
	}
	have = newSlice(es).uses()
	if have.Slices != 1 || have.Endpoints != 3 || have.Services != 0 || have.StorageBytes < 200 {
		t.Errorf("a slice uses %+v", have)
	}
	r.Spec.WithdrawnAt = new(metav1.Now())
	have = newRecord(r).uses()
	if have.Tombstones != 1 || have.Services != 0 || have.Ports != 0 || have.StorageBytes == 0 {
		t.Errorf("a tombstone uses %+v", have)
	}
	r.Spec.WithdrawnAt, r.Spec.Name = nil, "a name"
	invalid := newRecord(r)
	if have := invalid.uses(); invalid.valid || have.Services != 1 || have.StorageBytes == 0 {
		t.Errorf("an invalid record uses %+v, valid %v", have, invalid.valid)
	}
	if have := newAggregate(mcs.Aggregate(clusterset.Aggregate{Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}})); have.uses() != (amounts{}) || have.owner != "" {
		t.Errorf("an aggregate without an author uses %+v of %q", have.uses(), have.owner)
	}
}

// Managed fields count: a member may fill them.
func TestManagedFieldsCount(t *testing.T) {
	t.Parallel()
	r, es := exported(1, 3)
	before := [2]int64{newRecord(r).size, newSlice(es).size}
	large := metav1.NewFieldsV1(fmt.Sprintf(`{"f:%5000d":{}}`, 1))
	for _, o := range []client.Object{r, es} {
		o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: "m", Operation: "Apply", FieldsType: "FieldsV1", FieldsV1: large}})
	}
	for i, after := range []int64{newRecord(r).size, newSlice(es).size} {
		if after < before[i]+5000 {
			t.Errorf("object %d: %d bytes before, %d after", i, before[i], after)
		}
	}
}

// BenchmarkObject reports the memory that the controller keeps of each object, without its cache's index.
func BenchmarkObject(b *testing.B) {
	kept := make([]*object, 0, b.N)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	b.ResetTimer()
	for n := range b.N {
		r, es := exported(n, 100)
		if n%2 == 0 {
			kept = append(kept, newRecord(r))
		} else {
			kept = append(kept, newSlice(es))
		}
	}
	b.StopTimer()
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(b.N), "B/object")
	runtime.KeepAlive(kept)
}
