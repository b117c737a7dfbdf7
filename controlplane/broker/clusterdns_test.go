package broker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// The Member reports whether the cluster's DNS answers pods. A single lost query is ignored, each change is one event,
// and a restarted controller reports no change.
func TestMemberReportsClusterDNS(t *testing.T) {
	w := newTestbed(t)
	var fails, asked atomic.Int32 // how many questions in a row go unanswered; how many there were
	w.a.checkDNS = func(context.Context) error {
		asked.Add(1)
		if fails.Add(-1) >= 0 {
			return errors.New("nobody answers")
		}
		fails.Store(0)
		return nil
	}
	w.run(w.a)
	says := func(want metav1.ConditionStatus, events ...string) {
		t.Helper()
		w.eventually(func() error {
			var self v1alpha1.Member
			w.noError(w.a.Get(t.Context(), types.NamespacedName{Namespace: w.a.install, Name: w.a.id}, &self))
			if c := meta.FindStatusCondition(self.Status.Conditions, v1alpha1.ConditionNamesResolve); c == nil || c.Status != want {
				return fmt.Errorf("condition %+v, want %s", c, want)
			}
			var list eventsv1.EventList
			w.noError(w.a.List(t.Context(), &list, client.InNamespace(w.a.install)))
			var have []string
			for _, e := range list.Items {
				if e.Regarding.Kind == "Member" && e.Regarding.Name == w.a.id {
					have = append(have, e.Type+" "+e.Reason)
				}
			}
			slices.Sort(have)
			if diff := cmp.Diff(events, have); diff != "" {
				return fmt.Errorf("events (-want +have):\n%s", diff)
			}
			return nil
		})
	}
	more := func() {
		t.Helper()
		enough := asked.Load() + 3
		w.eventually(func() error {
			if n := asked.Load(); n < enough {
				return fmt.Errorf("asked %d times", n)
			}
			return nil
		})
	}
	says(metav1.ConditionTrue)
	fails.Store(1)
	more()
	says(metav1.ConditionTrue)
	fails.Store(1 << 30)
	says(metav1.ConditionFalse, "Warning NamesNotAnswered")
	w.a.stop()
	w.run(w.a)
	more()
	says(metav1.ConditionFalse, "Warning NamesNotAnswered")
	fails.Store(0)
	says(metav1.ConditionTrue, "Normal NamesAnswered", "Warning NamesNotAnswered")
}
