package v1alpha1

import (
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Well-known ClusterClaims. The id cannot change while a Federation of the cluster refers to it.
const (
	// ClaimID is the cluster's id, a clusterset.ClusterID.
	ClaimID = "id.k8s.io"
	// ClaimClusterSet is the id of the ClusterSet that the cluster belongs to.
	ClaimClusterSet = "clusterSet.k8s.io"
	// ClaimSupervisor with the value "true" allows the cluster's controller to lead members.
	ClaimSupervisor = "supervisor.antreaplus.tanzu-vmware.com"
)

// ManagedBy is the value of app.kubernetes.io/managed-by, and of endpointslice.kubernetes.io/managed-by, on all objects that
// belong to the federation. Objects that a member of a broker's ClusterSet imports have another value, because they go with
// that membership.
const ManagedBy = "federation.isthmus.dev"

// ManagedByMachines is the value on Services of machines and on their EndpointSlices. They belong to the cluster, and become
// members of federated Services like any other Service.
const ManagedByMachines = "machines.federation.isthmus.dev"

// Keys of a cloud server's metadata or tags. In a cloud that does not allow slashes, a colon stands for a slash. Both spellings
// mean the same; the first one is ours.
const (
	// MachineService names the Service that the server or load balancer serves. An empty value means a Service named by its ID: vm-ID or lb-ID.
	MachineService       = "federation.isthmus.dev/machine"
	MachineServiceAntrea = "svc.antreaplus.vmware.com"
	// MachinePorts are the ports of a server: a comma-separated list of [NAME:]PORT[/PROTOCOL][=TARGET].
	MachinePorts       = "federation.isthmus.dev/machine-ports"
	MachinePortsAntrea = "svc.antreaplus.vmware.com/ports"
	// MachineNamespace is the namespace of the Service, if the cloud's configuration allows it.
	MachineNamespace       = "federation.isthmus.dev/machine-namespace"
	MachineNamespaceAntrea = "svc.antreaplus.vmware.com/namespace"
)

// Annotations and labels of federated objects. If there are several spellings, all mean the same; the first one is ours.
const (
	// AnnotationEpoch is on every object that a leader wrote. Its value is the epoch of the last write: the
	// leaseTransitions of the member's Lease, in decimal.
	AnnotationEpoch = "federation.isthmus.dev/epoch"

	// AnnotationReleaseHold on a supervisor's Federation lists members whose held-back withdrawals are accepted, as
	// comma-separated ID=TIME in RFC 3339. isthmusctl federation release writes it.
	AnnotationReleaseHold = "federation.isthmus.dev/release-hold"

	// AnnotationPolicy with the value "true" asks to replicate a policy.
	AnnotationPolicy       = "federation.isthmus.dev/policy"
	AnnotationPolicyAntrea = "federated.anp.antreaplus.vmware.com"

	// AnnotationGlobalService makes a Service a member of the global federated Service that its value names.
	AnnotationGlobalService            = "federation.isthmus.dev/global-service"
	AnnotationGlobalServiceAntreaTanzu = "svc.global.federated.antreaplus.vmware-tanzu.com"
	AnnotationGlobalServiceAntrea      = "svc.global.federated.antreaplus.vmware.com"

	// AnnotationService makes a Service a member of the federated Service of its namespace that its value names.
	AnnotationService            = "federation.isthmus.dev/service"
	AnnotationServiceAntreaTanzu = "svc.federated.antreaplus.vmware-tanzu.com"
	AnnotationServiceAntrea      = "svc.federated.antreaplus.vmware.com"

	// LabelPeerService names a federated Service in a peer of a NetworkPolicy, as the only label that the peer selects pods by. No pod
	// has it; leaders admit the endpoints of the Service.
	LabelPeerService = "federation.isthmus.dev/service"

	// AnnotationServiceStatus describes to its owner the state of a member Service. Leaders write it.
	AnnotationServiceStatus = "federation.isthmus.dev/service-status"
	// AnnotationPolicyStatus describes the state of a replicated policy. Leaders write it.
	AnnotationPolicyStatus = "federation.isthmus.dev/policy-status"

	// AnnotationFirst on a federated Service names the member Service that its port names, session affinity and first family come from,
	// as CLUSTER/NAMESPACE/NAME.
	AnnotationFirst = "federation.isthmus.dev/first"
	// MarkFederatedService marks a federated Service.
	MarkFederatedService = "fed-svc.antreaplus.vmware-tanzu.com"
	// MarkCluster on an EndpointSlice of a federated Service is the id of the cluster of its endpoints.
	MarkCluster = "cluster.federated.antreaplus.vmware-tanzu.com"
	// MarkVirtualMachines marks a Service whose endpoints are machines or load balancers outside of the cluster.
	MarkVirtualMachines = "vm.antreaplus.vmware-tanzu.com"
	// AnnotationAskHostname with the value "true" on a member Service asks for a host name outside of the clusters.
	AnnotationAskHostname = "federation.isthmus.dev/hostname"
	// AnnotationHostnamePorts on a federated Service with a host name lists the ports that have another number at its addresses, as
	// PORT/PROTOCOL=NUMBER joined by commas.
	AnnotationHostnamePorts = "federation.isthmus.dev/hostname-ports"
	// AnnotationHostnameGiven on a federated Service is the host name that leaders wrote. Another one is a user's, and stays.
	AnnotationHostnameGiven = "federation.isthmus.dev/hostname-given"
	// GatewayClass is the loadBalancerClass of Services for gateways. It is that of gateway/service.
	GatewayClass = "isthmus.dev/gateway"
	// AnnotationServiceImport on a Service of type LoadBalancer names the ServiceImport in its namespace that gateways balance. It is
	// that of gateway/service.
	AnnotationServiceImport = "isthmus.dev/service-import"
)

// Annotations of a federated Service that ExternalDNS reads: the host name outside of the clusters, its addresses separated by commas,
// and the TTL of its records in seconds. Each has one of ExternalDNSPrefixes in front.
const (
	ExternalDNSHostname = "hostname"
	ExternalDNSTarget   = "target"
	ExternalDNSTTL      = "ttl"
)

// ExternalDNSPrefixes returns the prefixes of annotations that ExternalDNS reads by default: since its release 0.22, and before.
func ExternalDNSPrefixes() []string {
	return []string{"external-dns.kubernetes.io/", "external-dns.alpha.kubernetes.io/"}
}

// Names inside a cluster.
const (
	// FederationName is the name of a cluster's only Federation.
	FederationName = "federation"
	// ControllerLease is the Lease, in the installation namespace, of the one process of a cluster that writes the
	// Federation's status and the Services of machines. It is renewed while that process runs.
	ControllerLease = "isthmus-federation"
	// DefaultSystemNamespace is the default namespace of global federated Services.
	DefaultSystemNamespace = "isthmus-system"
	// SecretNamespace is the namespace, in a supervisor, of the Secrets with the credentials for members. Nothing else is in
	// it, so the controller may list all Secrets there and reads no others.
	SecretNamespace = "isthmus-federation"
	// SecretToken and SecretCA are the keys of a member's Secret: a ServiceAccount's token, and the CA certificates of the
	// member's API server in PEM.
	SecretToken = "token"
	SecretCA    = "ca.crt"
	// SecretCredential is the key of the name of a Secret, in the installation namespace of the member, to which the supervisor's
	// tokens are bound: they end when it is deleted. Without it the controller does not renew the token.
	SecretCredential = "credential"
	// SecretReplaced is the key of the name of a Secret, beside the former one, with the supervisor's former token, which does not
	// expire. The controller deletes both.
	SecretReplaced = "replaced"
	// ResourceCredentials is the virtual resource of this API group whose verb use permits a supervisor to bind tokens to the
	// Secret of that name.
	ResourceCredentials = "credentials"
	// TokenLifetime is how long a supervisor's token is valid. The controller renews it when half of that has passed.
	TokenLifetime = 7 * 24 * time.Hour
)

// SupervisorAccount returns the name of the ServiceAccount of supervisor id in a member. Each supervisor has its own, so that
// a member's fence can distinguish the leader from the others.
func SupervisorAccount(id clusterset.ClusterID) string { return SupervisorAccountPrefix + string(id) }

// SupervisorAccountPrefix is the prefix of all names of SupervisorAccount. No other account of the installation namespace has
// it.
const SupervisorAccountPrefix = "federation-"
