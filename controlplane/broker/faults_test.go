package broker_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

// many Services suffice for a mass withdrawal.
const many = 8

// exportMany makes m export many Services, and returns their names when all have an import in other.
func (w *testbed) exportMany(m, other *member) []string {
	w.t.Helper()
	var names []string
	for i := range many {
		name := fmt.Sprint("many-", i)
		names = append(names, name)
		m.service(name)
		m.export(name)
	}
	for _, name := range names {
		other.wants(name, helloOfA)
	}
	w.quiet()
	return names
}

// vips returns the addresses of imports in m, by name.
func (m *member) vips(names []string) map[string]string {
	m.testbed.t.Helper()
	vips := map[string]string{}
	for _, name := range names {
		if si, _ := m.imported(name); si != nil {
			vips[name] = fmt.Sprint(si.Spec.IPs)
		}
	}
	return vips
}

// wipe deletes from the broker all objects of the kinds given.
func (w *testbed) wipe(kinds ...client.Object) {
	w.t.Helper()
	for _, kind := range kinds {
		w.noError(w.broker.DeleteAllOf(w.t.Context(), kind, client.InNamespace(w.brokerNS)))
	}
}

// holds waits until the status of m's registration reports a hold, or none.
func (m *member) holds(want metav1.ConditionStatus) {
	m.testbed.t.Helper()
	m.testbed.eventually(func() error {
		var self v1alpha1.Member
		m.testbed.noError(m.Get(m.testbed.t.Context(), types.NamespacedName{Namespace: m.install, Name: m.id}, &self))
		c := meta.FindStatusCondition(self.Status.Conditions, v1alpha1.ConditionWithdrawalsHeld)
		if c == nil || c.Status != want {
			return fmt.Errorf("condition of %s: %+v", m.id, c)
		}
		return nil
	})
}

// The test deletes all objects of the broker, registrations included, while members run, and then restarts one of them.
// All imports stay. When the administrator has restored the registrations, everything is published again with the same
// addresses.
func TestWipedBrokerLosesNothing_Faults(t *testing.T) {
	w := newTestbed(t)
	w.b.settings.TimeScale = 0.5 // what takes the API server longer than half a second is not one step
	w.run()
	names := w.exportMany(w.a, w.b)
	before := w.b.vips(names)
	enough := w.b.keeps(names[0], "10.97.0.1")

	registered := v1alpha1.MemberList{}
	w.noError(w.broker.List(t.Context(), &registered, client.InNamespace(w.brokerNS)))
	config := &v1alpha1.ClusterSetConfig{}
	key := types.NamespacedName{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName}
	w.noError(w.broker.Get(t.Context(), key, config))
	w.wipe(&v1alpha1.ClusterSetConfig{}, &v1alpha1.Member{}, &v1alpha1.ExportRecord{}, &v1beta1.ServiceImport{},
		&discoveryv1.EndpointSlice{}, &coordinationv1.Lease{})
	w.b.holds(metav1.ConditionTrue)
	w.b.stop()
	w.run(w.b)
	w.eventually(func() error {
		if !w.b.controller.State().Leader {
			return fmt.Errorf("b does not lead yet")
		}
		return nil
	})
	<-time.After(3 * time.Second) // several windows: it holds by itself now, not only by the condition of before
	w.b.holds(metav1.ConditionTrue)
	if diff := same("VIPs", flat(before), flat(w.b.vips(names))); diff != nil {
		t.Error(diff)
	}

	config.ResourceVersion, config.UID = "", ""
	w.create(w.broker, config)
	for i := range registered.Items {
		registered.Items[i].ResourceVersion, registered.Items[i].UID = "", ""
		w.create(w.broker, &registered.Items[i])
	}
	w.b.holds(metav1.ConditionFalse)
	for _, name := range names {
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		w.b.wants(name, helloOfA)
	}
	w.quiet()
	if diff := same("VIPs", flat(before), flat(w.b.vips(names))); diff != nil {
		t.Error(diff)
	}
	enough()
}

// The test restarts a member while another has published most of the exports that a fault deleted, but not all. Too few
// are missing for a mass withdrawal, but the imports stay until the other had the time to publish the rest. Exports
// that do not come back in that time are removed.
func TestRestartAmidRecovery_Faults(t *testing.T) {
	w := newTestbed(t)
	w.b.settings.TimeScale = 0.5 // windows of half a second, 15 s for who publishes anew
	w.run()
	names := w.exportMany(w.a, w.b)
	missing := names[:2]
	w.a.stop()
	w.b.stop()
	for _, name := range missing {
		about := client.MatchingLabels{v1alpha1.LabelServiceName: name}
		for _, kind := range []client.Object{&v1alpha1.ExportRecord{}, &discoveryv1.EndpointSlice{}, &v1beta1.ServiceImport{}} {
			w.noError(w.broker.DeleteAllOf(t.Context(), kind, client.InNamespace(w.brokerNS), about))
		}
	}
	enough := w.b.keeps(missing[0], "10.97.0.1")
	w.run(w.b)
	w.eventually(func() error {
		if !w.b.controller.State().Leader {
			return fmt.Errorf("b does not lead yet")
		}
		return nil
	})
	<-time.After(3 * time.Second) // six windows
	w.run(w.a)
	for _, name := range missing {
		w.eventually(func() error {
			var records v1alpha1.ExportRecordList
			w.noError(w.broker.List(t.Context(), &records, client.InNamespace(w.brokerNS), client.MatchingLabels{v1alpha1.LabelServiceName: name}))
			if len(records.Items) == 0 {
				return fmt.Errorf("a has not published %s anew", name)
			}
			return nil
		})
	}
	w.quiet()
	enough()

	w.a.stop()
	w.b.stop()
	gone := missing[0]
	w.noError(w.broker.DeleteAllOf(t.Context(), &v1alpha1.ExportRecord{}, client.InNamespace(w.brokerNS), client.MatchingLabels{v1alpha1.LabelServiceName: gone}))
	w.run(w.b)
	w.b.wantsNone(gone)
	w.b.wants(missing[1], helloOfA)
}

