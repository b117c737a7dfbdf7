package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// GatewayNode is a machine that takes the packets of external clients to Services: where its agent listens, and how
// routers learn of it. People write the spec, the controller the status.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=gwn
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Group",type=string,JSONPath=`.spec.group`
// +kubebuilder:printcolumn:name="Reachable",type=string,JSONPath=`.status.conditions[?(@.type=="Reachable")].status`
// +kubebuilder:printcolumn:name="Applied",type=string,JSONPath=`.status.conditions[?(@.type=="Applied")].status`
// +kubebuilder:printcolumn:name="Generation",type=integer,JSONPath=`.status.appliedGeneration`
// +kubebuilder:printcolumn:name="Cordoned",type=boolean,JSONPath=`.spec.cordoned`
// +kubebuilder:printcolumn:name="URL",type=string,JSONPath=`.spec.url`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GatewayNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GatewayNodeSpec   `json:"spec"`
	Status GatewayNodeStatus `json:"status,omitzero"`
}

// Finalizer keeps a GatewayNode until the address pairs that the controller set at its port in Neutron are taken away.
const Finalizer = "gateway.isthmus.dev/address-pairs"

// GatewayNodeSpec says where a gateway is and what it is part of.
type GatewayNodeSpec struct {
	// URL is where the gateway's agent listens, such as https://192.0.2.11:9479.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() == 'https' && url(self).getHost() != ''",message="must be an https URL with a host, such as https://192.0.2.11:9479"
	URL string `json:"url"`
	// CertificateName is the identity in the agent's certificate, a DNS name. Empty: the name of the GatewayNode.
	// +kubebuilder:validation:MaxLength=253
	CertificateName string `json:"certificateName,omitempty"`
	// Group is the name of the gateways that stand in for one another. Each of a group has the same VIPs.
	// +kubebuilder:default=default
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Group string `json:"group,omitempty"`
	// Balancer is what balances packets, the same on all gateways of a group.
	// +kubebuilder:default=nftables
	// +kubebuilder:validation:Enum=nftables;ebpf
	Balancer string `json:"balancer,omitempty"`
	// NeutronPort is the id of the gateway's own port in Neutron, which is told to let the VIPs pass. Empty where
	// there is no Neutron, or port security is off.
	// +kubebuilder:validation:MaxLength=63
	NeutronPort string `json:"neutronPort,omitempty"`
	// Address is the gateway's own address, to which floating IPs are led where pools do so.
	// +kubebuilder:validation:XValidation:rule="self == '' || isIP(self)",message="must be an IP address"
	// +kubebuilder:validation:MaxLength=45
	Address string `json:"address,omitempty"`
	// Cordoned gateways announce nothing and go on to balance what still arrives: before an upgrade, say.
	Cordoned bool `json:"cordoned,omitempty"`
	// BGP is needed by pools whose VIPs are announced so.
	BGP *BGP `json:"bgp,omitempty"`
	// VRRP is needed by pools whose VIPs are announced so.
	VRRP *VRRP `json:"vrrp,omitempty"`
}

// BGP is a gateway's speaker.
type BGP struct {
	// ASN is the gateway's autonomous system.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	ASN int64 `json:"asn"`
	// RouterID is an IPv4 address that no other speaker has.
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 4",message="must be an IPv4 address"
	RouterID string `json:"routerID"`
	// MED and LocalPreference tell active from standby gateways: of two, the lower MED or the higher local
	// preference is preferred. Without them all are equal.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	MED *int64 `json:"med,omitempty"`
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	LocalPreference *int64 `json:"localPreference,omitempty"`
	// Communities of all routes: 65000:100, no-export, or large ones such as 65000:1:2.
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=40
	// +listType=set
	Communities []string `json:"communities,omitempty"`
	// GracefulRestart is for how many seconds neighbours keep routes while the agent restarts; 0: not at all.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4095
	GracefulRestart int32 `json:"gracefulRestart,omitempty"`
	// Peers are the routers.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=address
	Peers []Peer `json:"peers"`
}

