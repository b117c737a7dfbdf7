package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// ClusterSetConfigName is the name of the broker's only ClusterSetConfig.
const ClusterSetConfigName = "clusterset"

// ClusterSetConfig is the configuration that all members share. isthmusctl deploy-broker writes it, and members read it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=csc
// +kubebuilder:printcolumn:name="ClusterSet",type=string,JSONPath=`.spec.clusterSetID`
// +kubebuilder:printcolumn:name="Ranges",type=string,JSONPath=`.spec.clustersetIPCIDRRange`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type ClusterSetConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ClusterSetConfigSpec `json:"spec"`
	// Status is what the broker's quota controller writes. Without that controller it stays empty.
	Status ClusterSetConfigStatus `json:"status,omitempty"`
}

// ClusterSetConfigStatus tells which members have more on the broker than their quotas.
type ClusterSetConfigStatus struct {
	// OverQuota lists each quota that a member exceeds on the broker, sorted by member and kind. Admission policies refuse new
	// objects of that kind by that member; its updates and deletions go on.
	// +kubebuilder:validation:MaxItems=1000
	// +listType=map
	// +listMapKey=member
	// +listMapKey=kind
	OverQuota []OverQuota `json:"overQuota,omitempty"`
}

// OverQuota is a quota that a member exceeds on the broker.
type OverQuota struct {
	// Member is the id of the member.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Member string `json:"member"`
	// Kind is a field of spec.quotas. Of tombstones, and of aggregates beside which no record stands, a member may have as many
	// as services.
	// +kubebuilder:validation:Enum=services;ports;slices;endpoints;metadataBytes;storageBytes;tombstones;aggregates
	Kind string `json:"kind"`
	// Used is what the member has on the broker.
	Used int64 `json:"used"`
	// Limit is what it may have.
	Limit int64 `json:"limit"`
	// Since is the time at which the quota controller saw the member beyond the limit.
	Since metav1.Time `json:"since"`
}

// ClusterSetConfigSpec defines the ClusterSet and the ranges of its ClusterSetIPs.
type ClusterSetConfigSpec struct {
	// ClusterSetID names the ClusterSet.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterSetID string `json:"clusterSetID"`
	// ClusterSetIPEnabled gives exported Services a ClusterSetIP by default.
	ClusterSetIPEnabled bool `json:"clustersetIPEnabled"`
	// ClusterSetIPCIDRRange lists the ranges of all ClusterSetIPs, at most one per family.
	// +kubebuilder:validation:MaxItems=2
	ClusterSetIPCIDRRange []string `json:"clustersetIPCIDRRange,omitempty"`
	// ClusterSetIPClusterSize is the default number of addresses of a member's IPv4 block: a power of two, 0 means 65536. An
	// IPv6 block is a /64. No block is larger than half of its range.
	// +kubebuilder:validation:Minimum=0
	ClusterSetIPClusterSize int64 `json:"clustersetIPClusterSize,omitempty"`
	// Members lists the blocks of all members, as in their registrations. Admission policies check ClusterSetIPs against this
	// list; a cluster that is not in it has no block.
	// +listType=map
	// +listMapKey=clusterID
	Members []MemberBlocks `json:"members,omitempty"`
	// AdmitUpTo is how many clusters the account isthmus-join fills Members up to; without it, it adds none. Others may add more.
	// +kubebuilder:validation:Minimum=0
	AdmitUpTo int64 `json:"admitUpTo,omitempty"`
	// CredentialLifetimeSeconds bounds the lifetime of a member's token, which its controller renews when half of it has passed.
	// Without it a token lives for 7 days. The API server may grant less.
	// +kubebuilder:validation:Minimum=600
	// +kubebuilder:validation:Maximum=31536000
	CredentialLifetimeSeconds int64 `json:"credentialLifetimeSeconds,omitempty"`
	// Quotas bound what the other members import from each member. Without it every limit has its default.
	Quotas *Quotas `json:"quotas,omitempty"`
	// Settings are the initial settings of new members.
	Settings `json:",inline"`
}

