// Package about contains the types of ClusterProperty of KEP-2149, which holds a cluster's id and ClusterSet. The kind has no
// Go module of its own. Its versions v1alpha1 and v1beta1 have the same fields; Isthmus reads and writes v1beta1.
//
// https://github.com/kubernetes/enhancements/tree/master/keps/sig-multicluster/2149-clusterid
//
// +kubebuilder:object:generate=true
// +kubebuilder:skip
package about

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The well-known properties. Both are immutable while the cluster is a member.
const (
	// ClusterID is the cluster's id.
	ClusterID = "cluster.clusterset.k8s.io"
	// ClusterSet is the id of the ClusterSet. It exists exactly while the cluster is a member.
	ClusterSet = "clusterset.k8s.io"
)

// GroupVersion is the group and version of ClusterProperty that Isthmus reads and writes.
var GroupVersion = schema.GroupVersion{Group: "about.k8s.io", Version: "v1beta1"}

// AddToScheme registers ClusterProperty with a scheme.
var AddToScheme = (&runtime.SchemeBuilder{addKinds}).AddToScheme

func addKinds(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &ClusterProperty{}, &ClusterPropertyList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// ClusterProperty is a property of a cluster, identified by its name.
//
// +kubebuilder:object:root=true
type ClusterProperty struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ClusterPropertySpec `json:"spec"`
}

// ClusterPropertySpec holds the value.
type ClusterPropertySpec struct {
	// Value has 1 to 128,000 characters.
	Value string `json:"value"`
}

// ClusterPropertyList is a list of ClusterProperties.
//
// +kubebuilder:object:root=true
type ClusterPropertyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ClusterProperty `json:"items"`
}
