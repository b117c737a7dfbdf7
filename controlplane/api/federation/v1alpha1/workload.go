package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// ExternalWorkload is a machine that no cloud lists, with its addresses and ports. It becomes an endpoint of the Service that
// it names, which is created with the first ExternalWorkload of that name and deleted with the last. Its annotations for
// membership of a federated Service are copied to the Service.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Service",type=string,JSONPath=`.status.service`
// +kubebuilder:printcolumn:name="Addresses",type=string,JSONPath=`.spec.addresses`
// +kubebuilder:printcolumn:name="Ready",type=boolean,JSONPath=`.spec.ready`
// +kubebuilder:printcolumn:name="Offered",type=string,JSONPath=`.status.conditions[?(@.type=="Offered")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="has(self.spec.service) && self.spec.service.size() > 0 || self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')",message="spec.service must be given, because metadata.name cannot name a Service: that takes a DNS label"
type ExternalWorkload struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ExternalWorkloadSpec   `json:"spec"`
	Status ExternalWorkloadStatus `json:"status,omitempty"`
}

// ExternalWorkloadSpec holds the addresses and the ports of the machine.
type ExternalWorkloadSpec struct {
	// Service is the name of the Service that the machine serves. Empty means the name of the ExternalWorkload. Kubernetes before
	// 1.36 refuses a name that begins with a digit.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$`
	Service string `json:"service,omitempty"`
	// Addresses are the addresses at which clients reach the machine, at most one of each family.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="self.all(a, isIP(a) && ip.isCanonical(a) && ip(a).isGlobalUnicast())",message="must be addresses of one machine as they are usually written, such as 192.0.2.7 or 2001:db8::7"
	// +kubebuilder:validation:XValidation:rule="self.size() < 2 || isIP(self[0]) && isIP(self[1]) && ip(self[0]).family() != ip(self[1]).family()",message="must be of different families"
	// +listType=atomic
	Addresses []string `json:"addresses"`
	// Ports are the ports that the machine serves.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:XValidation:rule="self.all(p, !has(p.name) || self.exists_one(q, has(q.name) && q.name == p.name))",message="names must differ"
	// +listType=map
	// +listMapKey=port
	// +listMapKey=protocol
	Ports []ExternalPort `json:"ports"`
	// Ready states whether the machine accepts new connections.
	// +kubebuilder:default=true
	Ready *bool `json:"ready,omitempty"`
}

// ExternalPort is a port of a Service and the port of the machine that serves it.
type ExternalPort struct {
	// Name is the name of the port in the Service. Empty means the protocol and the number, such as tcp-80.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`
	// Port is the port number of the Service.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
	// +kubebuilder:validation:Enum=TCP;UDP;SCTP
	// +kubebuilder:default=TCP
	Protocol string `json:"protocol,omitempty"`
	// TargetPort is the port number of the machine. Zero means Port.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	TargetPort int32 `json:"targetPort,omitempty"`
}

// ConditionOffered on an ExternalWorkload states whether it is an endpoint of its Service.
const ConditionOffered = "Offered"

// ExternalWorkloadStatus is written by the cluster's controller.
type ExternalWorkloadStatus struct {
	// Service is the name of the Service that the machine serves.
	Service string `json:"service,omitempty"`
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ExternalWorkloadList is a list of ExternalWorkloads.
//
// +kubebuilder:object:root=true
type ExternalWorkloadList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ExternalWorkload `json:"items"`
}
