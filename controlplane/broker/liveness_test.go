package broker_test

import (
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// The times of these tests: long enough for renewals on a busy machine, short enough to wait for.
const (
	renew   = 500 * time.Millisecond // times.Renew, scaled
	stale   = 4 * renew
	hardTTL = 60 * renew
)

// fastSettings make a member renew its Lease every renew.
var fastSettings = broker.Settings{TimeScale: 0.1}

// seesState waits until m sees the other member in a state.
func (m *member) seesState(id string, want liveness.State) {
	m.testbed.t.Helper()
	m.testbed.eventually(func() error {
		for _, other := range m.controller.State().Members {
			if string(other.ID) == id && other.State == want {
				return nil
			}
		}
		return fmt.Errorf("in %s: %+v, want %s to be %s", m.id, m.controller.State().Members, id, want)
	})
}

// newWatched returns a testbed in which b imports hello of a, whose Leases are renewed every renew. b sees a live, and its
// dataplane has a verdict about a. edit may change the settings before the controllers start.
func newWatched(t *testing.T, verdict liveness.Verdict, edit ...func(a, b *broker.Settings)) *testbed {
	t.Helper()
	w := newTestbed(t)
	w.a.settings, w.b.settings = fastSettings, fastSettings
	for _, e := range edit {
		e(&w.a.settings, &w.b.settings)
	}
	w.b.evidence = evidence{"a": verdict}
	w.run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.b.seesState("a", liveness.Live)
	return w
}

// leaseOfA returns a's Lease on the broker.
func (w *testbed) leaseOfA() *coordinationv1.Lease {
	w.t.Helper()
	lease := &coordinationv1.Lease{}
	w.noError(w.broker.Get(w.t.Context(), client.ObjectKey{Namespace: w.brokerNS, Name: v1alpha1.MemberLease("a")}, lease))
	return lease
}

// A member dies without withdrawing. Its endpoints are removed from the other member when they do not answer either, at
// the latest after the hard TTL. The import stays, and everything comes back with the member.
func TestDeadMemberLosesItsEndpoints(t *testing.T) {
	for name, tt := range map[string]struct {
		mode    string
		verdict liveness.Verdict
		after   time.Duration // at least
	}{
		"silent":      {"", liveness.Silent, stale},
		"unknown":     {"", liveness.Unknown, hardTTL},
		"lease alone": {"lease", liveness.Answering, stale},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWatched(t, tt.verdict, func(_, b *broker.Settings) { b.Liveness = tt.mode })
			w.b.service("hello")
			w.b.export("hello")
			both := helloOfA
			both.clusters, both.endpoints = []string{"a", "b"}, []string{"10.97.0.1:8080", "10.98.0.1:8080"}
			w.b.wants("hello", both)
			w.b.seesState("a", liveness.Live)
			enough := w.b.keeps("hello", "10.98.0.1")

			w.a.stop()
			// The last renewal is the beginning of the time: on a busy machine it may be older than one renew.
			died := w.leaseOfA().Spec.RenewTime.Time
			onlyB := both
			onlyB.endpoints = []string{"10.98.0.1:8080"}
			w.eventuallyWithin(2*hardTTL, func() error {
				si, slices := w.b.imported("hello")
				if si == nil {
					t.Fatal("the import went")
				}
				return onlyB.check("b", si, slices)
			})
			if gone := time.Since(died); gone < tt.after {
				t.Errorf("its endpoints went after %s, want at least %s", gone, tt.after)
			}
			w.b.seesState("a", liveness.Dead)
			w.run(w.a)
			w.b.wants("hello", both)
			enough()
			conformance.Holds(t, "N37", "L51")
		})
	}
}

// An old Lease alone removes no endpoint.
func TestStaleMemberThatAnswersStays(t *testing.T) {
	w := newWatched(t, liveness.Answering)
	enough := w.b.keeps("hello", "10.97.0.1")
	w.a.stop()
	w.b.seesState("a", liveness.Stale)
	<-time.After(2 * stale)
	w.b.seesState("a", liveness.Stale)
	enough()
	conformance.Holds(t, "N37", "L51")
}

// A member without a connection to the broker keeps all other members, however long, and gives them time after it
// reconnects.
func TestMemberWithoutBrokerDeclaresNoMemberDead(t *testing.T) {
	w := newWatched(t, liveness.Silent)
	enough := w.b.keeps("hello", "10.97.0.1")
	w.b.gate.Shut()
	<-time.After(3 * stale)
	w.b.gate.Open()
	<-time.After(stale)
	w.b.seesState("a", liveness.Live)
	enough()
	conformance.Holds(t, "L50", "L51")
}

// The Lease of a live member is renewed with times one hour ahead, and then one hour behind.
func TestClocksMayDiffer(t *testing.T) {
	w := newWatched(t, liveness.Silent)
	enough := w.b.keeps("hello", "10.97.0.1")
	w.a.stop()
	lease := w.leaseOfA()
	for _, offset := range []time.Duration{time.Hour, -time.Hour} {
		for range int(2 * stale / renew) {
			edit(w, w.broker, lease, func(l *coordinationv1.Lease) {
				l.Spec.RenewTime = new(metav1.NewMicroTime(time.Now().Add(offset)))
			})
			<-time.After(renew)
		}
		w.b.seesState("a", liveness.Live)
	}
	enough()
	conformance.Holds(t, "L51")
}

// The test stops and starts a member's controller faster than its Lease grows old.
func TestFlappingMemberCausesNoWrites(t *testing.T) {
	const slower = 4 // than the fastSettings: a controller may need seconds to start
	w := newWatched(t, liveness.Silent, func(a, b *broker.Settings) {
		a.TimeScale *= slower
		b.TimeScale *= slower
	})
	w.quiet()
	enough := w.b.keeps("hello", "10.97.0.1")
	for range 4 {
		w.a.stop()
		before := w.leaseOfA().ResourceVersion
		<-time.After(renew)
		w.run(w.a)
		w.eventually(func() error {
			if w.leaseOfA().ResourceVersion == before {
				return fmt.Errorf("a has not renewed its Lease")
			}
			return nil
		})
	}
	if writes := w.changesWithin(slower*stale, w.b); len(writes) > 0 {
		t.Errorf("b wrote %v", writes)
	}
	enough()
	conformance.Holds(t, "L51")
}
