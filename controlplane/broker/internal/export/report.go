package export

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// synced is the condition by which Submariner Lighthouse once said what Ready says. Nobody keeps it current.
const synced = "Synced"

// report writes the outcome's conditions to the ServiceExport when they differ, and sends an event for
// each condition that changed its status or reason. Conditions that the outcome does not name stay,
// except that an invalid export conflicts with nobody, and that synced goes.
func (r *Reconciler) report(ctx context.Context, export *v1beta1.ServiceExport, o outcome) error {
	have := export.Status.Conditions
	var want []metav1.Condition
	for _, c := range have {
		want = append(want, *c.DeepCopy())
	}
	for _, c := range o.conditions {
		c.ObservedGeneration = export.Generation
		meta.SetStatusCondition(&want, c)
	}
	if meta.IsStatusConditionFalse(want, string(v1beta1.ServiceExportConditionValid)) {
		meta.RemoveStatusCondition(&want, string(v1beta1.ServiceExportConditionConflict))
	}
	meta.RemoveStatusCondition(&want, synced)
	if equality.Semantic.DeepEqual(have, want) {
		return nil
	}
	export.Status.Conditions = want
	if err := r.Client.Status().Update(ctx, export); err != nil {
		if apierrors.IsNotFound(err) {
			return nil // deleted meanwhile: nobody left to tell
		}
		return fmt.Errorf("update status of service export %s/%s: %w", export.Namespace, export.Name, err)
	}
	for _, c := range want {
		before := meta.FindStatusCondition(have, c.Type)
		if before != nil && before.Status == c.Status && before.Reason == c.Reason {
			continue
		}
		if before == nil && c.Reason == string(v1beta1.ServiceExportReasonNoConflicts) {
			continue // nobody wonders about a conflict that never was
		}
		r.Events.Eventf(export, nil, eventType(c), eventReason(c), "Export", "%s", c.Message)
	}
	return nil
}

// eventType is Warning for what the user would rather not see.
func eventType(c metav1.Condition) string {
	good := metav1.ConditionTrue
	if c.Type == string(v1beta1.ServiceExportConditionConflict) {
		good = metav1.ConditionFalse
	}
	if c.Status == good && c.Reason != string(mcs.ReasonEndpointsRefused) && c.Reason != string(mcs.ReasonNamesTooLong) {
		return corev1.EventTypeNormal
	}
	return corev1.EventTypeWarning
}

// eventReason is the condition's reason, or Conflict for several at once: an event's reason is one word.
func eventReason(c metav1.Condition) string {
	if c.Type == string(v1beta1.ServiceExportConditionConflict) && c.Status == metav1.ConditionTrue {
		return c.Type
	}
	return c.Reason
}
