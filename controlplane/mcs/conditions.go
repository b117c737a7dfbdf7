package mcs

import (
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Reasons that the MCS API has no constant for.
const (
	// ReasonClusterSetIPEnablementConflict is a reason of the condition Conflict, named as Submariner
	// Lighthouse names it.
	ReasonClusterSetIPEnablementConflict v1beta1.ServiceExportConditionReason = "ClusterSetIPEnablementConflict"
	// ReasonRestrictedNamespace is a reason of the condition Valid.
	ReasonRestrictedNamespace v1beta1.ServiceExportConditionReason = "RestrictedNamespace"
	// ReasonEndpointsRefused is a reason of the condition Ready, when it is True all the same: the Service is
	// exported without some of its endpoints.
	ReasonEndpointsRefused v1beta1.ServiceExportConditionReason = "EndpointsRefused"
	// ReasonNamesTooLong is another one, likewise: the Service is exported, and something of it has no name in DNS.
	ReasonNamesTooLong v1beta1.ServiceExportConditionReason = "NamesTooLong"
	// ReasonExcluded is a reason of the condition Ready, when it is False: the type of the Service is not that
	// of the import, and such exporters are left out.
	ReasonExcluded v1beta1.ServiceExportConditionReason = "TypeExcluded"
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
	clusterset.ConflictClusterSetIP:          ReasonClusterSetIPEnablementConflict,
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

// few is how many of what a message is about it names.
const few = 3

// ExportedWithout is Exported for a Service of which something is missing in the ClusterSet: refused holds one error
// for each endpoint that nobody there may believe, unnamed what has no name in DNS (see [Unnamed]).
func ExportedWithout(ips []netip.Addr, refused []error, unnamed []string) metav1.Condition {
	c := Exported(ips)
	if len(unnamed) > 0 {
		c.Reason = string(ReasonNamesTooLong)
		c.Message = fmt.Sprintf("%s, without names in DNS of %d things: %s; shorten what they are made of",
			c.Message, len(unnamed), strings.Join(unnamed[:min(few, len(unnamed))], ", "))
	}
	if len(refused) > 0 {
		var examples []string
		for _, err := range refused[:min(few, len(refused))] {
			examples = append(examples, err.Error())
		}
		c.Reason = string(ReasonEndpointsRefused)
		c.Message = fmt.Sprintf("%s, without %d endpoints that other clusters would not believe: %s; register their addresses by isthmusctl member set",
			c.Message, len(refused), strings.Join(examples, ", "))
	}
	return c
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
