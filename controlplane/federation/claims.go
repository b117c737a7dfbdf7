package federation

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// twins maps each claim to the ClusterProperty with the same meaning.
var twins = map[string]string{
	federationv1alpha1.ClaimID:         about.ClusterID,
	federationv1alpha1.ClaimClusterSet: about.ClusterSet,
}

// Reasons of the condition InStep.
const (
	reasonSame      = "Same"
	reasonDifferent = "Different"
)

// keepClaims keeps the claims of a cluster that has a Federation in step with its ClusterProperties. If only one of the two
// exists, the other is created with its value. A property that was created so follows its claim; a condition reports any
// other difference, which a person has to resolve.
func (w *statusWriter) keepClaims(ctx context.Context) error {
	if !w.local.Synced() {
		return nil // it is called again
	}
	there, err := w.has(ctx, federationv1alpha1.FederationName, &federationv1alpha1.Federation{})
	if errors.Is(err, objectcache.ErrKindMissing) {
		return nil // the cluster is not part of a federation
	}
	if err != nil || !there {
		return err
	}
	var errs []error
	for claim, property := range twins {
		if err := w.keepClaim(ctx, claim, property); err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("keep ClusterClaim %s in step with ClusterProperty %s: %w", claim, property, err))
		}
	}
	return errors.Join(errs...)
}

// has reads an object of the cluster itself, and reports whether it exists.
func (w *statusWriter) has(ctx context.Context, name string, obj client.Object) (bool, error) {
	err := w.local.Get(ctx, client.ObjectKey{Name: name}, obj)
	return err == nil, client.IgnoreNotFound(err)
}

// keepClaim keeps one claim and its property in step.
func (w *statusWriter) keepClaim(ctx context.Context, name, property string) error {
	claim, twin := &federationv1alpha1.ClusterClaim{}, &about.ClusterProperty{}
	claimed, claimErr := w.has(ctx, strings.ToLower(name), claim)
	defined, twinErr := w.has(ctx, property, twin)
	if err := errors.Join(claimErr, twinErr); errors.Is(err, objectcache.ErrKindMissing) {
		return nil // the other kind is not installed
	} else if err != nil {
		return err
	}
	switch {
	case !claimed && !defined:
		return nil
	case !claimed:
		return w.client.Create(ctx, &federationv1alpha1.ClusterClaim{
			ObjectMeta: metav1.ObjectMeta{Name: strings.ToLower(name), Labels: map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}},
			Spec:       federationv1alpha1.ClusterClaimSpec{Name: name, Value: twin.Spec.Value},
		})
	case !defined:
		// Membership of a broker's ClusterSet makes properties too, which stay when the cluster leaves the federation.
		return w.client.Create(ctx, &about.ClusterProperty{
			ObjectMeta: metav1.ObjectMeta{Name: property, Labels: map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}},
			Spec:       about.ClusterPropertySpec{Value: claim.Spec.Value},
		})
	case claim.Spec.Value != twin.Spec.Value && twin.Labels[v1alpha1.LabelManagedBy] == federationv1alpha1.ManagedBy:
		twin.Spec.Value = claim.Spec.Value
		if err := w.client.Update(ctx, twin); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
			return err
		} // the cluster is a member of a broker's ClusterSet under the other value, which the condition reports
	}
	return w.reportInStep(ctx, claim, twin)
}

// reportInStep writes the condition InStep of a claim.
func (w *statusWriter) reportInStep(ctx context.Context, claim *federationv1alpha1.ClusterClaim, twin *about.ClusterProperty) error {
	condition := metav1.Condition{
		Type: federationv1alpha1.ConditionInStep, Status: metav1.ConditionTrue, Reason: reasonSame,
		Message: fmt.Sprintf("ClusterProperty %s has the same value", twin.Name), ObservedGeneration: claim.Generation,
	}
	if claim.Spec.Value != twin.Spec.Value {
		condition.Status, condition.Reason = metav1.ConditionFalse, reasonDifferent
		condition.Message = fmt.Sprintf("ClusterProperty %s is %s, this claim is %s; make them the same", twin.Name, twin.Spec.Value, claim.Spec.Value)
	}
	want := claim.DeepCopy()
	meta.SetStatusCondition(&want.Status.Conditions, condition)
	if equality.Semantic.DeepEqual(want.Status, claim.Status) {
		return nil
	}
	return w.client.Status().Update(ctx, want)
}
