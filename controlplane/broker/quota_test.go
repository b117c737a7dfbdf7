package broker_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/quotacontroller"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// quotas sets the quotas of the ClusterSet.
func (w *testbed) quotas(q v1alpha1.Quotas) {
	w.t.Helper()
	config := &v1alpha1.ClusterSetConfig{}
	w.noError(w.broker.Get(w.t.Context(), client.ObjectKey{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName}, config))
	config.Spec.Quotas = &q
	w.noError(w.broker.Update(w.t.Context(), config))
}

// exportThree lets cluster a export first, second and third, in this order. The first two reach b.
func (w *testbed) exportThree() {
	w.t.Helper()
	for _, name := range []string{"first", "second"} {
		w.a.service(name)
		w.a.export(name)
		w.b.wants(name, helloOfA)
		w.laterThan(w.a, name)
	}
	w.a.service("third")
	w.a.export("third")
}

// Cluster a exports three Services of a quota of two. The youngest waits in every cluster, its ServiceExport names the quota
// and the remedy, and the others and those of b go on. A restart of both controllers changes nothing. The waiting export
// follows when another goes, and one more when the quota is raised.
func TestQuotaOfServices(t *testing.T) {
	w := newTestbed(t)
	w.quotas(v1alpha1.Quotas{Services: 2})
	w.run()
	w.exportThree()
	message := w.a.condition("third", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	if !strings.Contains(message, "uses 2 of its quota of 2 services") || !strings.Contains(message, "raise spec.quotas.services") {
		t.Errorf("the message is %q", message)
	}
	w.eventually(func() error {
		if reasons := w.a.eventsOn("third"); !slices.Contains(reasons, "QuotaExceeded") {
			return fmt.Errorf("events: %v", reasons)
		}
		return nil
	})
	w.b.service("fourth")
	w.b.export("fourth")
	w.b.condition("fourth", "Ready", metav1.ConditionTrue, "Exported")
	check := func() {
		t.Helper()
		for _, m := range w.both() {
			m.wants("first", helloOfA)
			m.wants("second", helloOfA)
			m.wantsNone("third")
		}
	}
	check()
	w.quiet()
	w.a.stop()
	w.b.stop()
	w.run()
	w.a.condition("third", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	check()

	w.laterThan(w.a, "third")
	w.a.service("fifth")
	w.a.export("fifth")
	w.a.condition("fifth", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	w.a.unexport("first")
	w.b.wants("third", helloOfA)
	w.a.condition("third", "Ready", metav1.ConditionTrue, "Exported")
	w.b.wantsNone("fifth")
	w.quotas(v1alpha1.Quotas{Services: 3})
	w.b.wants("fifth", helloOfA)
	w.a.condition("fifth", "Ready", metav1.ConditionTrue, "Exported")
}

// runQuotaController runs the quota controller of the broker until the test ends.
func (w *testbed) runQuotaController() {
	w.t.Helper()
	c, err := quotacontroller.New(quotacontroller.Config{REST: w.serverSet.broker.Config(w.t), Namespace: w.brokerNS, Log: slog.New(slog.DiscardHandler)})
	w.noError(err)
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		w.noError(<-ended)
	})
	w.eventually(func() error {
		if s := c.State(); !s.Leader || s.Waiting != "" {
			return fmt.Errorf("the quota controller: %+v", s)
		}
		return nil
	})
}

// The broker has a quota controller. Cluster a exports one Service more than its quota, so the broker refuses a further one: its
// ServiceExport has the reason and the remedy. What worked before goes on: a published Service gets new endpoints and new slices.
// When others go, the refused export is published.
func TestQuotaControllerRefusesExport(t *testing.T) {
	w := newTestbed(t)
	w.quotas(v1alpha1.Quotas{Services: 2})
	w.runQuotaController()
	w.run()
	w.exportThree()
	w.a.condition("third", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	w.eventually(func() error {
		config := &v1alpha1.ClusterSetConfig{}
		w.noError(w.broker.Get(t.Context(), client.ObjectKey{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName}, config))
		if all := config.Status.OverQuota; len(all) != 1 || all[0].Member != "a" || all[0].Kind != "services" || all[0].Used != 3 || all[0].Limit != 2 {
			return fmt.Errorf("over quota: %+v", all)
		}
		return nil
	})
	w.a.service("fourth")
	w.a.export("fourth")
	w.eventually(func() error {
		message := w.a.condition("fourth", "Ready", metav1.ConditionFalse, "QuotaExceeded")
		if !strings.Contains(message, "the broker refuses the export: member a has 3 services of at most 2") || !strings.Contains(message, "raise spec.quotas.services") {
			return fmt.Errorf("the message is %q", message)
		}
		return nil
	})
	var first corev1.Service
	w.noError(w.a.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "first"}, &first))
	w.a.slice(&first, corev1.IPv4Protocol, 77)
	w.eventually(func() error {
		if _, slices := w.b.imported("first"); !strings.Contains(fmt.Sprint(flatten(slices)), ".77") {
			return fmt.Errorf("b has %v", flatten(slices))
		}
		return nil
	})
	w.a.unexport("second")
	w.a.unexport("third")
	w.b.wants("fourth", helloOfA)
	w.a.condition("fourth", "Ready", metav1.ConditionTrue, "Exported")
}

