package broker_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// guestBlock is the block of a guest.
const guestBlock = "243.99.0.0/16"

// guest registers a member that has no controller; the test writes the member's objects to the broker.
func (w *testbed) guest(id string, joined time.Time) {
	w.t.Helper()
	spec := registration(id)
	spec.ClusterSetIPCIDR, spec.JoinTime = []string{guestBlock}, metav1.NewTime(joined)
	w.create(w.broker, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: id}, Spec: spec})
}

// says writes a guest's export of a Service to the broker, with one endpoint unless address is "".
func (w *testbed) says(e clusterset.Export, address string) *v1alpha1.ExportRecord {
	w.t.Helper()
	record := mcs.ExportRecord(e)
	record.Namespace = w.brokerNS
	w.create(w.broker, record)
	if address == "" {
		return record
	}
	name, protocol, target := "http", corev1.ProtocolTCP, int32(8080)
	es := mcs.BrokerSlice(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: e.Service.Namespace, Name: "x", Labels: map[string]string{discoveryv1.LabelServiceName: e.Service.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &target}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{address}}},
	}, e.Cluster)
	es.Namespace = w.brokerNS
	w.create(w.broker, es)
	return record
}

// A member claims that its export is the oldest of all. It loses the conflict if it joined later, and always if the
// broker's time counts.
func TestForgedTimeDoesNotWin(t *testing.T) {
	for name, c := range map[string]struct {
		precedence string
		joined     func() time.Time
	}{
		"by who joined later":       {"export-time", time.Now},
		"by the time of the broker": {"broker-time", func() time.Time { return time.Unix(0, 0) }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			for _, m := range w.both() {
				m.settings = broker.Settings{Settings: v1alpha1.Settings{ConflictPrecedence: c.precedence}}
			}
			w.run()
			w.a.service("hello")
			w.a.export("hello")
			w.b.wants("hello", helloOfA)
			w.laterThan(w.a, "hello")
			w.guest("c", c.joined())
			w.says(clusterset.Export{
				Cluster: "c", Service: clusterset.ServiceName{Namespace: w.ns, Name: "hello"}, ExportedAt: time.Unix(0, 0),
				Type: clusterset.Headless, Families: []clusterset.Family{clusterset.IPv4}, InternalTrafficPolicy: "Cluster",
				Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 666}},
			}, "")
			want := helloOfA
			want.clusters = []string{"a", "c"}
			for _, m := range w.both() {
				m.wants("hello", want)
			}
			w.a.condition("hello", "Conflict", metav1.ConditionTrue, "PortConflict,TypeConflict")
			conformance.Holds(t, "N24", "L72")
		})
	}
}

// The oldest ServiceExport takes precedence, or with broker-time the one that the broker saw first. Within one second
// the lower id does.
func TestOldestExportTakesPrecedence(t *testing.T) {
	for name, c := range map[string]struct {
		precedence string
		oldest     string
	}{
		"by the time of the export": {"export-time", "b"},
		"by the time of the broker": {"broker-time", "a"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			for _, m := range w.both() {
				m.settings = broker.Settings{Settings: v1alpha1.Settings{ConflictPrecedence: c.precedence}}
			}
			number := map[string]int32{"a": 42, "b": 4242}
			for _, m := range w.both() {
				m.service("hello", func(s *corev1.Service) { s.Spec.Ports = []corev1.ServicePort{{Name: "tcp", Port: number[m.id]}} })
			}
			w.b.export("hello") // the older one
			w.laterThan(w.b, "hello")
			w.run(w.a) // the broker hears of this one first
			w.a.export("hello")
			w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
			w.laterThan(w.a, "hello")
			w.run(w.b)
			for _, m := range w.both() {
				m.condition("hello", "Conflict", metav1.ConditionTrue, "PortConflict")
				w.eventually(func() error {
					si, _ := m.imported("hello")
					if si == nil {
						return fmt.Errorf("%s has no import yet", m.id)
					}
					var numbers []int32
					for _, p := range si.Spec.Ports {
						numbers = append(numbers, p.Port)
					}
					if !slices.Equal(numbers, []int32{number[c.oldest]}) {
						return fmt.Errorf("%s has the ports %v, want that of %s", m.id, numbers, c.oldest)
					}
					return nil
				})
			}
		})
	}

	t.Run("of the same second", func(t *testing.T) {
		w := newTestbed(t).run()
		w.b.service("hello", func(s *corev1.Service) { s.Spec.Ports = []corev1.ServicePort{{Name: "tcp", Port: 4242}} })
		export := w.b.export("hello")
		w.b.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
		w.guest("aa", time.Unix(0, 0))
		w.says(clusterset.Export{
			Cluster: "aa", Service: clusterset.ServiceName{Namespace: w.ns, Name: "hello"}, ExportedAt: export.CreationTimestamp.Time,
			Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4}, WantsIP: clusterset.Enabled,
			Ports: []clusterset.Port{{Name: "tcp", Protocol: clusterset.TCP, Port: 42}},
		}, "")
		want := expect{typ: v1beta1.ClusterSetIP, ips: 1, clusters: []string{"aa", "b"}, ports: []string{"tcp/42"}, endpoints: []string{"10.98.0.1:"}}
		for _, m := range w.both() {
			m.wantsOrWithout("hello", want, "10.98.0.1:")
		}
	})
	conformance.Holds(t, "N24")
}

