package mcs

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Aggregate returns a as an object of the broker, without a namespace. It has no ports and policies, which each member merges
// from the records.
func Aggregate(a clusterset.Aggregate) *v1beta1.ServiceImport {
	p := properties{typ: a.Type, ips: a.IPs}
	for _, ip := range a.IPs {
		p.families = append(p.families, clusterset.FamilyOf(ip))
	}
	si := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{
			Name:   AggregateName(a.Service),
			Labels: serviceLabels(a.Service),
		},
		Spec: formatSpec(p),
	}
	if a.AllocatedBy != "" {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationAllocatedBy, string(a.AllocatedBy))
	}
	if a.ExtendedBy != "" {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationExtendedBy, string(a.ExtendedBy))
	}
	if a.UseIP != clusterset.Unknown {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, a.UseIP.String())
	}
	for _, c := range a.Clusters {
		si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(c)})
	}
	return si
}

// ParseAggregate is the inverse of Aggregate. It reads only the fields that Aggregate writes, and omits those that are not
// valid: any member may write the others, and an aggregate must not stop its exporters. The error names an object that is no
// aggregate.
func ParseAggregate(si *v1beta1.ServiceImport) (clusterset.Aggregate, []Omission, error) {
	name, ok := ServiceOf(si)
	if !ok || si.Name != AggregateName(name) {
		return clusterset.Aggregate{}, nil, fmt.Errorf("aggregate %s: the labels name service %s", si.Name, name)
	}
	var omitted omissions
	a := clusterset.Aggregate{Service: name}
	a.Type, _ = parseType(si.Spec.Type)
	var err error
	if a.IPs, err = parseAddrs(si.Spec.IPs); err != nil {
		omitted.add("spec.ips", "%v", err)
	}
	a.AllocatedBy = memberIn(si, v1alpha1.AnnotationAllocatedBy, &omitted)
	a.ExtendedBy = memberIn(si, v1alpha1.AnnotationExtendedBy, &omitted)
	switch si.Annotations[v1alpha1.AnnotationUseClusterSetIP] {
	case clusterset.Enabled.String():
		a.UseIP = clusterset.Enabled
	case clusterset.Disabled.String():
		a.UseIP = clusterset.Disabled
	}
	for _, c := range si.Status.Clusters[:min(len(si.Status.Clusters), maxClusters)] {
		if id := clusterset.ClusterID(c.Cluster); id.Validate() == nil {
			a.Clusters = append(a.Clusters, id)
		}
	}
	if n := len(si.Status.Clusters) - len(a.Clusters); n > 0 {
		omitted.add("status.clusters", "%d entries name no cluster, or are more than %d", n, maxClusters)
	}
	slices.Sort(a.Clusters)
	return a, omitted, nil
}

// memberIn returns the member that an annotation of an aggregate names, or "".
func memberIn(si *v1beta1.ServiceImport, key string, omitted *omissions) clusterset.ClusterID {
	text, ok := si.Annotations[key]
	id := clusterset.ClusterID(text)
	if ok && id.Validate() != nil {
		omitted.add("annotation "+key, "it names no cluster")
		return ""
	}
	return id
}
