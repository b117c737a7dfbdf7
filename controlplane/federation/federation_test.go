package federation_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// TestAFederationLives goes through what happens to a federation of two supervisors and a child.
func TestAFederationLives(t *testing.T) {
	w := newWorld(t)
	_, stopA := w.supervise("a", "one")
	eventually(t, "a leads everybody", func() bool {
		return !slices.ContainsFunc(ids, func(id clusterset.ClusterID) bool { return w.status("a", id).Leader != "a/one" })
	})
	b, _ := w.supervise("b", "two")
	w.offer("c", "web", "10.3.0.1", "10.3.0.2")
	w.awaitEverywhere("web", "10.3.0.1", "10.3.0.2")
	eventually(t, "b says so too", func() bool {
		m := w.status("b", "c")
		return m.Reachable && m.Leader == "a/one" && m.Services == 1 && m.ClusterUID != ""
	})

	before := map[clusterset.ClusterID][]string{}
	for _, id := range ids {
		_, before[id] = w.federated(id, "web")
	}
	unchanged := func(since string) {
		t.Helper()
		for _, id := range ids {
			if _, after := w.federated(id, "web"); !slices.Equal(before[id], after) {
				t.Errorf("%s, in %s: %v became %v", since, id, before[id], after)
			}
		}
	}

	property := &about.ClusterProperty{}
	eventually(t, "the property says what the claim says", func() bool {
		return w.admin["a"].Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, property) == nil && property.Spec.Value == "a"
	})
	property.Spec.Value = "x"
	if err := w.admin["a"].Update(t.Context(), property); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a property that was made of a claim follows it", func() bool {
		return w.admin["a"].Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, property) == nil && property.Spec.Value == "a"
	})
	property.Labels, property.Spec.Value = nil, "x" // now it is somebody's own
	if err := w.admin["a"].Update(t.Context(), property); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the claim says that the property differs", func() bool {
		id := claim(federationv1alpha1.ClaimID, "")
		return w.admin["a"].Get(t.Context(), client.ObjectKeyFromObject(id), id) == nil &&
			meta.IsStatusConditionFalse(id.Status.Conditions, federationv1alpha1.ConditionInStep) && id.Spec.Value == "a"
	})

	epoch := w.status("b", "c").Epoch
	stopA()
	eventually(t, "b leads everybody, of a later epoch", func() bool {
		for _, m := range b.State().Members {
			if !m.Leading || m.Epoch <= epoch {
				return false
			}
		}
		return true
	})
	w.offer("c", "late", "10.3.1.1")
	w.awaitEverywhere("late", "10.3.1.1") // so b works
	unchanged("a new leader")

	w.gates["b c"].Shut()
	eventually(t, "b notices that c is silent", func() bool { return !w.status("b", "c").Reachable })
	unchanged("c went silent")
	w.gates["b c"].Open()
	eventually(t, "c is back", func() bool { return w.status("b", "c").Reachable })

	good := w.secret("b", "c")
	bad := good.DeepCopy()
	bad.Data[federationv1alpha1.SecretToken] = []byte("expired")
	w.update("b", bad)
	eventually(t, "b says that the token is no good", func() bool {
		m := w.status("b", "c")
		return !m.Reachable && strings.Contains(m.Message, "token")
	})
	if err := w.admin["b"].Delete(t.Context(), bad); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b says that the Secret is missing", func() bool { return strings.Contains(w.status("b", "c").Message, "does not exist") })
	unchanged("no credentials")
	w.create("b", good)
	eventually(t, "b reaches c with the new token", func() bool { return w.status("b", "c").Reachable })
}

// update writes a Secret of a supervisor anew.
func (w *world) update(id clusterset.ClusterID, secret *corev1.Secret) {
	w.t.Helper()
	if err := w.admin[id].Update(w.t.Context(), secret); err != nil {
		w.t.Fatal(err)
	}
}
