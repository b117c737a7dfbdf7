package engine

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
)

const (
	// provenFor is the time until a proof is repeated.
	provenFor = 10 * time.Minute
	// unprovenTries is how often the proof fails before it counts, for a minute: an API server learns the kind of a new policy's
	// parameter with a delay, and ignores the policy until then.
	unprovenTries = 30
)

// proveFence tries, while this process leads a member, whether the member's API server rejects the write of a former leader. Somebody who
// forms a federation by hand may have left the policies out, or removed them later; nothing else would show it. The write is a dry run.
func (e *Engine) proveFence(ctx context.Context, m *managedMember) {
	defer m.unfenced.Store(false) // the next leader tells
	failed := 0
	for {
		wait := e.cfg.Times.Retry
		switch err := m.Client().Create(ctx, formerLeadersWrite(e.cfg.Namespace), client.DryRunAll); {
		case err == nil:
			if failed++; failed == unprovenTries {
				e.cfg.Log.Error("the member does not reject writes of former leaders", "member", m.ID())
				m.unfenced.Store(true)
				e.cfg.Changed()
			}
		case strings.Contains(err.Error(), admission.FenceName):
			failed, wait = 0, provenFor
			if m.unfenced.Swap(false) {
				e.cfg.Changed()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// formerLeadersWrite returns an object as a leader whose epoch is over would write it.
func formerLeadersWrite(namespace string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: "federation-fence-trial",
		Labels:      map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy},
		Annotations: map[string]string{federationv1alpha1.AnnotationEpoch: "former"},
	}}
}
