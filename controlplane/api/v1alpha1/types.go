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
	// ClusterSetIPClusterSize is how many addresses the IPv4 block of a member has that asks for none: a power
	// of two, 0 means 65536. An IPv6 block is a /64. No block is larger than half of its range.
	// +kubebuilder:validation:Minimum=0
	ClusterSetIPClusterSize int64 `json:"clustersetIPClusterSize,omitempty"`
	// Members lists the blocks of all members, the same as in their registrations. Admission policies check
	// ClusterSetIPs against it, because it is one object: who is not in it has no block.
	// +listType=map
	// +listMapKey=clusterID
	Members []MemberBlocks `json:"members,omitempty"`
	// Settings are what new members start with.
	Settings `json:",inline"`
}

// MemberBlocks says which ClusterSetIPs one member may allocate.
type MemberBlocks struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// +kubebuilder:validation:MaxItems=2
	ClusterSetIPCIDR []string `json:"clustersetIPCIDR,omitempty"`
}

// Settings are the choices that all members of a ClusterSet should make alike. An empty one is the
// profile's, and an empty profile is kep. Each is also a flag of isthmus-controller, which overrules it.
type Settings struct {
	// Profile is kep (KEP-1645 of today) or lighthouse (the behaviour of Submariner Lighthouse).
	// +kubebuilder:validation:Enum="";kep;lighthouse
	Profile string `json:"profile,omitempty"`
	// PortMerge says which ports an import has: the union of what its exporters have, or the intersection.
	// +kubebuilder:validation:Enum="";union;intersection
	PortMerge string `json:"portMerge,omitempty"`
	// TypeConflict says what becomes of an exporter whose type is not the import's: merge keeps its
	// endpoints, exclude leaves it out.
	// +kubebuilder:validation:Enum="";merge;exclude
	TypeConflict string `json:"typeConflict,omitempty"`
	// Endpoints says what stands in the EndpointSlices that this member exports: pods, or service-vip, the
	// Service's own address, for networks where pods of other clusters cannot be reached. An import without a
	// ClusterSetIP by choice always has the latter.
	// +kubebuilder:validation:Enum="";pods;service-vip
	Endpoints string `json:"endpoints,omitempty"`
	// ConflictPrecedence says which export is the oldest: by export-time, never before the member joined, or
	// by broker-time, when the broker first saw it.
	// +kubebuilder:validation:Enum="";export-time;broker-time
	ConflictPrecedence string `json:"conflictPrecedence,omitempty"`
}

// The values of Settings.
const (
	ProfileKEP        = "kep"
	ProfileLighthouse = "lighthouse"

	PortMergeUnion        = "union"
	PortMergeIntersection = "intersection"

	TypeConflictMerge   = "merge"
	TypeConflictExclude = "exclude"

	EndpointsPods       = "pods"
	EndpointsServiceVIP = "service-vip"

	PrecedenceExportTime = "export-time"
	PrecedenceBrokerTime = "broker-time"
)

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
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="ClusterSetIPs",type=string,JSONPath=`.spec.clustersetIPCIDR`
// +kubebuilder:printcolumn:name="Pods",type=string,JSONPath=`.spec.podCIDRs`
// +kubebuilder:printcolumn:name="Left",type=date,JSONPath=`.spec.leftAt`
// +kubebuilder:printcolumn:name="Joined",type=date,JSONPath=`.spec.joinTime`
type Member struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec MemberSpec `json:"spec"`
	// Status is how the ClusterSet looks from the member, on the copy in its own cluster only.
	Status MemberStatus `json:"status,omitzero"`
}

// MemberStatus is what a member's controller has to tell its people.
type MemberStatus struct {
	// Conditions: WithdrawalsHeld is True while other members seem to have withdrawn so much at once that it
	// is not believed; isthmusctl release-hold believes it. NamesResolve is False while the cluster's DNS does not
	// answer pods for clusterset.local; isthmusctl dns status says why.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// ClusterSetIPCIDRRange lists the ranges of the ClusterSetIPs of all members, as the broker said last. Nodes
	// refuse what nobody serves in them.
	// +listType=atomic
	ClusterSetIPCIDRRange []string `json:"clustersetIPCIDRRange,omitempty"`
}

