package mcs

import (
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// conflictReasons are the reasons by which the MCS API names what exports disagree in.
var conflictReasons = map[clusterset.ConflictField]v1beta1.ServiceExportConditionReason{
	clusterset.ConflictPorts:                 v1beta1.ServiceExportReasonPortConflict,
	clusterset.ConflictType:                  v1beta1.ServiceExportReasonTypeConflict,
	clusterset.ConflictSessionAffinity:       v1beta1.ServiceExportReasonSessionAffinityConflict,
	clusterset.ConflictSessionAffinityConfig: v1beta1.ServiceExportReasonSessionAffinityConfigConflict,
	clusterset.ConflictInternalTrafficPolicy: v1beta1.ServiceExportReasonInternalTrafficPolicyConflict,
	clusterset.ConflictTrafficDistribution:   v1beta1.ServiceExportReasonTrafficDistributionConflict,
	clusterset.ConflictFamilies:              v1beta1.ServiceExportReasonIPFamilyConflict,
	clusterset.ConflictLabels:                v1beta1.ServiceExportReasonLabelsConflict,
	clusterset.ConflictAnnotations:           v1beta1.ServiceExportReasonAnnotationsConflict,
}

// The conditions below carry no time; whoever writes them sets it when they change. The same situation
// always gives the same message, so nothing flaps.

// Valid is the condition of a ServiceExport whose Service can be exported.
func Valid() metav1.Condition {
	return exportCondition(v1beta1.ServiceExportConditionValid, metav1.ConditionTrue,
		v1beta1.ServiceExportReasonValid, "the service can be exported")
}

// Invalid is the condition of one whose Service cannot.
func Invalid(err *InvalidError) metav1.Condition {
	return exportCondition(v1beta1.ServiceExportConditionValid, metav1.ConditionFalse, err.Reason, err.Message)
}

// Exported is the condition Ready of a ServiceExport that the other members see, with its ClusterSetIP
// unless it is headless.
func Exported(ips []netip.Addr) metav1.Condition {
	message := "exported to the clusterset"
	if len(ips) > 0 {
		message += " as " + strings.Join(formatAddrs(ips), " and ")
	}
	return exportCondition(v1beta1.ServiceExportConditionReady, metav1.ConditionTrue,
		v1beta1.ServiceExportReasonExported, message)
}

// NotReady is the condition Ready of a ServiceExport that is Pending (it will be exported by itself) or
// Failed (somebody has to act).
func NotReady(reason v1beta1.ServiceExportConditionReason, message string) metav1.Condition {
	return exportCondition(v1beta1.ServiceExportConditionReady, metav1.ConditionFalse, reason, message)
}

// Conflicts is the condition Conflict: True with one reason and one line a conflict, or False.
func Conflicts(conflicts []clusterset.Conflict) metav1.Condition {
	if len(conflicts) == 0 {
		return exportCondition(v1beta1.ServiceExportConditionConflict, metav1.ConditionFalse,
			v1beta1.ServiceExportReasonNoConflicts, "all exports of the service agree")
	}
	var reasons, lines []string
	for _, c := range conflicts {
		reason, ok := conflictReasons[c.Field]
		if !ok {
			panic(fmt.Sprintf("mcs: conflict in %s has no reason", c.Field))
		}
		reasons = append(reasons, string(reason))
		lines = append(lines, c.Message())
	}
	return exportCondition(v1beta1.ServiceExportConditionConflict, metav1.ConditionTrue,
		v1beta1.ServiceExportConditionReason(strings.Join(reasons, ",")), strings.Join(lines, "\n"))
}

func exportCondition(t v1beta1.ServiceExportConditionType, status metav1.ConditionStatus, reason v1beta1.ServiceExportConditionReason, message string) metav1.Condition {
	c := v1beta1.NewServiceExportCondition(t, status, reason, message)
	c.LastTransitionTime = metav1.Time{}
	return c
}
