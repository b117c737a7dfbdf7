package mcs

import (
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Reasons without a constant in the MCS API.
const (
	// ReasonClusterSetIPEnablementConflict is a reason of the condition Conflict, as in Submariner Lighthouse.
	ReasonClusterSetIPEnablementConflict v1beta1.ServiceExportConditionReason = "ClusterSetIPEnablementConflict"
	// ReasonRestrictedNamespace is a reason of the condition Valid.
	ReasonRestrictedNamespace v1beta1.ServiceExportConditionReason = "RestrictedNamespace"
	// ReasonTooManyPorts is a reason of the condition Valid.
	ReasonTooManyPorts v1beta1.ServiceExportConditionReason = "TooManyPorts"
	// ReasonMetadataRefused is a reason of the condition Ready with status True: the Service is exported without some of its
	// labels and annotations.
	ReasonMetadataRefused v1beta1.ServiceExportConditionReason = "MetadataRefused"
	// ReasonEndpointsRefused is a reason of the condition Ready with status True: the Service is exported without some of its
	// endpoints.
	ReasonEndpointsRefused v1beta1.ServiceExportConditionReason = "EndpointsRefused"
	// ReasonValueIgnored is a reason of the condition Ready with status True: the Service is exported, and a value that somebody
	// set has no effect.
	ReasonValueIgnored v1beta1.ServiceExportConditionReason = "ValueIgnored"
	// ReasonFamilyNotServed is a reason of the condition Ready with status True: the Service is exported, and its ClusterSetIP has
	// no address of one of its families.
	ReasonFamilyNotServed v1beta1.ServiceExportConditionReason = "FamilyNotServed"
	// ReasonNoLocalEndpoints is a reason of the condition Ready with status True: the Service is exported, and its
	// internalTrafficPolicy keeps every client from its endpoints.
	ReasonNoLocalEndpoints v1beta1.ServiceExportConditionReason = "NoLocalEndpoints"
	// ReasonNamesTooLong is a reason of the condition Ready with status True: the Service is exported, but some of its DNS
	// names would be too long.
	ReasonNamesTooLong v1beta1.ServiceExportConditionReason = "NamesTooLong"
	// ReasonQuotaExceeded is a reason of the condition Ready. With status False the export waits because the cluster has used
	// up a quota of the ClusterSet; with status True only some of its EndpointSlices wait.
	ReasonQuotaExceeded v1beta1.ServiceExportConditionReason = "QuotaExceeded"
	// ReasonServiceCIDRsOverlap is a reason of the condition Ready with status True: the Service is exported by its own address,
	// which some clusters cannot use.
	ReasonServiceCIDRsOverlap v1beta1.ServiceExportConditionReason = "ServiceCIDRsOverlap"
	// ReasonExcluded is a reason of the condition Ready with status False: the type of the Service differs from that of the
	// import, and the policy excludes such exporters.
	ReasonExcluded v1beta1.ServiceExportConditionReason = "TypeExcluded"
)

// conflictReasons maps conflicts to the reasons of the MCS API.
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

// The conditions below have no time; their writer sets it when they change. Equal situations give equal messages, so
// conditions do not flap.

// Valid returns the condition Valid of a ServiceExport whose Service can be exported.
func Valid() metav1.Condition {
	return exportCondition(v1beta1.ServiceExportConditionValid, metav1.ConditionTrue,
		v1beta1.ServiceExportReasonValid, "the service can be exported")
}

// Invalid returns the condition Valid of a ServiceExport whose Service cannot be exported.
func Invalid(err *InvalidError) metav1.Condition {
	return exportCondition(v1beta1.ServiceExportConditionValid, metav1.ConditionFalse, err.Reason, err.Message)
}

// Exported returns the condition Ready of an exported Service, with its ClusterSetIPs; none if it is headless.
func Exported(ips []netip.Addr) metav1.Condition {
	message := "exported to the clusterset"
	if len(ips) > 0 {
		message += " as " + strings.Join(formatAddrs(ips), " and ")
	}
	return exportCondition(v1beta1.ServiceExportConditionReady, metav1.ConditionTrue,
		v1beta1.ServiceExportReasonExported, message)
}

// few is how many items a message names.
const few = 3

// Shortcomings are the parts of a Service that other clusters do not get.
type Shortcomings struct {
	Ignored []Omission // the result of [Ignored]
	Omitted []Omission // labels and annotations
	Unnamed []string   // the result of [Unnamed]
	Refused []error    // one for each endpoint that other clusters would ignore
	Overlap []Overlap
	// Unserved are the families of the Service of which its ClusterSetIP has no address, Extender the cluster that could add one;
	// "" if no exporter could.
	Unserved []clusterset.Family
	Extender clusterset.ClusterID
	NotLocal bool  // the import has the policy Local, and its endpoints are the addresses of Services
	Waiting  int   // EndpointSlices that wait for a quota
	Quota    error // the reason for Waiting
}

// Overlap is an address of a Service that some clusters ignore because their own Services have such addresses.
type Overlap struct {
	Address  netip.Addr
	Clusters []clusterset.ClusterID
}

// String returns the address and the clusters.
func (o Overlap) String() string {
	var ids []string
	for _, id := range o.Clusters[:min(few, len(o.Clusters))] {
		ids = append(ids, string(id))
	}
	text := fmt.Sprintf("%s lies in the service CIDRs of %s", o.Address, strings.Join(ids, ", "))
	if n := len(o.Clusters) - len(ids); n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// ExportedWithout is Exported for a Service with shortcomings. The reason is that of the worst one.
func ExportedWithout(ips []netip.Addr, s Shortcomings) metav1.Condition {
	c := Exported(ips)
	if len(s.Ignored) > 0 {
		c.Reason = string(ReasonValueIgnored)
		c.Message = fmt.Sprintf("%s, ignoring %s", c.Message, examples(s.Ignored))
	}
	if len(s.Omitted) > 0 {
		c.Reason = string(ReasonMetadataRefused)
		c.Message = fmt.Sprintf("%s, without %d labels or annotations that no import can have: %s", c.Message, len(s.Omitted), examples(s.Omitted))
	}
	if len(s.Unnamed) > 0 {
		c.Reason = string(ReasonNamesTooLong)
		c.Message = fmt.Sprintf("%s, without %d DNS names that are too long: %s; shorten the parts of these names",
			c.Message, len(s.Unnamed), strings.Join(s.Unnamed[:min(few, len(s.Unnamed))], ", "))
	}
	if len(s.Unserved) > 0 {
		c.Reason = string(ReasonFamilyNotServed)
		because := "no exporting cluster has a block of that family; give one to any of them"
		if s.Extender != "" {
			because = fmt.Sprintf("cluster %s allocates the addresses of that family and has added none; the oldest export needs the family, and the block of %[1]s a free address", s.Extender)
		}
		c.Message = fmt.Sprintf("%s, not by %v: %s", c.Message, s.Unserved, because)
	}
	if len(s.Overlap) > 0 {
		var texts []string
		for _, o := range s.Overlap {
			texts = append(texts, o.String())
		}
		c.Reason = string(ReasonServiceCIDRsOverlap)
		c.Message = fmt.Sprintf("%s, but not to every cluster: %s; export the service with a ClusterSetIP and its pods, or give the clusters distinct service CIDRs",
			c.Message, strings.Join(texts, ", "))
	}
	if s.NotLocal {
		c.Reason = string(ReasonNoLocalEndpoints)
		c.Message += ", and no client can use it: internalTrafficPolicy Local asks for endpoints on the client's node, and the exported address of the service is on none; use Cluster, or export the pods"
	}
	if len(s.Refused) > 0 {
		c.Reason = string(ReasonEndpointsRefused)
		c.Message = fmt.Sprintf("%s, without %d endpoints that other clusters would ignore: %s; register their addresses with isthmusctl member set",
			c.Message, len(s.Refused), examples(s.Refused))
	}
	if s.Waiting > 0 {
		c.Reason = string(ReasonQuotaExceeded)
		c.Message = fmt.Sprintf("%s, without %d EndpointSlices that wait: %s", c.Message, s.Waiting, s.Quota)
	}
	return c
}

// examples returns the first errors in one line.
func examples[E error](errs []E) string {
	var texts []string
	for _, err := range errs[:min(few, len(errs))] {
		texts = append(texts, err.Error())
	}
	return strings.Join(texts, ", ")
}

// NotReady returns the condition Ready of a ServiceExport that is Pending (it needs no action) or Failed (it needs one).
func NotReady(reason v1beta1.ServiceExportConditionReason, message string) metav1.Condition {
	return exportCondition(v1beta1.ServiceExportConditionReady, metav1.ConditionFalse, reason, message)
}

// Conflicts returns the condition Conflict: True with one reason and one line per conflict, or False.
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
