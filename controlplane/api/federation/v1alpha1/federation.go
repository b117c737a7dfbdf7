package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Federation says of a cluster to which others it belongs. A supervisor's names all members, its own cluster too;
// that of any other cluster may name none. A cluster has one at most, because there is one name for it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:printcolumn:name="ClusterSet",type=string,JSONPath=`.spec.clusterSet`
// +kubebuilder:printcolumn:name="Members",type=string,JSONPath=`.spec.members[*].clusterID`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'federation'",message="metadata.name must be federation: a cluster belongs to one Federation at most"
type Federation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   FederationSpec   `json:"spec"`
	Status FederationStatus `json:"status,omitempty"`
}

// FederationSpec is written by people, or by isthmusctl federation.
type FederationSpec struct {
	// ClusterSet is the id of the ClusterSet, the same as the claim clusterSet.k8s.io of each member.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterSet string `json:"clusterSet"`
	// Members are all clusters of the federation, this one included. Without any, this cluster leads nobody.
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=clusterID
	Members []MemberCluster `json:"members,omitempty"`
	// SystemNamespace is where global federated Services are in every member. Empty means isthmus-system.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$`
	SystemNamespace string `json:"systemNamespace,omitempty"`
	// ClusterSetIP says whether federated Services are offered as ServiceImports with a ClusterSetIP too.
	ClusterSetIP ClusterSetIPSpec `json:"clusterSetIP,omitempty"`
	// HostnameTemplate is the name outside of the cluster that a federated Service gets where its members ask for
	// one: a Go template of .Name and .Namespace, such as {{.Name}}.example.org. Empty gives none.
	// +kubebuilder:validation:MaxLength=512
	HostnameTemplate string `json:"hostnameTemplate,omitempty"`
	// Policies says which policies are replicated.
	Policies PoliciesSpec `json:"policies,omitempty"`
}

// MemberCluster is one cluster of the federation, and how a supervisor reaches it.
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
	// Secret is the name of a Secret of the installation namespace, with the keys token and ca.crt.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Secret string `json:"secret"`
	// ClusterUID, if not empty, is the uid of the member's namespace kube-system, and another cluster is refused.
	// Empty means the cluster that was seen first under this id, which the status has. Whoever has replaced a
	// cluster by another one under the same id says so by writing the new uid here.
	// +kubebuilder:validation:MaxLength=64
	ClusterUID string `json:"clusterUID,omitempty"`
}

// ClusterSetIPSpec is the switch of ClusterSetIPs.
//
// +kubebuilder:validation:XValidation:rule="!has(self.enabled) || !self.enabled || has(self.ranges) && self.ranges.size() > 0",message="ranges must name at least one range while enabled is true"
type ClusterSetIPSpec struct {
	Enabled bool `json:"enabled,omitempty"`
	// Ranges are where ClusterSetIPs come from, at most one a family. They are the same in all supervisors, and no
	// range of anything else.
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.all(r, isCIDR(r) && cidr(r) == cidr(r).masked())",message="must be CIDRs without host bits, such as 243.0.0.0/16"
	// +kubebuilder:validation:XValidation:rule="self.size() < 2 || isCIDR(self[0]) && isCIDR(self[1]) && cidr(self[0]).ip().family() != cidr(self[1]).ip().family()",message="must be of different families"
	// +listType=atomic
	Ranges []string `json:"ranges,omitempty"`
}

// PoliciesSpec says which policies are replicated.
type PoliciesSpec struct {
	// Kinds are the kinds whose annotated objects are replicated. Without any: NetworkPolicy and
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
	// ConditionReady says whether this cluster does its part: it knows who it is, and reaches every member.
	ConditionReady = "Ready"
	// ConditionHolding says that much of what members offered vanished, and is taken for there nevertheless. It is there
	// only while that is so.
	ConditionHolding = "Holding"
)

// FederationStatus is written by the controller of the cluster that the Federation is in. It changes only when
// something happened.
type FederationStatus struct {
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Members are how the members look from this cluster.
	// +listType=map
	// +listMapKey=clusterID
	Members []MemberStatus `json:"members,omitempty"`
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// MemberStatus is how one member looks from here.
type MemberStatus struct {
	ClusterID string `json:"clusterID"`
	// ClusterUID is the uid of the namespace kube-system of the cluster that was seen first under this id.
	ClusterUID string `json:"clusterUID,omitempty"`
	// Leader is who holds the member's Lease: CLUSTER/POD.
	Leader string `json:"leader,omitempty"`
	// Epoch is how often the leader changed.
	Epoch int64 `json:"epoch,omitempty"`
	// Reachable says whether the member's API server answers, and is that of the member.
	Reachable bool `json:"reachable"`
	// Supervisor says whether the member claims to be one.
	Supervisor bool `json:"supervisor,omitempty"`
	// Message is why the member is not reachable, or not led as it should be, and what to do.
	Message string `json:"message,omitempty"`
	// Services and Policies are how many federated Services and replicated policies are in the member.
	Services int64 `json:"services"`
	Policies int64 `json:"policies"`
	// Held is how many federated Services and policies the member offered until they vanished, many at once and without
	// a word. They are taken for there, whoever leads; isthmusctl federation release ends it.
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