// Peer is a router.
type Peer struct {
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address"
	Address string `json:"address"`
	// Port is 179 when it is 0.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	ASN int64 `json:"asn"`
	// PasswordSecret names a Secret of the controller's namespace, whose key password signs the session
	// (RFC 2385). Empty: it is not signed.
	// +kubebuilder:validation:MaxLength=253
	PasswordSecret string `json:"passwordSecret,omitempty"`
	// HoldTime is in seconds; 0: 9.
	// +kubebuilder:validation:XValidation:rule="self == 0 || self >= 3 && self <= 65535",message="must be 3 to 65535 seconds, or 0 for the default"
	HoldTime int32 `json:"holdTime,omitempty"`
	// BFD notices a dead gateway within the product of its numbers. Routes are announced only while it is up.
	BFD *BFD `json:"bfd,omitempty"`
}

// BFD is bidirectional forwarding detection (RFC 5881).
type BFD struct {
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	IntervalMillis int32 `json:"intervalMillis,omitempty"`
	// +kubebuilder:default=3
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=255
	Multiplier int32 `json:"multiplier,omitempty"`
}

// VRRP is a gateway's part in a virtual router (RFC 9568).
//
// +kubebuilder:validation:XValidation:rule="!has(self.peers) || self.peers.all(p, ip(p).family() == ip(self.source).family())",message="source and peers must be of one family"
type VRRP struct {
	// Interface has the VIPs of the master.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Interface string `json:"interface"`
	// Source is the gateway's own address there.
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address"
	Source string `json:"source"`
	// Peers are the other gateways' addresses. One that stands alone has none, and speaks by multicast.
	// +kubebuilder:validation:MaxItems=15
	// +kubebuilder:validation:items:MaxLength=45
	// +kubebuilder:validation:items:XValidation:rule="isIP(self)",message="must be an IP address"
	// +listType=set
	Peers []string `json:"peers,omitempty"`
	// RouterID is the virtual router's id for IPv4; for IPv6 it is the next one.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	RouterID int32 `json:"routerID"`
	// Priority tells who is the master: the highest.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	Priority int32 `json:"priority"`
	// IntervalMillis is between advertisements.
	// +kubebuilder:default=100
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=40950
	// +kubebuilder:validation:MultipleOf=10
	IntervalMillis int32 `json:"intervalMillis,omitempty"`
}

// GatewayNodeStatus is what a gateway said last, and what the controller thinks of it.
type GatewayNodeStatus struct {
	// AppliedGeneration and Hash are of the state that the gateway applied last.
	AppliedGeneration int64  `json:"appliedGeneration,omitempty"`
	Hash              string `json:"hash,omitempty"`
	// Version is the agent's build.
	Version string `json:"version,omitempty"`
	// Drift tells what on the gateway is not as it was applied. The agent mends it.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	Drift []string `json:"drift,omitempty"`
	// Announced are the VIPs that neighbours are told about.
	// +listType=atomic
	Announced []string `json:"announced,omitempty"`
	// AddressPairs are those that the controller set, or is about to set, at the gateway's port in Neutron.
	// +listType=atomic
	AddressPairs []string `json:"addressPairs,omitempty"`
	// AddressPairsPort is the id of that port: spec.neutronPort, or the one that stood there before.
	AddressPairsPort string `json:"addressPairsPort,omitempty"`
	// FloatingIPs are those of pools that move, and lead here now. When they move on, their connections end.
	// +listType=atomic
	FloatingIPs []string `json:"floatingIPs,omitempty"`
	// Conditions: Reachable and Applied.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// The conditions of a GatewayNode and their reasons.
const (
	// ConditionReachable is True while the agent answers.
	ConditionReachable = "Reachable"
	ReasonAnswers      = "Answers"
	ReasonNoAnswer     = "NoAnswer"

	// ConditionApplied is True while the gateway has all that it should have.
	ConditionApplied = "Applied"
	ReasonApplied    = "Applied"
	// ReasonPending: it has not been told yet.
	ReasonPending = "Pending"
	// ReasonRefused: the agent could not apply it, and has what it had before.
	ReasonRefused = "Refused"
	// ReasonInvalid: the spec cannot be made into a state.
	ReasonInvalid = "Invalid"
	// ReasonMixedBalancers: not all gateways of the group have the same balancer; nothing is sent to any of them.
	ReasonMixedBalancers = "MixedBalancers"

	// ConditionAddressPairs is False while Neutron does not let all VIPs pass at the gateway's port.
	ConditionAddressPairs = "AddressPairs"
	ReasonAllowed         = "Allowed"
	ReasonNotAllowed      = "NotAllowed"
)

// GatewayNodeList is a list of GatewayNodes.
//
// +kubebuilder:object:root=true
type GatewayNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GatewayNode `json:"items"`
}
