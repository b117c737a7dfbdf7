package mcs

import (
	"errors"
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
	if a.UseIP != clusterset.Unknown {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, a.UseIP.String())
	}
	for _, c := range a.Clusters {
		si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(c)})
	}
	return si
}

// ParseAggregate is the inverse of Aggregate. The error names the object and the field.
func ParseAggregate(si *v1beta1.ServiceImport) (clusterset.Aggregate, error) {
	name, ok := ServiceOf(si)
	if !ok || si.Name != AggregateName(name) {
		return clusterset.Aggregate{}, fmt.Errorf("aggregate %s: the labels name service %s", si.Name, name)
	}
	p, err := parseSpec("spec", &si.Spec)
	errs := []error{err}
	a := clusterset.Aggregate{Service: name, Type: p.typ, IPs: p.ips}
	if by, ok := si.Annotations[v1alpha1.AnnotationAllocatedBy]; ok {
		a.AllocatedBy = clusterset.ClusterID(by)
		errs = append(errs, a.AllocatedBy.Validate())
	}
	switch si.Annotations[v1alpha1.AnnotationUseClusterSetIP] {
	case clusterset.Enabled.String():
		a.UseIP = clusterset.Enabled
	case clusterset.Disabled.String():
		a.UseIP = clusterset.Disabled
	}
	for i, c := range si.Status.Clusters {
		id := clusterset.ClusterID(c.Cluster)
		if err := id.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("status.clusters[%d]: %w", i, err))
		}
		a.Clusters = append(a.Clusters, id)
	}
	if err := errors.Join(errs...); err != nil {
		return clusterset.Aggregate{}, fmt.Errorf("aggregate %s: %w", si.Name, err)
	}
	slices.Sort(a.Clusters)
	return a, nil
}
