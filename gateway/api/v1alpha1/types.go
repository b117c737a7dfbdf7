package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// GatewayNode is a machine that receives the packets of external clients to Services. Its spec says where its agent
// listens and how routers learn of its VIPs; users write it. The controller writes its status.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=gwn
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Group",type=string,JSONPath=`.spec.group`
// +kubebuilder:printcolumn:name="Reachable",type=string,JSONPath=`.status.conditions[?(@.type=="Reachable")].status`
// +kubebuilder:printcolumn:name="Applied",type=string,JSONPath=`.status.conditions[?(@.type=="Applied")].status`
// +kubebuilder:printcolumn:name="Generation",type=integer,JSONPath=`.status.appliedGeneration`
// +kubebuilder:printcolumn:name="Cordoned",type=boolean,JSONPath=`.spec.cordoned`
// +kubebuilder:printcolumn:name="Certificate until",type=string,JSONPath=`.status.certificateNotAfter`,priority=1
// +kubebuilder:printcolumn:name="URL",type=string,JSONPath=`.spec.url`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GatewayNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GatewayNodeSpec   `json:"spec"`
	Status GatewayNodeStatus `json:"status,omitzero"`
}

// AnnotationForget is "true" on a GatewayNode whose gateway is known to be off: its addresses are free without its
// confirmation. The controller removes the annotation.
const AnnotationForget = "gateway.isthmus.dev/forget"

// Finalizer keeps a GatewayNode until the address pairs that the controller set at its Neutron port are removed.
const Finalizer = "gateway.isthmus.dev/address-pairs"

// GatewayNodeSpec describes a gateway.
type GatewayNodeSpec struct {
	// URL is the address of the gateway's agent, such as https://192.0.2.11:9479.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() == 'https' && url(self).getHost() != ''",message="must be an https URL with a host, such as https://192.0.2.11:9479"
	URL string `json:"url"`
	// CertificateName is the DNS name in the agent's certificate. Empty: the name of the GatewayNode.
	// +kubebuilder:validation:MaxLength=253
	CertificateName string `json:"certificateName,omitempty"`
	// Group names the gateways that replace one another. All gateways of a group have the same VIPs.
	// +kubebuilder:default=default
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Group string `json:"group,omitempty"`
	// Balancer is the technology that balances packets, the same on all gateways of a group.
	// +kubebuilder:default=nftables
	// +kubebuilder:validation:Enum=nftables;ebpf
	Balancer string `json:"balancer,omitempty"`
	// NeutronPort is the id of the gateway's own port in Neutron, at which VIPs must be allowed. Empty without Neutron,
	// or if port security is off.
	// +kubebuilder:validation:MaxLength=63
	NeutronPort string `json:"neutronPort,omitempty"`
	// Address is the gateway's own address, which failover IPs lead to. Other gateways of the group hand packets over to it if the
	// URL has a name, or an address of the other family.
	// +kubebuilder:validation:XValidation:rule="self == '' || isIP(self)",message="must be an IP address"
	// +kubebuilder:validation:MaxLength=45
	Address string `json:"address,omitempty"`
	// Cordoned gateways announce nothing, and keep balancing what still arrives. Set it before an upgrade, for instance.
	Cordoned bool `json:"cordoned,omitempty"`
	// BGP is required by pools announced by BGP.
	BGP *BGP `json:"bgp,omitempty"`
	// VRRP is required by pools announced by VRRP.
	VRRP *VRRP `json:"vrrp,omitempty"`
}

