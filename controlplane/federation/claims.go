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
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// twins are the claims that mean what a ClusterProperty means.
var twins = map[string]string{
	federationv1alpha1.ClaimID:         about.ClusterID,
	federationv1alpha1.ClaimClusterSet: about.ClusterSet,
}

// The reasons of the condition InStep.
const (
	reasonSame      = "Same"
	reasonDifferent = "Different"
)

// keepClaims keeps the claims of a cluster that has a Federation in step with its ClusterProperties: what one of them
// says the other gets to say too, if it does not exist. A property that was made so follows its claim; any other
// difference is for a person to mend, so it is only said.
func (f *Federation) keepClaims(ctx context.Context) error {
	if !f.local.Read() {
		return nil // it is called again
	}
	there, err := f.has(ctx, federationv1alpha1.FederationName, &federationv1alpha1.Federation{})
	if errors.Is(err, reconcile.ErrKindMissing) {
		return nil // nobody has formed one
	}
	if err != nil || !there {
		return err
	}
	var errs []error
	for claim, property := range twins {
		if err := f.keepClaim(ctx, claim, property); err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("keep ClusterClaim %s in step with ClusterProperty %s: %w", claim, property, err))
		}
	}
	return errors.Join(errs...)
}

// has reads an object of the cluster itself, and reports whether it is there.
func (f *Federation) has(ctx context.Context, name string, obj client.Object) (bool, error) {
	err := f.local.Get(ctx, client.ObjectKey{Name: name}, obj)
	return err == nil, client.IgnoreNotFound(err)
}

func (f *Federation) keepClaim(ctx context.Context, name, property string) error {
	claim, twin := &federationv1alpha1.ClusterClaim{}, &about.ClusterProperty{}
	claimed, claimErr := f.has(ctx, strings.ToLower(name), claim)
	said, twinErr := f.has(ctx, property, twin)
	if err := errors.Join(claimErr, twinErr); errors.Is(err, reconcile.ErrKindMissing) {
		return nil // there is nothing to be in step with
	} else if err != nil {
		return err
	}
	ours := map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}
	// Membership of a broker's ClusterSet makes properties too, which stay when the cluster leaves the federation.
	made := map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}
	switch {
	case !claimed && !said:
		return nil
	case !claimed:
		return f.client.Create(ctx, &federationv1alpha1.ClusterClaim{
			ObjectMeta: metav1.ObjectMeta{Name: strings.ToLower(name), Labels: ours},
			Spec:       federationv1alpha1.ClusterClaimSpec{Name: name, Value: twin.Spec.Value},
		})
	case !said:
		return f.client.Create(ctx, &about.ClusterProperty{
			ObjectMeta: metav1.ObjectMeta{Name: property, Labels: made}, Spec: about.ClusterPropertySpec{Value: claim.Spec.Value},
		})
	case claim.Spec.Value != twin.Spec.Value && twin.Labels[v1alpha1.LabelManagedBy] == federationv1alpha1.ManagedBy:
		twin.Spec.Value = claim.Spec.Value
		if err := f.client.Update(ctx, twin); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
			return err
		} // the cluster is a member of a broker's ClusterSet under the other value, so it is said
	}
	condition := metav1.Condition{
		Type: federationv1alpha1.ConditionInStep, Status: metav1.ConditionTrue, Reason: reasonSame,
		Message: fmt.Sprintf("ClusterProperty %s says the same", property), ObservedGeneration: claim.Generation,
	}
	if claim.Spec.Value != twin.Spec.Value {
		condition.Status, condition.Reason = metav1.ConditionFalse, reasonDifferent
		condition.Message = fmt.Sprintf("ClusterProperty %s says %s, this claim says %s; make them the same", property, twin.Spec.Value, claim.Spec.Value)
	}
	want := claim.DeepCopy()
	meta.SetStatusCondition(&want.Status.Conditions, condition)
	if equality.Semantic.DeepEqual(want.Status, claim.Status) {
		return nil
	}
	return f.client.Status().Update(ctx, want)
}