// The conditions of a Member and their reasons.
const (
	ConditionWithdrawalsHeld = "WithdrawalsHeld"
	ReasonMassWithdrawal     = "MassWithdrawal"
	ReasonNothingHeld        = "NothingHeld"

	ConditionNamesResolve  = "NamesResolve"
	ReasonNamesAnswered    = "NamesAnswered"
	ReasonNamesNotAnswered = "NamesNotAnswered"
)

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
	// ExtraCIDRs are further addresses where its endpoints may be, such as those of virtual machines.
	ExtraCIDRs []string `json:"extraCIDRs,omitempty"`
	// JoinTime is when the member joined; no export of it counts as older.
	JoinTime metav1.Time `json:"joinTime"`
	// LeftAt is when the member left. The object then stays for a while as a tombstone: it tells the others
	// that what they have of the member may go, at once and for good.
	LeftAt *metav1.Time `json:"leftAt,omitempty"`
	// Settings are the ClusterSet's, as of the last join or member set.
	Settings `json:",inline"`
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
// +kubebuilder:printcolumn:name="Withdrawn",type=date,JSONPath=`.spec.withdrawnAt`
// +kubebuilder:printcolumn:name="Exported",type=date,JSONPath=`.spec.exportedAt`
type ExportRecord struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ExportRecordSpec `json:"spec"`
}

// ExportRecordSpec is clusterset.Export in the words of the MCS API.
type ExportRecordSpec struct {
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// WithdrawnAt says that the member no longer exports the Service. The record is a tombstone then: the
	// others may forget at once what they had of it, and its addresses are given to nobody for a while.
	WithdrawnAt *metav1.Time `json:"withdrawnAt,omitempty"`
	// ExportedAt is when the ServiceExport was created; the oldest takes precedence.
	ExportedAt metav1.Time `json:"exportedAt"`
	// IPs is the ClusterSetIP the member has seen for the Service.
	// +kubebuilder:validation:MaxItems=2
	IPs []string `json:"ips,omitempty"`
	// UseClusterSetIP is what the ServiceExport's annotation, or else the member's default, asks for. A record
	// of a version before it was known has none.
	UseClusterSetIP *bool `json:"useClusterSetIP,omitempty"`
	// AgreedClusterSetIP is what the aggregate said when the member last saw it, remembered like the IPs.
	AgreedClusterSetIP *bool `json:"agreedClusterSetIP,omitempty"`
	// Import is what the import would be, were this member the only exporter.
	Import mcsv1beta1.ServiceImportSpec `json:"import"`
	// ExportedLabels and ExportedAnnotations are those of the ServiceExport.
	ExportedLabels      map[string]string `json:"exportedLabels,omitempty"`
	ExportedAnnotations map[string]string `json:"exportedAnnotations,omitempty"`
	// ServiceLabels are the Service's own, those of Kubernetes apart. The imported EndpointSlices carry them.
	ServiceLabels map[string]string `json:"serviceLabels,omitempty"`
}

// ExportRecordList is a list of ExportRecords.
//
// +kubebuilder:object:root=true
type ExportRecordList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ExportRecord `json:"items"`
}

// NodeReport is what the packets of one node of a member say about all members. Its name is the node's; the node's
// agent writes it, when that changes and at no other time, and it goes with the Node. The controller reads it as
// evidence about members that do not renew their Lease.
//
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Silent",type=string,JSONPath=`.spec.silent`
// +kubebuilder:printcolumn:name="Answering",type=string,JSONPath=`.spec.answering`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NodeReport struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec NodeReportSpec `json:"spec"`
}

// NodeReportSpec lists members by their ids. Of one that is in neither list nothing is known there: no packet came
// from it lately, and none was waited for in vain.
type NodeReportSpec struct {
	// Silent are the members whose packets die: the node gives them no new clients.
	// +listType=set
	Silent []string `json:"silent,omitempty"`
	// Answering are those from which something came lately.
	// +listType=set
	Answering []string `json:"answering,omitempty"`
}

// NodeReportList is a list of NodeReports.
//
// +kubebuilder:object:root=true
type NodeReportList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeReport `json:"items"`
}