// BGP configures the speaker of a gateway.
type BGP struct {
	// ASN is the gateway's autonomous system number.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	ASN int64 `json:"asn"`
	// RouterID is an IPv4 address that no other speaker uses.
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 4",message="must be an IPv4 address"
	RouterID string `json:"routerID"`
	// MED and LocalPreference distinguish active from standby gateways: the lower MED or the higher local preference is
	// preferred. Without them all are equal.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	MED *int64 `json:"med,omitempty"`
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	LocalPreference *int64 `json:"localPreference,omitempty"`
	// LinkBandwidth is in Mbit/s. Routers that balance by the link bandwidth community share new connections among gateways
	// of equal preference in proportion to it. Give it to all of them or to none. 0: the community is not sent.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000000
	LinkBandwidth int32 `json:"linkBandwidth,omitempty"`
	// Communities of all routes: 65000:100, no-export, or large ones such as 65000:1:2.
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=40
	// +listType=set
	Communities []string `json:"communities,omitempty"`
	// GracefulRestart is the number of seconds for which neighbours keep routes while the agent restarts; 0 turns it off.
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
	// Port is the TCP port; 0: 179.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	ASN int64 `json:"asn"`
	// PasswordSecret names a Secret in the controller's namespace whose key password holds the TCP MD5 password (RFC
	// 2385). Empty: no password.
	// +kubebuilder:validation:MaxLength=253
	PasswordSecret string `json:"passwordSecret,omitempty"`
	// HoldTime is in seconds; 0: 9.
	// +kubebuilder:validation:XValidation:rule="self == 0 || self >= 3 && self <= 65535",message="must be 3 to 65535 seconds, or 0 for the default"
	HoldTime int32 `json:"holdTime,omitempty"`
	// TTLSecurity is the number of hops to the peer, 1 on the same link: packets from farther away are dropped (RFC 5082, GTSM).
	// The peer needs the same setting. 0: not checked.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=254
	TTLSecurity int32 `json:"ttlSecurity,omitempty"`
	// MaxPrefixes is the number of routes of one address family that the peer may send; 0: 10000. The gateway uses none, but they
	// take its memory. Beyond it the session ends, and begins again a minute later.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000000
	MaxPrefixes int32 `json:"maxPrefixes,omitempty"`
	// BFD detects a dead gateway within the product of its two numbers. Routes are announced only while it is up.
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

// VRRP configures a gateway's role in a virtual router (RFC 9568).
//
// +kubebuilder:validation:XValidation:rule="!has(self.peers) || self.peers.all(p, ip(p).family() == ip(self.source).family())",message="source and peers must be of one family"
// +kubebuilder:validation:XValidation:rule="!has(self.routers) || self.routers.all(r, r.routerID != self.routerID)",message="routers must have other ids than routerID"
type VRRP struct {
	// Interface is the device that gets the VIPs on the master.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Interface string `json:"interface"`
	// Source is the gateway's own address on that device.
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address"
	Source string `json:"source"`
	// Peers are the addresses of the other gateways. A single gateway has none, and uses multicast.
	// +kubebuilder:validation:MaxItems=15
	// +kubebuilder:validation:items:MaxLength=45
	// +kubebuilder:validation:items:XValidation:rule="isIP(self)",message="must be an IP address"
	// +listType=set
	Peers []string `json:"peers,omitempty"`
	// RouterID is the id of the virtual router that has the VIPs of pools without one of their own.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	RouterID int32 `json:"routerID"`
	// Priority decides which gateway is the master: the highest.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	Priority int32 `json:"priority"`
	// Routers are further virtual routers, for pools that name them. Gateways that differ in who has the highest priority
	// share the pools.
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=routerID
	Routers []VirtualRouter `json:"routers,omitempty"`
	// IntervalMillis is the time between advertisements.
	// +kubebuilder:default=100
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=40950
	// +kubebuilder:validation:MultipleOf=10
	IntervalMillis int32 `json:"intervalMillis,omitempty"`
}

// VirtualRouter is a virtual router of some pools.
type VirtualRouter struct {
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	RouterID int32 `json:"routerID"`
	// Priority decides which gateway is its master: the highest.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	Priority int32 `json:"priority"`
}

// GatewayNodeStatus holds the gateway's last report and the controller's conditions.
type GatewayNodeStatus struct {
	// AppliedGeneration and Hash identify the state applied last.
	AppliedGeneration int64  `json:"appliedGeneration,omitempty"`
	Hash              string `json:"hash,omitempty"`
	// Version is the agent's build.
	Version string `json:"version,omitempty"`
	// Drift lists how the gateway differs from the applied state. The agent repairs it.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	Drift []string `json:"drift,omitempty"`
	// Announced are the VIPs announced to neighbours.
	// +listType=atomic
	Announced []string `json:"announced,omitempty"`
	// Addresses are the VIPs that the gateway was given, and those that it has not yet confirmed to have withdrawn. No other
	// Service gets one of the latter.
	// +listType=atomic
	Addresses []string `json:"addresses,omitempty"`
	// AddressPairs are the pairs that the controller set, or is about to set, at the gateway's Neutron port.
	// +listType=atomic
	AddressPairs []string `json:"addressPairs,omitempty"`
	// AddressPairsMissing are those of them for which the port has no room. The gateway does not get their VIPs.
	// +listType=atomic
	AddressPairsMissing []string `json:"addressPairsMissing,omitempty"`
	// AddressPairsPort is the id of that port: spec.neutronPort, or its previous value.
	AddressPairsPort string `json:"addressPairsPort,omitempty"`
	// FloatingIPs are the failover IPs that lead to this gateway. Their connections break when they move.
	// +listType=atomic
	FloatingIPs []string `json:"floatingIPs,omitempty"`
	// CertificateNotAfter is the time at which the agent's certificate expires.
	CertificateNotAfter *metav1.Time `json:"certificateNotAfter,omitempty"`
	// Conditions are Reachable, Applied, AddressPairs and CertificateUpToDate.
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Conditions of a GatewayNode and their reasons.
const (
	// ConditionReachable is True while the agent answers.
	ConditionReachable = "Reachable"
	ReasonAnswers      = "Answers"
	ReasonNoAnswer     = "NoAnswer"

	// ConditionApplied is True while the gateway has applied its desired state.
	ConditionApplied = "Applied"
	ReasonApplied    = "Applied"
	// ReasonServicesRefused: it has applied its state, but for Services that the message names.
	ReasonServicesRefused = "ServicesRefused"
	// ReasonPending: the state was not sent yet.
	ReasonPending = "Pending"
	// ReasonRefused: the agent could not apply the state, and keeps the previous one.
	ReasonRefused = "Refused"
	// ReasonInvalid: the spec does not result in a valid state.
	ReasonInvalid = "Invalid"
	// ReasonMixedBalancers: the gateways of the group have different balancers; none of them receives a state.
	ReasonMixedBalancers = "MixedBalancers"

	// ConditionAddressPairs is False while Neutron does not let all VIPs pass at the gateway's port.
	ConditionAddressPairs = "AddressPairs"
	ReasonAllowed         = "Allowed"
	ReasonNotAllowed      = "NotAllowed"

	// ConditionCertificateUpToDate is False once less than a quarter of the lifetime of the agent's certificate is left.
	ConditionCertificateUpToDate = "CertificateUpToDate"
	ReasonUpToDate               = "UpToDate"
	ReasonRenewalOverdue         = "RenewalOverdue"
)

// GatewayNodeList is a list of GatewayNodes.
//
// +kubebuilder:object:root=true
type GatewayNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GatewayNode `json:"items"`
}
