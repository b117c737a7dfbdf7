package export

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// synced is the former condition of Submariner Lighthouse for Ready. Nothing updates it any more.
const synced = "Synced"

// report writes the outcome's conditions to the ServiceExport if they differ, and sends an event for each condition whose
// status or reason changed. It keeps other conditions, but removes synced, and Conflict from an invalid export.
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
	if err := r.Source.UpdateStatus(ctx, export); err != nil {
		if apierrors.IsNotFound(err) {
			return nil // deleted meanwhile
		}
		return fmt.Errorf("update status of service export %s/%s: %w", export.Namespace, export.Name, err)
	}
	for _, c := range want {
		before := meta.FindStatusCondition(have, c.Type)
		if before != nil && before.Status == c.Status && before.Reason == c.Reason {
			continue
		}
		if before == nil && c.Reason == string(v1beta1.ServiceExportReasonNoConflicts) {
			continue // a first NoConflicts is no news
		}
		r.Events.Eventf(export, nil, eventType(c), eventReason(c), "Export", "%s", c.Message)
	}
	return nil
}

// eventType returns Warning for a condition that needs attention.
func eventType(c metav1.Condition) string {
	good := metav1.ConditionTrue
	if c.Type == string(v1beta1.ServiceExportConditionConflict) {
		good = metav1.ConditionFalse
	}
	if c.Status != good {
		return corev1.EventTypeWarning
	}
	warnings := []v1beta1.ServiceExportConditionReason{
		mcs.ReasonEndpointsRefused, mcs.ReasonNamesTooLong, mcs.ReasonMetadataRefused, mcs.ReasonFamilyNotServed, mcs.ReasonServiceCIDRsOverlap,
		mcs.ReasonQuotaExceeded,
	}
	if slices.Contains(warnings, v1beta1.ServiceExportConditionReason(c.Reason)) {
		return corev1.EventTypeWarning
	}
	return corev1.EventTypeNormal
}

// eventReason returns the condition's reason, or Conflict for several reasons: an event's reason is one word.
func eventReason(c metav1.Condition) string {
	if c.Type == string(v1beta1.ServiceExportConditionConflict) && c.Status == metav1.ConditionTrue {
		return c.Type
	}
	return c.Reason
}
