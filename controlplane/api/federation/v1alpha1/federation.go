package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Federation lists the clusters that a cluster belongs to. In a supervisor it lists all members, including the cluster
// itself; in any other cluster the list may be empty. A cluster has at most one, because its name is fixed.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:printcolumn:name="ClusterSet",type=string,JSONPath=`.spec.clusterSet`
// +kubebuilder:printcolumn:name="Members",type=string,JSONPath=`.spec.members[*].clusterID`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'federation'",message="metadata.name must be federation: a cluster belongs to at most one Federation"
type Federation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   FederationSpec   `json:"spec"`
	Status FederationStatus `json:"status,omitempty"`
}

// FederationSpec is written by users, or by isthmusctl federation.
type FederationSpec struct {
	// ClusterSet is the id of the ClusterSet, the same as the claim clusterSet.k8s.io of each member.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterSet string `json:"clusterSet"`
	// Members are all clusters of the federation, including this one. If it is empty, this cluster leads no member.
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=clusterID
	Members []MemberCluster `json:"members,omitempty"`
	// SystemNamespace is the namespace of global federated Services in every member. Empty means isthmus-system.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$`
	SystemNamespace string `json:"systemNamespace,omitempty"`
	// ClusterSetIP configures ServiceImports with a ClusterSetIP for federated Services.
	ClusterSetIP ClusterSetIPSpec `json:"clusterSetIP,omitempty"`
	// HostnameTemplate is the host name outside of the clusters of a federated Service whose members ask for one: a Go
	// template of .Name and .Namespace, such as {{.Name}}.example.org. Empty means no host name.
	// +kubebuilder:validation:MaxLength=512
	HostnameTemplate string `json:"hostnameTemplate,omitempty"`
	// Policies selects the policies that are replicated.
	Policies PoliciesSpec `json:"policies,omitempty"`
	// Grants say whose Services join which federated Services, and whose policies are replicated. What no grant allows is
	// refused. If the field is absent, the annotation of any Service or policy suffices, and condition GrantsOpen is True; an
	// empty list allows nothing. Objects of namespaces kube-* are refused in any case. Keep it the same in all supervisors.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Grants []Grant `json:"grants,omitzero"`
}

// Pattern is a name, or the beginning of names followed by *, such as shop-*. It may be * alone.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?|([a-z0-9][-a-z0-9.]*)?\*)$`
type Pattern string

// Grant allows namespaces of members to take part in the federation. For example, the namespace shop of each member may join the
// global Service shop:
//
//	{namespaces: [shop], globalServices: [shop]}
//
// +kubebuilder:validation:XValidation:rule="has(self.namespaces) || has(self.clusterPolicies) && !has(self.globalServices) && !has(self.services) && !has(self.policies)",message="namespaces must name at least one namespace, unless the grant is for clusterPolicies alone; * means all"
type Grant struct {
	// Members are the clusters that the grant is for. Empty means every member.
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=63
	// +listType=atomic
	Members []string `json:"members,omitempty"`
	// Namespaces are the namespaces that the grant is for.
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Namespaces []Pattern `json:"namespaces,omitempty"`
	// GlobalServices are the global federated Services that Services of the namespaces may join.
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	GlobalServices []Pattern `json:"globalServices,omitempty"`
	// Services are the federated Services of the namespaces themselves that their Services may join.
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Services []Pattern `json:"services,omitempty"`
	// Policies are the policies of the namespaces that are replicated.
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	Policies []Pattern `json:"policies,omitempty"`
	// ClusterPolicies are the policies without a namespace that are replicated.
	// +kubebuilder:validation:MaxItems=256
	// +listType=atomic
	ClusterPolicies []Pattern `json:"clusterPolicies,omitempty"`
}

// MemberCluster is one cluster of the federation, with the address and credentials that a supervisor uses for it.
type MemberCluster struct {
	// ClusterID is the value of the member's claim id.k8s.io.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)?$`
	ClusterID string `json:"clusterID"`
	// Server is the member's API server.
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() == 'https' && url(self).getHost() != ''",message="must be an https URL with a host, such as https://192.0.2.11:6443"
	Server string `json:"server"`
	// Secret is the name of a Secret of namespace isthmus-federation, with the keys token and ca.crt.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Secret string `json:"secret"`
	// ClusterUID, if not empty, is the uid of the member's namespace kube-system; a cluster with another uid is refused.
	// Empty means the cluster that was first seen under this id, which the status records. To replace a cluster by
	// another one under the same id, write the new uid here.
	// +kubebuilder:validation:MaxLength=64
	ClusterUID string `json:"clusterUID,omitempty"`
	// ExternalCIDRs are the networks of the member's own addresses outside of it. A federated Service leads to an address in
	// spec.externalIPs of one of the member's Services only if it lies in one of them.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.all(r, isCIDR(r) && cidr(r) == cidr(r).masked())",message="must be CIDRs without host bits, such as 192.0.2.0/24"
	// +listType=atomic
	ExternalCIDRs []string `json:"externalCIDRs,omitempty"`
}