// Quotas are limits for each member. Beyond a limit the youngest objects of that member wait, by the time of their creation on
// the broker; its older ones, and those of other members, are imported as before. A waiting object is imported when others go
// or when the limit is raised.
type Quotas struct {
	// Services bounds the exported Services of a member.
	// +kubebuilder:default=10000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	Services int64 `json:"services,omitempty"`
	// Ports bounds the ports of all exported Services of a member together. A node has room for 65,536 ports of all members.
	// +kubebuilder:default=20000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65536
	Ports int64 `json:"ports,omitempty"`
	// PortsPerService bounds the ports of one exported Service.
	// +kubebuilder:default=1000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	PortsPerService int64 `json:"portsPerService,omitempty"`
	// Slices bounds the EndpointSlices of a member.
	// +kubebuilder:default=20000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	Slices int64 `json:"slices,omitempty"`
	// Endpoints bounds the endpoints of a member.
	// +kubebuilder:default=200000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=2000000
	Endpoints int64 `json:"endpoints,omitempty"`
	// MetadataBytes bounds the labels and annotations of a member's imports, and the labels, ports, regions and hints of its
	// imported EndpointSlices, in bytes. The labels of a Service count once for each of its slices.
	// +kubebuilder:default=33554432
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=536870912
	MetadataBytes int64 `json:"metadataBytes,omitempty"`
	// StorageBytes bounds the size of all objects of a member on the broker together, with tombstones, invalid objects and managed
	// fields. Only the broker's quota controller counts it.
	// +kubebuilder:default=268435456
	// +kubebuilder:validation:Minimum=65536
	// +kubebuilder:validation:Maximum=4294967296
	StorageBytes int64 `json:"storageBytes,omitempty"`
	// ChangesPerMinute bounds how many changes of a member's records and EndpointSlices the others handle in a minute; as many may
	// come at once. Beyond that its changes wait.
	// +kubebuilder:default=20000
	// +kubebuilder:validation:Minimum=60
	// +kubebuilder:validation:Maximum=1000000
	ChangesPerMinute int64 `json:"changesPerMinute,omitempty"`
}

// MemberBlocks are the blocks from which one member allocates ClusterSetIPs.
type MemberBlocks struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// +kubebuilder:validation:MaxItems=2
	ClusterSetIPCIDR []string `json:"clustersetIPCIDR,omitempty"`
	// Credential names the Secret on the broker to which the member's tokens are bound: they end when it is deleted. Admission
	// policies refuse tokens of the member that are bound to anything else.
	// +kubebuilder:validation:MaxLength=253
	Credential string `json:"credential,omitempty"`
}

// Settings should be the same in all members of a ClusterSet. An empty setting has the default of the profile, and an empty
// profile is kep. Each is also a flag of isthmus-controller, which overrides it.
type Settings struct {
	// Profile is kep (the current KEP-1645) or lighthouse (the behaviour of Submariner Lighthouse).
	// +kubebuilder:validation:Enum="";kep;lighthouse
	Profile string `json:"profile,omitempty"`
	// PortMerge selects the ports of an import: the union or the intersection of its exporters' ports.
	// +kubebuilder:validation:Enum="";union;intersection
	PortMerge string `json:"portMerge,omitempty"`
	// TypeConflict selects how an exporter whose type differs from the import's is treated: merge keeps its endpoints, exclude
	// drops them.
	// +kubebuilder:validation:Enum="";merge;exclude
	TypeConflict string `json:"typeConflict,omitempty"`
	// Endpoints selects the endpoints that this member exports: pods, or service-vip, the Service's own address, for networks
	// where other clusters cannot reach pods. A Service that declines a ClusterSetIP always exports the latter.
	// +kubebuilder:validation:Enum="";pods;service-vip
	Endpoints string `json:"endpoints,omitempty"`
	// ConflictPrecedence selects how the oldest export is determined: by export-time, never before the member joined, or by
	// broker-time, when the broker first saw it.
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

// Member is the registration of one cluster. Its name is the cluster's id. isthmusctl join writes it on the broker, and a copy
// in the member, with the administrator's credentials; the member may only read it.
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
	// Status is the member's view of the ClusterSet, on the copy in its own cluster only.
	Status MemberStatus `json:"status,omitzero"`
}

// MemberStatus is the report of a member's controller.
type MemberStatus struct {
	// Conditions: WithdrawalsHeld is True while many exports of another member vanished together without being withdrawn, so
	// that their imports are kept; isthmusctl release-hold removes them. NamesResolve is False while the cluster's DNS does
	// not answer pods for clusterset.local; isthmusctl dns status shows the cause. PodsRegistered is False while nodes have pod
	// CIDRs outside of the registration, whose pods the other members ignore; isthmusctl member set registers them.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// ClusterSetIPCIDRRange lists the ranges of the ClusterSetIPs of all members, as last read from the broker. Nodes refuse
	// connections to addresses in these ranges that belong to no Service.
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

	ConditionPodsRegistered = "PodsRegistered"
	ReasonPodsInside        = "PodsInside"
	ReasonPodsExtended      = "PodsExtended"
	ReasonPodsOutside       = "PodsOutside"

	ConditionCredentialValid    = "CredentialValid"
	ReasonCredentialRenewed     = "CredentialRenewed"
	ReasonCredentialNotRenewed  = "CredentialNotRenewed"
	ReasonCredentialEnded       = "CredentialEnded"
	ReasonCredentialWithoutTerm = "CredentialWithoutTerm"
)

