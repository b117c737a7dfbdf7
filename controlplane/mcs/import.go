package mcs

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// ServiceImport returns imp as an object in imp's namespace, with its status. Conditions have no time; their writer sets it
// when they change.
func ServiceImport(imp clusterset.Import) *v1beta1.ServiceImport {
	si := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   imp.Service.Namespace,
			Name:        imp.Service.Name,
			Labels:      map[string]string{},
			Annotations: maps.Clone(imp.Annotations),
		},
		Spec: formatSpec(properties{
			typ: imp.Type, ips: imp.IPs, families: imp.Families, ports: imp.Ports,
			sessionAffinity: imp.SessionAffinity, internalTrafficPolicy: imp.InternalTrafficPolicy,
			trafficDistribution: imp.TrafficDistribution,
		}),
	}
	if imp.UseIP == clusterset.Disabled {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, imp.UseIP.String())
	}
	maps.Copy(si.Labels, imp.Labels)
	si.Labels[v1alpha1.LabelManagedBy] = v1alpha1.ManagedBy
	si.Status.EndpointSliceObjects = v1beta1.EndpointSliceObjectsPresent
	for _, c := range imp.Clusters {
		si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(c)})
	}
	si.Status.Conditions = []metav1.Condition{importReady(imp)}
	return si
}

// importReady returns the condition Ready of an import.
func importReady(imp clusterset.Import) metav1.Condition {
	c := metav1.Condition{
		Type:    string(v1beta1.ServiceImportConditionReady),
		Status:  metav1.ConditionTrue,
		Reason:  string(v1beta1.ServiceImportReasonReady),
		Message: "the service can be used",
	}
	switch {
	case imp.Type != clusterset.ClusterSetIP || len(imp.IPs) > 0:
	case imp.UseIP == clusterset.Disabled:
		c.Message = "the service can be used by name; its exporters declined a ClusterSetIP"
	default:
		c.Status = metav1.ConditionFalse
		c.Reason = string(v1beta1.ServiceImportReasonPending)
		c.Message = "no exporting cluster has allocated a ClusterSetIP yet"
	}
	return c
}

// ReasonAddressInUse is the reason of the condition Ready of an import whose ClusterSetIP an older import has.
const ReasonAddressInUse = "AddressInUse"

// AddressInUse returns the condition Ready of such an import.
func AddressInUse(other clusterset.ServiceName) metav1.Condition {
	return metav1.Condition{
		Type: string(v1beta1.ServiceImportConditionReady), Status: metav1.ConditionFalse, Reason: ReasonAddressInUse,
		Message: fmt.Sprintf("service %s already has the ClusterSetIP that was allocated; unexport one of the two in every cluster", other),
	}
}

// Import parses a ServiceImport of Isthmus or another implementation. Its error joins all faults and names the object and
// each field. Missing families are those of the IPs; ClientIP affinity without a timeout has the API's default. The result
// lacks the labels and annotations that Isthmus itself sets.
func Import(si *v1beta1.ServiceImport) (clusterset.Import, error) {
	p, err := parseSpec("spec", &si.Spec)
	errs := []error{err}
	errs = append(errs, uniquePorts("spec.ports", p.ports))
	var clusters []clusterset.ClusterID
	for i, c := range si.Status.Clusters {
		id := clusterset.ClusterID(c.Cluster)
		if err := id.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("status.clusters[%d]: %w", i, err))
		}
		clusters = append(clusters, id)
	}
	if err := errors.Join(errs...); err != nil {
		return clusterset.Import{}, fmt.Errorf("service import %s/%s: %w", si.Namespace, si.Name, err)
	}
	slices.Sort(clusters)
	imp := clusterset.Import{
		Service:  clusterset.ServiceName{Namespace: si.Namespace, Name: si.Name},
		Created:  si.CreationTimestamp.Time,
		Type:     p.typ,
		Families: p.families, Ports: p.ports,
		Clusters:        slices.Compact(clusters),
		SessionAffinity: p.sessionAffinity, InternalTrafficPolicy: p.internalTrafficPolicy,
		TrafficDistribution: p.trafficDistribution,
		Labels:              withoutKeys(si.Labels, v1alpha1.LabelManagedBy),
		Annotations:         withoutKeys(si.Annotations, v1alpha1.AnnotationUseClusterSetIP, v1alpha1.AnnotationAllocatedBy),
	}
	if p.typ == clusterset.ClusterSetIP {
		imp.IPs = p.ips
		if si.Annotations[v1alpha1.AnnotationUseClusterSetIP] == clusterset.Disabled.String() {
			imp.UseIP = clusterset.Disabled
		}
	}
	return imp, nil
}

// uniquePorts returns an error for two ports with the same name, or the same protocol and number: neither the dataplane nor
// DNS could distinguish them.
func uniquePorts(at string, ports []clusterset.Port) error {
	for i, p := range ports {
		for _, o := range ports[:i] {
			if o.Name == p.Name || o.Protocol == p.Protocol && o.Port == p.Port {
				return fmt.Errorf("%s[%d]: %s/%d %q repeats a name, or a protocol and port", at, i, p.Protocol, p.Port, p.Name)
			}
		}
	}
	return nil
}

// withoutKeys returns a copy of m without keys; nil if it is empty.
func withoutKeys(m map[string]string, keys ...string) map[string]string {
	c := maps.Clone(m)
	for _, k := range keys {
		delete(c, k)
	}
	if len(c) == 0 {
		return nil
	}
	return c
}
