package policies

import (
	"context"
	"errors"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// labelReport marks the objects by which the leader of a member reports to the leaders of other members. The others are its
// values on the objects of this package.
const (
	labelReport   = ours + "report"
	reportRefusal = "policy-refused"
	reportRemoval = "policy-removed"
)

// longest limits the stored text of a refusal, in characters.
const longest = 512

// refusal is the error of an API server that refuses a copy. A ConfigMap in that member stores it, one for each policy, for as
// long as the copy is refused.
type refusal struct {
	content string // the digest of the refused content
	message string
	stored  *corev1.ConfigMap
}

// refusalName returns the name of the ConfigMap of a policy.
func refusalName(key reconcile.Key) string { return "federation-policy-" + digest(key) }

func readRefusal(c *corev1.ConfigMap) *refusal {
	return &refusal{content: c.Data["content"], message: c.Data["message"], stored: c}
}

// keyOfReport returns the key of the policy that a report is about. An administrator of the member may have written anything there.
func (r *Reconciler) keyOfReport(_ reconcile.Member, o client.Object) []reconcile.Key {
	c, ok := o.(*corev1.ConfigMap)
	if !ok {
		return nil
	}
	key := reconcile.Key{Kind: c.Data["kind"], Namespace: c.Data["namespace"], Name: c.Data["name"]}
	if !slices.ContainsFunc(r.config.Kinds, func(k federationv1alpha1.PolicyKind) bool { return keyOf(k, key.Namespace, key.Name) == key }) {
		return nil
	}
	return []reconcile.Key{key}
}

// refused records in the member that its API server refused want, if that is new.
func (r *Reconciler) refused(ctx context.Context, into reconcile.Writer, here *observed, key reconcile.Key, want *unstructured.Unstructured, why error) error {
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
		return nil // the write before it reported that
	}
	return err
}

// allowed deletes the record that a policy was refused in the member.
func (*Reconciler) allowed(ctx context.Context, into reconcile.Writer, here *observed) error {
	if here.refusal == nil {
		return nil
	}
	return into.Delete(ctx, here.refusal.stored)
}