// ClusterSetIPSpec enables ClusterSetIPs and sets their ranges.
//
// +kubebuilder:validation:XValidation:rule="!has(self.enabled) || !self.enabled || has(self.ranges) && self.ranges.size() > 0",message="ranges must name at least one range while enabled is true"
type ClusterSetIPSpec struct {
	Enabled bool `json:"enabled,omitempty"`
	// Ranges are the CIDRs of ClusterSetIPs, at most one of each family. They are the same in all supervisors, and do not
	// overlap other networks.
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.all(r, isCIDR(r) && cidr(r) == cidr(r).masked())",message="must be CIDRs without host bits, such as 243.0.0.0/16"
	// +kubebuilder:validation:XValidation:rule="self.size() < 2 || isCIDR(self[0]) && isCIDR(self[1]) && cidr(self[0]).ip().family() != cidr(self[1]).ip().family()",message="must be of different families"
	// +listType=atomic
	Ranges []string `json:"ranges,omitempty"`
}

// PoliciesSpec selects the policies that are replicated.
type PoliciesSpec struct {
	// Kinds are the kinds whose annotated objects are replicated. Any kind can be listed. Empty means NetworkPolicy and
	// ClusterNetworkPolicy of crd.antrea.io/v1beta1, ClusterNetworkPolicy and AdminNetworkPolicy of
	// policy.networking.k8s.io, and NetworkPolicy of networking.k8s.io/v1.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	Kinds []PolicyKind `json:"kinds,omitempty"`
}

// PolicyKind is a kind of object.
type PolicyKind struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Group string `json:"group"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Version string `json:"version"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind"`
}

// Conditions of a Federation.
const (
	// ConditionReady states whether this cluster has its claims and reaches every member.
	ConditionReady = "Ready"
	// ConditionHolding states that withdrawals of members are held back as a suspected accident. It is present only while
	// there are any.
	ConditionHolding = "Holding"
	// ConditionSettingsDiffer states that another supervisor has other settings than this one, so that members depend on who leads them.
	// It is present only while one does.
	ConditionSettingsDiffer = "SettingsDiffer"
	// ConditionGrantsOpen states that anybody who may annotate a Service or a policy takes part in the federation, because
	// spec.grants is absent.
	ConditionGrantsOpen = "GrantsOpen"
)

// FederationStatus is written by the controller of the cluster that has the Federation. It changes only when the state of a
// member changes.
type FederationStatus struct {
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Members are the states of the members as this cluster sees them.
	// +listType=map
	// +listMapKey=clusterID
	Members []MemberStatus `json:"members,omitempty"`
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// MemberStatus is the state of one member as this cluster sees it.
type MemberStatus struct {
	ClusterID string `json:"clusterID"`
	// ClusterUID is the uid of the namespace kube-system of the cluster that was first seen under this id.
	ClusterUID string `json:"clusterUID,omitempty"`
	// Leader is the holder of the member's Lease, as CLUSTER/POD.
	Leader string `json:"leader,omitempty"`
	// Epoch counts the changes of the leader.
	Epoch int64 `json:"epoch,omitempty"`
	// Reachable reports whether the member's API server answers and belongs to the member.
	Reachable bool `json:"reachable"`
	// Supervisor reports whether the member claims to be a supervisor.
	Supervisor bool `json:"supervisor,omitempty"`
	// Message is the reason why the member is not reachable or not fully reconciled, and the remedy.
	Message string `json:"message,omitempty"`
	// Services and Policies count the federated Services and the replicated policies in the member.
	Services int64 `json:"services"`
	Policies int64 `json:"policies"`
	// Held counts the federated Services and policies of the member that vanished, many at once, without being withdrawn.
	// They stay in effect for a while; isthmusctl federation release accepts the withdrawals.
	Held int64 `json:"held,omitempty"`
}

// FederationList is a list of Federations.
//
// +kubebuilder:object:root=true
type FederationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Federation `json:"items"`
}