// number makes an export expose one port of a number.
func number(port uint16) func(*clusterset.Export) {
	return func(e *clusterset.Export) {
		e.Ports = []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: port}}
	}
}

// exposes waits until m's import of hello has the ports of one exporter, and lists clusters.
func (m *member) exposes(port int32, clusters ...string) {
	m.testbed.t.Helper()
	m.testbed.eventually(func() error {
		si, _ := m.imported("hello")
		if si == nil {
			return fmt.Errorf("%s has no import", m.id)
		}
		var have []string
		for _, c := range si.Status.Clusters {
			have = append(have, c.Cluster)
		}
		if err := same(m.id+": clusters", clusters, have); err != nil {
			return err
		}
		if len(si.Spec.Ports) != 1 || si.Spec.Ports[0].Port != port {
			return fmt.Errorf("%s has the ports %v, want %d", m.id, si.Spec.Ports, port)
		}
		return nil
	})
}

// A member of old writes a record that claims an old date. The claim counts only if the record reached the broker soon after
// that date. A place once taken survives the loss of the record and a restart of the reader, and is lost by a withdrawal.
func TestBackDatedExportDoesNotWin(t *testing.T) {
	w := newTestbed(t)
	for _, m := range w.both() {
		m.settings.TimeScale = 1 // a vanished record is kept for a second
	}
	w.run()
	for _, id := range []string{"c", "d", "e"} {
		w.guest(id, time.Unix(0, 0))
	}
	longAgo := func(e *clusterset.Export) { e.ExportedAt = time.Now().Add(-time.Hour) }
	w.says(w.exportOf("c", "hello", number(81), longAgo), "10.99.0.1") // counts from now
	w.b.exposes(81, "c")
	w.a.service("hello")
	w.laterThanNow()
	w.a.export("hello")
	w.b.exposes(81, "a", "c")
	w.laterThanNow()
	w.says(w.exportOf("d", "hello", number(82), func(e *clusterset.Export) { e.ExportedAt = time.Unix(0, 0) }), "10.100.0.1")
	w.says(w.exportOf("e", "hello", number(83), longAgo), "10.101.0.1")
	for _, m := range w.both() {
		m.exposes(81, "a", "c", "d", "e")
	}

	// The broker loses c's record, and has it again.
	record := &v1alpha1.ExportRecord{}
	again := func(edit func(*v1alpha1.ExportRecord)) {
		t.Helper()
		w.noError(w.broker.Delete(t.Context(), record))
		record.ResourceVersion, record.UID = "", ""
		edit(record)
		w.create(w.broker, record)
	}
	w.noError(w.broker.Get(t.Context(), types.NamespacedName{Namespace: w.brokerNS, Name: "c.hello." + w.ns}, record))
	w.quiet()
	w.b.stop()
	again(func(*v1alpha1.ExportRecord) {})
	w.run(w.b)
	edit(w, w.broker, record, func(r *v1alpha1.ExportRecord) { r.Spec.Import.Ports[0].Port = 84 }) // seen by b now
	for _, m := range w.both() {
		m.exposes(84, "a", "c", "d", "e")
	}

	// A withdrawal gives the place away: c comes back as the youngest.
	edit(w, w.broker, record, func(r *v1alpha1.ExportRecord) { r.Spec.WithdrawnAt = new(metav1.Now()) })
	for _, m := range w.both() {
		m.exposes(80, "a", "d", "e")
	}
	w.laterThanNow()
	again(func(r *v1alpha1.ExportRecord) { r.Spec.WithdrawnAt = nil })
	for _, m := range w.both() {
		m.exposes(80, "a", "c", "d", "e")
	}
	conformance.Holds(t, "L72")
}

// laterThanNow waits for the next second, the resolution of creation times.
func (w *testbed) laterThanNow() {
	w.t.Helper()
	now := time.Now()
	<-time.After(now.Truncate(time.Second).Add(time.Second + 10*time.Millisecond).Sub(now))
}
