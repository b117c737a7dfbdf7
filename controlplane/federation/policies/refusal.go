package policies

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// labelReport is on objects by which the leader of a member tells the leaders of others what happened there, and
// reportRefusal is its value on those of this package.
const (
	labelReport   = ours + "report"
	reportRefusal = "policy-refused"
)

// longest is how much of a refusal is kept, in bytes.
const longest = 512

// refusal is what an API server said to a copy that it did not take. It stands in a ConfigMap in that member, one a
// policy, as long as the copy is refused.
type refusal struct {
	content string // the digest of what was refused
	message string
	stored  *corev1.ConfigMap
}

// refusalName returns the name of the ConfigMap of a policy.
func refusalName(key reconcile.Key) string { return "federation-policy-" + digest(key) }

func readRefusal(c *corev1.ConfigMap) *refusal {
	return &refusal{content: c.Data["content"], message: c.Data["message"], stored: c}
}

// keyOfRefusal returns which policy was refused.
func keyOfRefusal(_ reconcile.Member, o client.Object) []reconcile.Key {
	c, ok := o.(*corev1.ConfigMap)
	if !ok || c.Data["kind"] == "" {
		return nil
	}
	return []reconcile.Key{{Kind: c.Data["kind"], Namespace: c.Data["namespace"], Name: c.Data["name"]}}
}

// refused says in the member that want was refused there, if that is news.
func (r *Reconciler) refused(ctx context.Context, into reconcile.Writer, here *held, key reconcile.Key, want *unstructured.Unstructured, why error) error {
	message := []rune(why.Error())
	now := refusal{content: want.GetAnnotations()[annotationContent], message: string(message[:min(len(message), longest)])}
	if was := here.refusal; was != nil && was.content == now.content && was.message == now.message {
		return nil
	}
	err := into.Apply(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.config.Namespace, Name: refusalName(key),
			Labels: map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy, labelReport: reportRefusal},
		},
		Data: map[string]string{
			"kind": key.Kind, "namespace": key.Namespace, "name": key.Name, "content": now.content, "message": now.message,
		},
	})
	if errors.Is(err, reconcile.ErrNotLeader) {
		return nil // which the write before it said already
	}
	return err
}

// allowed takes back that a policy was refused in the member.
func (*Reconciler) allowed(ctx context.Context, into reconcile.Writer, here *held) error {
	if here.refusal == nil {
		return nil
	}
	return into.Delete(ctx, here.refusal.stored)
}
