package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// ClusterSetConfigName is the name of the broker's only ClusterSetConfig.
const ClusterSetConfigName = "clusterset"

// ClusterSetConfig is what all members share. deploy-broker writes it, members read it.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=csc
// +kubebuilder:printcolumn:name="ClusterSet",type=string,JSONPath=`.spec.clusterSetID`
// +kubebuilder:printcolumn:name="Ranges",type=string,JSONPath=`.spec.clustersetIPCIDRRange`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ClusterSetConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ClusterSetConfigSpec `json:"spec"`
}

// ClusterSetConfigSpec names the ClusterSet and the ranges its ClusterSetIPs come from.
type ClusterSetConfigSpec struct {
	// ClusterSetID names the ClusterSet.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterSetID string `json:"clusterSetID"`
	// ClusterSetIPEnabled says whether Services get a ClusterSetIP without asking for it.
	ClusterSetIPEnabled bool `json:"clustersetIPEnabled"`
	// ClusterSetIPCIDRRange lists the ranges of all ClusterSetIPs, at most one a family.
	// +kubebuilder:validation:MaxItems=2
	ClusterSetIPCIDRRange []string `json:"clustersetIPCIDRRange,omitempty"`
}

// ClusterSetConfigList is a list of ClusterSetConfigs.
//
// +kubebuilder:object:root=true
type ClusterSetConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ClusterSetConfig `json:"items"`
}

// Member is the registration of one cluster. Its name is the cluster's id. join writes it with the
// administrator's credentials, on the broker and, the same, in the member; the member may only read it.
//
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="ClusterSetIPs",type=string,JSONPath=`.spec.clustersetIPCIDR`
// +kubebuilder:printcolumn:name="Pods",type=string,JSONPath=`.spec.podCIDRs`
// +kubebuilder:printcolumn:name="Joined",type=date,JSONPath=`.spec.joinTime`
type Member struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec MemberSpec `json:"spec"`
}

// MemberSpec says which addresses belong to a member. Nobody believes an address of it outside of them.
type MemberSpec struct {
	// ClusterID is the member's id, an RFC 1123 label or two joined by a dot.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// ClusterSetID names the ClusterSet the member is part of.
	ClusterSetID string `json:"clusterSetID"`
	// ClusterSetIPEnabled says whether Services exported here get a ClusterSetIP without asking for it.
	ClusterSetIPEnabled bool `json:"clustersetIPEnabled"`
	// ClusterSetIPCIDR lists the blocks the member allocates ClusterSetIPs from, at most one a family.
	// +kubebuilder:validation:MaxItems=2
	ClusterSetIPCIDR []string `json:"clustersetIPCIDR,omitempty"`
	// PodCIDRs, NodeCIDRs and ServiceCIDRs are where the member's endpoints may be.
	PodCIDRs     []string `json:"podCIDRs,omitempty"`
	NodeCIDRs    []string `json:"nodeCIDRs,omitempty"`
	ServiceCIDRs []string `json:"serviceCIDRs,omitempty"`
	// JoinTime is when the member joined; no export of it counts as older.
	JoinTime metav1.Time `json:"joinTime"`
}

// MemberList is a list of Members.
//
// +kubebuilder:object:root=true
type MemberList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Member `json:"items"`
}

// ExportRecord is what one member says about one Service it exports. It lives on the broker, is named
// <member>.<service>.<namespace> and is written by that member only.
//
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.clusterID`
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.namespace`
// +kubebuilder:printcolumn:name="Service",type=string,JSONPath=`.spec.name`
// +kubebuilder:printcolumn:name="Type",type=string,JSONPath=`.spec.import.type`
// +kubebuilder:printcolumn:name="IPs",type=string,JSONPath=`.spec.ips`
// +kubebuilder:printcolumn:name="Exported",type=date,JSONPath=`.spec.exportedAt`
type ExportRecord struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ExportRecordSpec `json:"spec"`
}

// ExportRecordSpec is clusterset.Export in the words of the MCS API.
type ExportRecordSpec struct {
	ClusterID string `json:"clusterID"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// ExportedAt is when the ServiceExport was created; the oldest takes precedence.
	ExportedAt metav1.Time `json:"exportedAt"`
	// IPs is the ClusterSetIP the member has seen for the Service.
	IPs []string `json:"ips,omitempty"`
	// Import is what the import would be, were this member the only exporter.
	Import mcsv1beta1.ServiceImportSpec `json:"import"`
	// ExportedLabels and ExportedAnnotations are those of the ServiceExport.
	ExportedLabels      map[string]string `json:"exportedLabels,omitempty"`
	ExportedAnnotations map[string]string `json:"exportedAnnotations,omitempty"`
}

// ExportRecordList is a list of ExportRecords.
//
// +kubebuilder:object:root=true
type ExportRecordList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ExportRecord `json:"items"`
}
