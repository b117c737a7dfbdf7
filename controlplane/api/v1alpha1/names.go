package v1alpha1

// Labels and annotations of objects that Isthmus writes.
const (
	// LabelCluster carries the id of the member that owns an object on the broker.
	LabelCluster = "isthmus.dev/cluster"
	// LabelServiceName and LabelServiceNamespace name the exported Service on objects of the broker,
	// which all live in one namespace.
	LabelServiceName      = "isthmus.dev/service-name"
	LabelServiceNamespace = "isthmus.dev/service-namespace"

	// ManagedBy is the value of endpointslice.kubernetes.io/managed-by (EndpointSlices) and
	// app.kubernetes.io/managed-by (all other objects) by which we know our own.
	ManagedBy      = "isthmus.dev"
	LabelManagedBy = "app.kubernetes.io/managed-by"

	// FieldOwner is the field manager of every server-side apply.
	FieldOwner = "isthmus"

	// AnnotationUseClusterSetIP asks for ("true") or declines ("false") a ClusterSetIP, on a
	// ServiceExport and on the imports made of it.
	AnnotationUseClusterSetIP = "lighthouse.submariner.io/use-clusterset-ip"
	// AnnotationChangedAt is when the exporting member learned of the change that an object carries, in
	// nanoseconds since 1970 on that member's clock. It stands on export records and on EndpointSlices, on the
	// broker and in every member.
	AnnotationChangedAt = "isthmus.dev/changed-at"
	// AnnotationReleaseHold on the copy of a Member in a member's own cluster names sources, comma-separated
	// and each with the time of asking (ID=RFC 3339), whose held withdrawals a person has released.
	AnnotationReleaseHold = "isthmus.dev/release-hold"

	// AnnotationAllocatedBy names the member that allocated an aggregate's ClusterSetIP.
	AnnotationAllocatedBy = "lighthouse.submariner.io/clusterset-ip-allocated-by"
)

// MemberAccount returns the name of the ServiceAccount on the broker by which member id acts, and MemberLease
// that of the Lease by which it says that it lives. Nothing else on the broker has such a name.
func MemberAccount(id string) string { return "member-" + id }

// MemberLease is described with MemberAccount.
func MemberLease(id string) string { return "member-" + id }

// Names inside a member's installation namespace.
const (
	// DefaultNamespace is where Isthmus is installed in a member cluster.
	DefaultNamespace = "isthmus-system"
	// DefaultBrokerNamespace is where the broker keeps everything.
	DefaultBrokerNamespace = "isthmus-broker"
	// BrokerSecret is the Secret that holds the member's credentials for the broker.
	BrokerSecret = "isthmus-broker"
	// BrokerSecretKubeconfig is its key: a kubeconfig whose context names the broker's namespace. It takes its
	// token from a file beside it, so that a process that runs notices when it changes.
	BrokerSecretKubeconfig = "kubeconfig"
	// BrokerSecretToken is the key of that token.
	BrokerSecretToken = "token"
	// ClusterSetIPConfigMap is the ConfigMap on the broker that has the ClusterSet's settings and blocks once
	// more, in the words of Submariner.
	ClusterSetIPConfigMap = "isthmus-clusterset-ip"
)