// A member sends several times its quota of everything. In each importer its objects and their bytes stay within the quota, and
// another member's Service arrives.
func TestWorstMember(t *testing.T) {
	w := newTestbed(t)
	quotas := v1alpha1.Quotas{Services: 5, Ports: 30, PortsPerService: 10, Slices: 8, Endpoints: 60, MetadataBytes: 16 << 10}
	w.quotas(quotas)
	w.run()
	w.guest("c", time.Unix(0, 0))
	for n := range 20 {
		w.worst(fmt.Sprint("worst-", n))
	}
	w.a.service("hello")
	w.a.export("hello")
	for _, m := range w.both() {
		m.wants("hello", helloOfA)
	}
	w.quiet()
	for _, m := range w.both() {
		services, ports, slices, endpoints, size := m.importedOf("c")
		if services == 0 || int64(services) > quotas.Services || int64(ports) > quotas.Ports || slices == 0 || int64(slices) > quotas.Slices || int64(endpoints) > quotas.Endpoints {
			t.Errorf("%s has %d Services, %d ports, %d slices and %d endpoints of c, which exceeds %+v", m.id, services, ports, slices, endpoints, quotas)
		}
		// An endpoint, a port and the fixed part of an object take less than this as JSON.
		most := int(quotas.MetadataBytes) + 3000*(services+slices) + 300*endpoints + 200*(ports+slices)
		t.Logf("%s has %d Services, %d ports, %d slices and %d endpoints of c, in %d bytes of JSON, at most %d", m.id, services, ports, slices, endpoints, size, most)
		if size > most {
			t.Errorf("%s has %d bytes of c, want at most %d", m.id, size, most)
		}
	}
}

// worst writes a Service of member c to the broker, with as many ports, labels, slices and endpoints as fit in one object or a
// few.
func (w *testbed) worst(name string) {
	w.t.Helper()
	e := w.exportOf("c", name, func(e *clusterset.Export) {
		e.Labels, e.ServiceLabels = map[string]string{}, map[string]string{}
		for n := range 40 {
			e.Labels[fmt.Sprint("example.org/exported-", n)] = strings.Repeat("x", 63)
		}
		for n := range 5 {
			e.ServiceLabels[fmt.Sprint("example.org/service-", n)] = strings.Repeat("y", 63)
		}
		e.Ports = nil
		for n := range 8 {
			e.Ports = append(e.Ports, clusterset.Port{Name: fmt.Sprint("p", n), Protocol: clusterset.TCP, Port: uint16(80 + n)})
		}
	})
	w.says(e, "") // the record alone
	for n := range 3 {
		source := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: fmt.Sprint(name, "-", n), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4,
		}
		for _, p := range e.Ports {
			source.Ports = append(source.Ports, discoveryv1.EndpointPort{Name: new(p.Name), Protocol: new(corev1.ProtocolTCP), Port: new(int32(p.Port))})
		}
		for host := range 20 {
			source.Endpoints = append(source.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{fmt.Sprintf("10.99.%d.%d", n, host+1)}, NodeName: new(strings.Repeat("n", 63)), Zone: new(strings.Repeat("z", 63)),
			})
		}
		es := mcs.BrokerSlice(source, "c")
		es.Namespace = w.brokerNS
		w.create(w.broker, es)
	}
}

// importedOf counts what a member has imported from another one, and its bytes as JSON without managed fields.
func (m *member) importedOf(id string) (services, ports, slices, endpoints, size int) {
	w := m.testbed
	w.t.Helper()
	count := func(o client.Object) {
		o.SetManagedFields(nil)
		text, err := json.Marshal(o)
		w.noError(err)
		size += len(text)
	}
	var imports v1beta1.ServiceImportList
	w.noError(m.List(w.t.Context(), &imports, client.InNamespace(w.ns)))
	for i := range imports.Items {
		si := &imports.Items[i]
		if len(si.Status.Clusters) == 1 && si.Status.Clusters[0].Cluster == id {
			services, ports = services+1, ports+len(si.Spec.Ports)
			count(si)
		}
	}
	var list discoveryv1.EndpointSliceList
	w.noError(m.List(w.t.Context(), &list, client.InNamespace(w.ns), client.MatchingLabels{v1beta1.LabelSourceCluster: id}))
	for i := range list.Items {
		slices, endpoints = slices+1, endpoints+len(list.Items[i].Endpoints)
		count(&list.Items[i])
	}
	return services, ports, slices, endpoints, size
}

// Services that come and go leave room in their cluster's quota of tombstones. The oldest one goes first.
func TestOldTombstonesMakeRoom(t *testing.T) {
	w := newTestbed(t)
	w.a.settings.Quarantine = time.Hour // how long a tombstone lives otherwise
	w.run()
	w.quotas(v1alpha1.Quotas{Services: many})
	names := w.exportMany(w.a, w.b)
	for i, name := range names {
		if i == 1 {
			<-time.After(time.Second) // which is the resolution of their times
		}
		w.a.unexport(name)
		w.b.wantsNone(name)
	}
	w.eventually(func() error {
		var records v1alpha1.ExportRecordList
		w.noError(w.broker.List(t.Context(), &records, client.InNamespace(w.brokerNS)))
		if n := len(records.Items); n > many/2 {
			return fmt.Errorf("%d of %d tombstones are left", n, many)
		}
		for _, r := range records.Items {
			if r.Spec.Name == names[0] {
				return errors.New("the oldest tombstone is left")
			}
		}
		return nil
	})
}
