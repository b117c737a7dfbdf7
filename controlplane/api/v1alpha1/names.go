package v1alpha1

import "time"

// Labels and annotations of objects that Isthmus writes.
const (
	// LabelCluster carries the id of the member that owns an object on the broker.
	LabelCluster = "isthmus.dev/cluster"
	// LabelServiceName and LabelServiceNamespace name the exported Service on objects of the broker, which are all in one
	// namespace.
	LabelServiceName      = "isthmus.dev/service-name"
	LabelServiceNamespace = "isthmus.dev/service-namespace"

	// ManagedBy is the value of endpointslice.kubernetes.io/managed-by (EndpointSlices) and app.kubernetes.io/managed-by (all
	// other objects) that marks objects of Isthmus.
	ManagedBy      = "isthmus.dev"
	LabelManagedBy = "app.kubernetes.io/managed-by"

	// FieldOwner is the field manager of every server-side apply.
	FieldOwner = "isthmus"

	// AnnotationUseClusterSetIP requests ("true") or declines ("false") a ClusterSetIP, on a ServiceExport and on its imports.
	AnnotationUseClusterSetIP = "lighthouse.submariner.io/use-clusterset-ip"
	// AnnotationChangedAt is the time at which the exporting member saw the change that an object carries, in nanoseconds
	// since 1970 on that member's clock. Export records and EndpointSlices have it, on the broker and in every member.
	AnnotationChangedAt = "isthmus.dev/changed-at"
	// AnnotationExportedAt on an imported EndpointSlice is the time from which the export of its member counts, in RFC 3339.
	// It is the importer's memory of the order of precedence when the broker has lost its records.
	AnnotationExportedAt = "isthmus.dev/exported-at"
	// AnnotationRegions on an EndpointSlice, on the broker and in every member, maps the zones of its endpoints to their regions,
	// as zone=region joined by commas. The pair =region is about endpoints without a zone. The exporting member takes them from
	// the labels of its Nodes.
	AnnotationRegions = "isthmus.dev/regions"
	// AnnotationReleaseHold on the copy of a Member in its own cluster lists requests to release the holds of members,
	// comma-separated as ID=TIME with the RFC 3339 time of the request.
	AnnotationReleaseHold = "isthmus.dev/release-hold"

	// AnnotationExports on a member's Lease identifies all that the member exports, by its own account. It is absent while the
	// member does not know: after a start of its controller, and while an export fails.
	AnnotationExports = "isthmus.dev/exports"
	// AnnotationPodCIDRs on a member's Lease lists pod CIDRs of its nodes that it has not registered, separated by commas. Inside of
	// the member's supernets they count as registered.
	AnnotationPodCIDRs = "isthmus.dev/pod-cidrs"
	// AnnotationRefusedServices on a member's Lease is the number of its exported Services with endpoints that the other members
	// ignore, because the member has not registered their addresses.
	AnnotationRefusedServices = "isthmus.dev/refused-services"

	// AnnotationAllocatedBy names the member that allocated an aggregate's ClusterSetIP.
	AnnotationAllocatedBy = "lighthouse.submariner.io/clusterset-ip-allocated-by"
	// AnnotationExtendedBy names the member that added the second address of an aggregate's ClusterSetIP. It is absent if the
	// allocator of the first one added it.
	AnnotationExtendedBy = "isthmus.dev/clusterset-ip-extended-by"
	// AnnotationCreatedBy names the member that created an aggregate. It never changes.
	AnnotationCreatedBy = "isthmus.dev/created-by"
)

// Names of the bridge to Submariner's Lighthouse (controlplane/broker/lighthouse).
const (
	// LighthouseBridge is the name of its ServiceAccount, Roles, Lease and Deployment in the broker's namespace.
	LighthouseBridge = "isthmus-lighthouse-bridge"
	// AnnotationBridge on a Member of the broker says which other system the cluster still runs; the only value is
	// BridgeLighthouse. A join removes it.
	AnnotationBridge = "isthmus.dev/bridge"
	BridgeLighthouse = "lighthouse"
)

// Names of the quota controller in the broker's namespace.
const (
	// QuotaController is the name of its ServiceAccount, Role, Lease and Deployment.
	QuotaController = "isthmus-quota-controller"
	// ControllerPort is the port at which isthmus-controller, also as the quota controller, serves probes, metrics and status
	// unless --listen sets another.
	ControllerPort = 9471
)

// MemberAccount returns the name of member id's ServiceAccount on the broker.
func MemberAccount(id string) string { return "member-" + id }

// MemberTokens returns the name of the Role, and of its binding, that lets member id request tokens of its own account.
func MemberTokens(id string) string { return MemberAccount(id) + "-token" }

// InvitationAccount returns the name of the ServiceAccount, the Role and the binding of an invitation for member id.
func InvitationAccount(id string) string { return "isthmus-invitation-" + id }

// JoinAccount is the ServiceAccount of a broker-info file, which admits new clusters with any id.
const JoinAccount = "isthmus-join"

// DefaultCredentialLifetime is the default lifetime of a member's token.
const DefaultCredentialLifetime = 7 * 24 * time.Hour

// CredentialLifetime returns the lifetime of members' tokens.
func (s ClusterSetConfigSpec) CredentialLifetime() time.Duration {
	if s.CredentialLifetimeSeconds > 0 {
		return time.Duration(s.CredentialLifetimeSeconds) * time.Second
	}
	return DefaultCredentialLifetime
}

// Credential returns the name of the Secret to which the tokens of member id are bound, "" without one.
func (s ClusterSetConfigSpec) Credential(id string) string {
	for _, m := range s.Members {
		if m.ClusterID == id {
			return m.Credential
		}
	}
	return ""
}

// MemberLease returns the name of the Lease on the broker that member id renews while it is live.
func MemberLease(id string) string { return "member-" + id }

// Names inside a member's installation namespace.
const (
	// DefaultNamespace is the default installation namespace in a member cluster.
	DefaultNamespace = "isthmus-system"
	// DefaultBrokerNamespace is the default namespace of a broker.
	DefaultBrokerNamespace = "isthmus-broker"
	// BrokerSecret is the Secret with the member's credentials for the broker.
	BrokerSecret = "isthmus-broker"
	// BrokerSecretKubeconfig is the key of a kubeconfig whose context names the broker's namespace. It refers to a token file
	// beside it, so that a running process picks up a changed token.
	BrokerSecretKubeconfig = "kubeconfig"
	// BrokerSecretToken is the key of that token.
	BrokerSecretToken = "token"
	// BrokerSecretReplaced is the key of the name of a Secret on the broker with the member's former token, which does not expire.
	// The controller deletes that Secret when it uses its own token.
	BrokerSecretReplaced = "replaced"
	// ClusterSetIPConfigMap is the ConfigMap on the broker with the ClusterSet's settings and blocks in Submariner's format.
	ClusterSetIPConfigMap = "isthmus-clusterset-ip"
)

// IsBridged reports whether a bridge acts for the member, because its cluster runs Lighthouse and has not left. A nil Member is not.
func (m *Member) IsBridged() bool {
	return m != nil && m.Annotations[AnnotationBridge] == BridgeLighthouse && m.Spec.LeftAt == nil
}