// MemberSpec defines the addresses of a member. Other members ignore its endpoints outside of them.
type MemberSpec struct {
	// ClusterID is the member's id, an RFC 1123 label or two joined by a dot.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// ClusterSetID names the member's ClusterSet.
	ClusterSetID string `json:"clusterSetID"`
	// ClusterSetIPEnabled gives Services that this member exports a ClusterSetIP by default.
	ClusterSetIPEnabled bool `json:"clustersetIPEnabled"`
	// ClusterSetIPCIDR lists the blocks from which the member allocates ClusterSetIPs, at most one per family.
	// +kubebuilder:validation:MaxItems=2
	ClusterSetIPCIDR []string `json:"clustersetIPCIDR,omitempty"`
	// PodCIDRs, NodeCIDRs and ServiceCIDRs are the CIDRs of the member's endpoints.
	PodCIDRs     []string `json:"podCIDRs,omitempty"`
	NodeCIDRs    []string `json:"nodeCIDRs,omitempty"`
	ServiceCIDRs []string `json:"serviceCIDRs,omitempty"`
	// ExtraCIDRs are further CIDRs of its endpoints, such as those of virtual machines.
	ExtraCIDRs []string `json:"extraCIDRs,omitempty"`
	// PodSupernets are CIDRs of this member alone, inside of which its controller adds the pod CIDRs of new nodes.
	// +kubebuilder:validation:MaxItems=16
	PodSupernets []string `json:"podSupernets,omitempty"`
	// JoinTime is when the member joined; its exports never count as older.
	JoinTime metav1.Time `json:"joinTime"`
	// LeftAt is when the member left. The object then stays for a while as a tombstone, on which the other members delete
	// their imports of the member at once.
	LeftAt *metav1.Time `json:"leftAt,omitempty"`
	// Settings are those of the ClusterSet at the last join or member set.
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

// ExportRecord describes one Service that a member exports. It is on the broker, is named <member>.<service>.<namespace>, and
// only that member writes it.
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

// ExportRecordSpec is the export of a Service in terms of the MCS API.
type ExportRecordSpec struct {
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	ClusterID string `json:"clusterID"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
	// WithdrawnAt is when the member stopped exporting the Service. The record is then a tombstone, on which the other members
	// delete their imports at once; its addresses are not allocated again for a while.
	WithdrawnAt *metav1.Time `json:"withdrawnAt,omitempty"`
	// ExportedAt is when the ServiceExport was created; the oldest takes precedence.
	ExportedAt metav1.Time `json:"exportedAt"`
	// IPs is the ClusterSetIP that the member has seen for the Service.
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=45
	IPs []string `json:"ips,omitempty"`
	// UseClusterSetIP is the choice of the ServiceExport's annotation, or else the member's default. Records of older versions
	// have none.
	UseClusterSetIP *bool `json:"useClusterSetIP,omitempty"`
	// AgreedClusterSetIP is the agreed choice of the aggregate when the member last saw it.
	AgreedClusterSetIP *bool `json:"agreedClusterSetIP,omitempty"`
	// Import is the import of the Service with this member as the only exporter.
	// +kubebuilder:validation:XValidation:rule="size(self.ports) <= 1000",message="a service may have at most 1000 ports"
	Import mcsv1beta1.ServiceImportSpec `json:"import"`
	// ExportedLabels and ExportedAnnotations are those of the ServiceExport that an import may have.
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 317 && size(self[k]) <= 63)",message="keys have at most 317 characters, values 63"
	ExportedLabels map[string]string `json:"exportedLabels,omitempty"`
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 317 && size(self[k]) <= 65536)",message="keys have at most 317 characters, values 65536"
	ExportedAnnotations map[string]string `json:"exportedAnnotations,omitempty"`
	// ServiceLabels are the labels of the Service, without those of Kubernetes. The imported EndpointSlices have them.
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 317 && size(self[k]) <= 63)",message="keys have at most 317 characters, values 63"
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

// NodeReport is the connectivity of one node to all members. It has the name of the node, whose agent writes it when it
// changes, and it is deleted with the Node. The controller uses it as evidence about members that do not renew their
// Lease.
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

// NodeReportSpec lists members by their ids. A member in neither list is unknown to the node: it has had no traffic with it
// recently.
type NodeReportSpec struct {
	// Silent are the members that do not answer; the node sends them no new connections.
	// +listType=set
	Silent []string `json:"silent,omitempty"`
	// Answering are the members from which packets arrived recently.
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
