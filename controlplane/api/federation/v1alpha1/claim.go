package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// ClusterClaim is one property of a cluster. Its object is named after spec.name in lower case, so a cluster has each
// property once.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.spec.name`
// +kubebuilder:printcolumn:name="Value",type=string,JSONPath=`.spec.value`
// +kubebuilder:printcolumn:name="In step",type=string,JSONPath=`.status.conditions[?(@.type=="InStep")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name == self.spec.name.lowerAscii()",message="metadata.name must be spec.name in lower case"
type ClusterClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ClusterClaimSpec   `json:"spec"`
	Status ClusterClaimStatus `json:"status,omitempty"`
}

// ClusterClaimSpec is the name and the value of a claim.
//
// +kubebuilder:validation:XValidation:rule="self.name == oldSelf.name",message="name cannot change; delete the claim and create another"
// +kubebuilder:validation:XValidation:rule="self.name != 'id.k8s.io' || self.value.size() <= 63 && self.value.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)?$')",message="value of id.k8s.io must be an RFC 1123 label, or two joined by a dot, of at most 63 characters"
// +kubebuilder:validation:XValidation:rule="self.name != 'clusterSet.k8s.io' || self.value.size() <= 63",message="value of clusterSet.k8s.io must have at most 63 characters"
// +kubebuilder:validation:XValidation:rule="self.name != 'supervisor.antreaplus.tanzu-vmware.com' || self.value in ['true', 'false']",message="value of supervisor.antreaplus.tanzu-vmware.com must be \"true\" or \"false\""
type ClusterClaimSpec struct {
	// Name is the name of the property: a DNS name such as id.k8s.io. It is case-sensitive.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// Value is the value of the property.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Value string `json:"value"`
}

// ConditionInStep on a ClusterClaim states whether the ClusterProperty with the same meaning has the same value.
const ConditionInStep = "InStep"

// ClusterClaimStatus is written by the cluster's controller.
type ClusterClaimStatus struct {
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ClusterClaimList is a list of ClusterClaims.
//
// +kubebuilder:object:root=true
type ClusterClaimList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ClusterClaim `json:"items"`
}