func flat(m map[string]string) []string {
	var all []string
	for k, v := range m {
		all = append(all, k+" "+v)
	}
	slices.Sort(all)
	return all
}

// The test deletes a member's records, and in a second round its slices, without tombstones. The other member keeps its
// imports and reports a hold, and removes them after a release.
func TestMassWithdrawalIsHeld_Faults(t *testing.T) {
	for name, kind := range map[string]client.Object{"records": &v1alpha1.ExportRecord{}, "slices": &discoveryv1.EndpointSlice{}} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			w.b.settings.TimeScale = 0.5 // what takes the API server longer than half a second is not one step
			w.run()
			names := w.exportMany(w.a, w.b)
			w.a.stop()
			w.wipe(kind)
			w.b.holds(metav1.ConditionTrue)
			for _, name := range names {
				w.b.wants(name, helloOfA)
			}
			w.quiet(w.b)
			w.eventually(func() error {
				var events eventsv1.EventList
				w.noError(w.b.List(t.Context(), &events, client.InNamespace(w.b.install)))
				if !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool { return e.Reason == "WithdrawalsHeld" && e.Regarding.Name == "b" }) {
					return fmt.Errorf("no event says so: %d others", len(events.Items))
				}
				return nil
			})

			self := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.b.install, Name: "b"}}
			edit(w, w.b.Client, self, func(m *v1alpha1.Member) {
				metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationReleaseHold, "a="+time.Now().UTC().Format(time.RFC3339))
			})
			w.b.holds(metav1.ConditionFalse)
			for _, n := range names {
				if name == "records" {
					w.b.wantsNone(n)
					continue
				}
				none := helloOfA
				none.endpoints = nil
				w.b.wants(n, none)
			}
		})
	}
}

// A member unexports most Services while the controller of another is stopped for longer than tombstones live. It wakes, and removes
// these imports without a hold: the Lease of the member states what it still exports.
func TestHibernatedImporter_Faults(t *testing.T) {
	w := newTestbed(t)
	w.b.settings.TimeScale = 0.5 // holds last for half an hour
	w.run()
	names := w.exportMany(w.a, w.b)
	w.b.stop()
	for _, name := range names[1:] {
		w.a.unexport(name)
	}
	w.eventuallyWithin(2*patience, func() error {
		var records v1alpha1.ExportRecordList
		w.noError(w.broker.List(t.Context(), &records, client.InNamespace(w.brokerNS)))
		if n := len(records.Items); n != 1 {
			return fmt.Errorf("%d records", n)
		}
		return nil
	})
	w.run(w.b)
	for _, name := range names[1:] {
		w.b.wantsNone(name)
	}
	w.b.wants(names[0], helloOfA)
	w.quiet()
}

// The test unexports everything at once.
func TestUnexportOfAllIsNotHeld_Faults(t *testing.T) {
	w := newTestbed(t).run()
	names := w.exportMany(w.a, w.b)
	for _, name := range names {
		w.a.unexport(name)
	}
	for _, name := range names {
		w.b.wantsNone(name)
	}
	var self v1alpha1.Member
	w.noError(w.b.Get(t.Context(), types.NamespacedName{Namespace: w.b.install, Name: "b"}, &self))
	if len(self.Status.Conditions) > 0 {
		t.Errorf("held: %+v", self.Status.Conditions)
	}
	w.brokerEmpty()
}

// The test waits until the broker has no object of a Service at all.
func TestTombstonesAreDeleted_Faults(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.a.unexport("hello")
	w.b.wantsNone("hello")
	w.eventuallyWithin(2*patience, func() error {
		var records v1alpha1.ExportRecordList
		w.noError(w.broker.List(t.Context(), &records, client.InNamespace(w.brokerNS)))
		if n := len(records.Items); n > 0 {
			return fmt.Errorf("%d records", n)
		}
		return nil
	})
}

// An administrator sets leftAt for a member, unknown to its controller. The other member removes its imports at once,
// and imports again after it joins again.
func TestMemberThatLeftIsForgotten_Faults(t *testing.T) {
	w := newTestbed(t).run()
	names := w.exportMany(w.a, w.b)
	w.a.stop()
	registered := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "a"}}
	edit(w, w.broker, registered, func(m *v1alpha1.Member) { m.Spec.LeftAt = new(metav1.Now()) })
	for _, name := range names {
		w.b.wantsNone(name)
	}
	edit(w, w.broker, registered, func(m *v1alpha1.Member) { m.Spec.LeftAt = nil })
	for _, name := range names {
		w.b.wants(name, helloOfA)
	}
}

// The test kills and restarts each of the three API servers under running controllers. A restarted broker may refuse
// all writes of members for half a minute, until its admission knows the kind of the policies' parameter.
func TestAPIServersRestart_Faults(t *testing.T) {
	w := newTestbed(t)
	w.a.restarts, w.b.restarts = true, true // who cannot renew its own Lease in time ends, and Kubernetes starts another one
	w.run()
	svc := w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	want := helloOfA
	for i, server := range []*apitest.Server{&w.serverSet.broker, &w.serverSet.a, &w.serverSet.b} {
		server.Restart(t, time.Second)
		host := 2 + i
		w.a.slice(svc, corev1.IPv4Protocol, host)
		want.endpoints = append(slices.Clone(want.endpoints), fmt.Sprintf("10.97.0.%d:8080", host))
		w.b.wants("hello", want)
		w.a.wants("hello", want)
	}
}
