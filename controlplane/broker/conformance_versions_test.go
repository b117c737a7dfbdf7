package broker_test

import (
	"slices"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// saysOfOld writes the objects of a member of the first version about Service name to the broker: a record without later
// fields, and its part of the aggregate, which it creates if there is none.
func (w *testbed) saysOfOld(id clusterset.ClusterID, name, vip, address string) *v1alpha1.ExportRecord {
	t := w.t
	t.Helper()
	agreed := &v1beta1.ServiceImport{}
	service := clusterset.ServiceName{Namespace: w.ns, Name: name}
	err := w.broker.Get(t.Context(), client.ObjectKey{Namespace: w.brokerNS, Name: mcs.AggregateName(service)}, agreed)
	if err != nil {
		agreed = mcs.Aggregate(clusterset.Aggregate{Service: service, Type: clusterset.ClusterSetIP, AllocatedBy: id})
		agreed.Namespace, agreed.Spec.IPs, agreed.Spec.IPFamilies = w.brokerNS, []string{vip}, nil
		w.create(w.broker, agreed)
	}
	agreed.Status.Clusters = append(agreed.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(id)})
	w.noError(w.broker.Status().Update(t.Context(), agreed))
	record := w.says(clusterset.Export{
		Cluster: id, Service: service, ExportedAt: time.Now(), Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4},
		InternalTrafficPolicy: "Cluster", Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	}, address)
	record.Spec.IPs = agreed.Spec.IPs
	record.Spec.UseClusterSetIP, record.Spec.AgreedClusterSetIP, record.Annotations = nil, nil, nil
	w.noError(w.broker.Update(t.Context(), record))
	return record
}

// A member of the first version and members of this one export the same Services, in any order. All Services have their
// address and all endpoints, no conflict is reported, and no endpoint is lost when the old member is upgraded or leaves
// in its own way.
func TestMembersOfTwoVersions(t *testing.T) {
	w := newTestbed(t).run()
	w.guest("c", time.Now())
	const vip, ofC = "243.99.0.7", "10.99.0.1"
	want := expect{
		typ: v1beta1.ClusterSetIP, ips: 1, clusters: []string{"c"}, ports: []string{"http/80"}, endpoints: []string{ofC + ":8080"},
	}
	both := want
	both.clusters, both.endpoints = []string{"b", "c"}, []string{"10.98.0.1:8080", ofC + ":8080"}

	w.saysOfOld("c", "old-first", vip, ofC)
	for _, m := range w.both() {
		if si := m.wants("old-first", want); !slices.Equal(si.Spec.IPs, []string{vip}) {
			t.Errorf("in %s the address is %v, want %s", m.id, si.Spec.IPs, vip)
		}
	}
	w.b.service("old-first")
	w.b.export("old-first")
	w.b.service("new-first")
	w.b.export("new-first")
	w.b.condition("new-first", "Ready", metav1.ConditionTrue, "Exported")
	w.laterThan(w.b, "new-first")
	w.saysOfOld("c", "new-first", "", ofC)
	vips := map[string][]string{}
	records := map[string]*v1alpha1.ExportRecord{}
	for _, name := range []string{"old-first", "new-first"} {
		for _, m := range w.both() {
			vips[name] = m.wants(name, both).Spec.IPs
		}
		w.b.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
		w.b.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		w.a.keeps(name, "10.98.0.1")
		records[name] = &v1alpha1.ExportRecord{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "c." + name + "." + w.ns}}
	}
	if !slices.Equal(vips["old-first"], []string{vip}) {
		t.Errorf("b changed the address from %s to %v", vip, vips["old-first"])
	}

	yes := true
	edit(w, w.broker, records["old-first"], func(r *v1alpha1.ExportRecord) { // upgraded
		r.Spec.UseClusterSetIP, r.Spec.AgreedClusterSetIP = &yes, &yes
		r.Annotations = map[string]string{v1alpha1.AnnotationChangedAt: "1"}
	})
	w.quiet()
	for _, m := range w.both() {
		if have := m.wants("old-first", both).Spec.IPs; !slices.Equal(have, vips["old-first"]) {
			t.Errorf("in %s the address is %v, before the upgrade %v", m.id, have, vips["old-first"])
		}
	}
	w.b.condition("old-first", "Conflict", metav1.ConditionFalse, "NoConflicts")

	// The first version took its record away, then its slices, then its name from the aggregate.
	w.noError(w.broker.Delete(t.Context(), records["new-first"]))
	w.noError(w.broker.DeleteAllOf(t.Context(), &discoveryv1.EndpointSlice{}, client.InNamespace(w.brokerNS),
		client.MatchingLabels{v1alpha1.LabelCluster: "c", v1alpha1.LabelServiceName: "new-first"}))
	edit(w, statusOf(w.broker), w.aggregate("new-first"), func(si *v1beta1.ServiceImport) {
		si.Status.Clusters = slices.DeleteFunc(si.Status.Clusters, func(c v1beta1.ClusterStatus) bool { return c.Cluster == "c" })
	})
	onlyB := both
	onlyB.clusters, onlyB.endpoints = []string{"b"}, []string{"10.98.0.1:8080"}
	for _, m := range w.both() {
		if have := m.wants("new-first", onlyB).Spec.IPs; !slices.Equal(have, vips["new-first"]) {
			t.Errorf("in %s the address is %v, before %v", m.id, have, vips["new-first"])
		}
	}
	conformance.Holds(t, "L52")
}
