package v1alpha1

import "github.com/isthmus-net/isthmus/controlplane/clusterset"

// The well-known ClusterClaims. Their values stay as they are while a Federation of the cluster names it.
const (
	// ClaimID is the cluster's id, which is a clusterset.ClusterID.
	ClaimID = "id.k8s.io"
	// ClaimClusterSet is the id of the ClusterSet that the cluster belongs to.
	ClaimClusterSet = "clusterSet.k8s.io"
	// ClaimSupervisor says, by the value "true", that the cluster's controller may lead members.
	ClaimSupervisor = "supervisor.antreaplus.tanzu-vmware.com"
)

// ManagedBy is the value of app.kubernetes.io/managed-by, and of endpointslice.kubernetes.io/managed-by, on everything
// that leaders write and that is theirs as a whole. It is not that of what a member of a broker's ClusterSet imports,
// which goes with that membership.
const ManagedBy = "federation.isthmus.dev"

// ManagedByMachines is ManagedBy of Services of machines, and of their EndpointSlices: they are the cluster's own, and
// become members of federated Services as any other Service does.
const ManagedByMachines = "machines.federation.isthmus.dev"

// What a cloud's server says of itself, in metadata or tags. Where the cloud knows no slash a colon stands for it. Both
// spellings mean the same; the first is ours.
const (
	// MachineService makes the server stand behind the Service that its value names; without a value, behind one that
	// is named as the server.
	MachineService       = "federation.isthmus.dev/machine"
	MachineServiceAntrea = "svc.antreaplus.vmware.com"
	// MachinePorts are what the server serves: [NAME:]PORT[/PROTOCOL][=TARGET], and more of them behind commas.
	MachinePorts       = "federation.isthmus.dev/machine-ports"
	MachinePortsAntrea = "svc.antreaplus.vmware.com/ports"
	// MachineNamespace is the namespace of the Service, where the cloud's configuration allows it.
	MachineNamespace       = "federation.isthmus.dev/machine-namespace"
	MachineNamespaceAntrea = "svc.antreaplus.vmware.com/namespace"
)

// Annotations and labels by which people say what is federated. Where there are several, all mean the same; the
// first is ours.
const (
	// AnnotationEpoch stands on every object that a leader wrote. Its value is the epoch of the leader that wrote it
	// last: the leaseTransitions of the member's Lease, in decimal.
	AnnotationEpoch = "federation.isthmus.dev/epoch"

	// AnnotationReleaseHold on a supervisor's Federation names members, comma-separated as ID=TIME in RFC 3339, of which
	// it shall be believed that all that vanished is gone. isthmusctl federation release writes it.
	AnnotationReleaseHold = "federation.isthmus.dev/release-hold"

	// AnnotationPolicy asks, by the value "true", to replicate a policy.
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

	// AnnotationServiceStatus is what became of a member Service's wish, for its owner. Leaders write it.
	AnnotationServiceStatus = "federation.isthmus.dev/service-status"
	// AnnotationPolicyStatus is the same of a policy that people ask to replicate.
	AnnotationPolicyStatus = "federation.isthmus.dev/policy-status"

	// MarkFederatedService stands on a federated Service.
	MarkFederatedService = "fed-svc.antreaplus.vmware-tanzu.com"
	// MarkCluster stands on EndpointSlices of federated Services; its value is the id of the cluster that serves.
	MarkCluster = "cluster.federated.antreaplus.vmware-tanzu.com"
	// MarkVirtualMachines stands on a Service whose endpoints are virtual machines.
	MarkVirtualMachines = "vm.antreaplus.vmware-tanzu.com"
	// AnnotationAskHostname asks, by the value "true" on a member Service, for a name outside of the clusters.
	AnnotationAskHostname = "federation.isthmus.dev/hostname"
	// AnnotationHostname is what ExternalDNS makes a name outside of the cluster of.
	AnnotationHostname = "external-dns.alpha.kubernetes.io/hostname"
)

// Names inside a cluster.
const (
	// FederationName is the name of a cluster's only Federation.
	FederationName = "federation"
	// ControllerLease is the Lease, in the installation namespace, of the one process of a cluster that writes what is said
	// there: the Federation's status, and Services of machines. It is renewed while there is one.
	ControllerLease = "isthmus-federation"
	// DefaultSystemNamespace is where global federated Services are in every member.
	DefaultSystemNamespace = "isthmus-system"
	// SecretToken and SecretCA are the keys of a member's Secret: a ServiceAccount's token, and the certificates,
	// in PEM, that the member's API server is known by.
	SecretToken = "token"
	SecretCA    = "ca.crt"
)

// SupervisorAccount returns the name of the ServiceAccount by which supervisor id acts in a member. Each has its
// own, so that a member's fence can tell its leader from all others.
func SupervisorAccount(id clusterset.ClusterID) string { return SupervisorAccountPrefix + string(id) }

// SupervisorAccountPrefix is how names of SupervisorAccount begin. No other account of the installation namespace
// has such a name.
const SupervisorAccountPrefix = "federation-"
