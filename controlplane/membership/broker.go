package membership

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Names on the broker, in its namespace.
const (
	// joinAccount is the ServiceAccount whose token a broker-info file carries.
	joinAccount = "isthmus-join"
	// memberRole is what every member may do.
	memberRole = "isthmus-member"
)

// defaultClusterSetID names a ClusterSet that nobody named.
const defaultClusterSetID = "clusterset"

// Broker says how DeployBroker shall set one up.
type Broker struct {
	Namespace string
	// ClusterSetID, ClusterSetIPEnabled and Ranges: the zero value keeps what is there, or chooses the
	// default: "clusterset", true, 243.0.0.0/8 and a random /48 of unique local addresses.
	ClusterSetID        string
	ClusterSetIPEnabled *bool
	Ranges              []netip.Prefix
	// TokenTTL is how long clusters may join with the BrokerInfo. The API server may grant less.
	TokenTTL time.Duration
	// Server and CA (PEM) are how members reach the broker.
	Server string
	CA     []byte
}

// DeployBroker makes a namespace of the cluster behind c a broker, or renews what is there: definitions,
// settings, and a credential for joining. It returns what a cluster needs to join, and the settings.
// Settings that members already rely on cannot change; asking for that is an error, and so are ranges that
// overlap the cluster's own addresses (ErrOverlap).
func DeployBroker(ctx context.Context, c client.Client, b Broker) (BrokerInfo, *v1alpha1.ClusterSetConfig, error) {
	if err := b.validate(); err != nil {
		return BrokerInfo{}, nil, err
	}
	if err := applyCRDs(ctx, c); err != nil {
		return BrokerInfo{}, nil, err
	}
	if err := apply(ctx, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.Namespace, Labels: ours()}}); err != nil {
		return BrokerInfo{}, nil, err
	}
	config, err := b.settings(ctx, c)
	if err != nil {
		return BrokerInfo{}, nil, err
	}
	for _, obj := range b.accounts() {
		if err := apply(ctx, c, obj); err != nil {
			return BrokerInfo{}, nil, err
		}
	}
	seconds := int64(b.TokenTTL / time.Second)
	token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: b.Namespace, Name: joinAccount}}
	if err := c.SubResource("token").Create(ctx, account, token); err != nil {
		return BrokerInfo{}, nil, fmt.Errorf("request a token for ServiceAccount %s/%s: %w", b.Namespace, joinAccount, err)
	}
	return BrokerInfo{
		Kind: brokerInfoKind, ClusterSetID: config.Spec.ClusterSetID,
		Server: b.Server, CA: b.CA, Namespace: b.Namespace,
		Token: token.Status.Token, Expires: token.Status.ExpirationTimestamp.UTC(),
	}, config, nil
}

func (b Broker) validate() error {
	if b.ClusterSetID != "" {
		if err := clusterset.ClusterID(b.ClusterSetID).Validate(); err != nil {
			return fmt.Errorf("the ClusterSet's id is named like a cluster's: %w", err)
		}
	}
	if b.TokenTTL < 10*time.Minute {
		return fmt.Errorf("a credential that lasts %s is too short-lived for an API server; give at least 10m", b.TokenTTL)
	}
	if err := checkVIPs(b.Ranges); err != nil {
		return fmt.Errorf("range of ClusterSetIPs: %w", err)
	}
	return nil
}

// settings creates the ClusterSetConfig, or brings it to what b asks for.
func (b Broker) settings(ctx context.Context, c client.Client) (*v1alpha1.ClusterSetConfig, error) {
	have := &v1alpha1.ClusterSetConfig{}
	key := client.ObjectKey{Namespace: b.Namespace, Name: v1alpha1.ClusterSetConfigName}
	err := c.Get(ctx, key, have)
	if apierrors.IsNotFound(err) {
		have = &v1alpha1.ClusterSetConfig{
			ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, Labels: ours()},
			Spec: v1alpha1.ClusterSetConfigSpec{
				ClusterSetID:          defaultClusterSetID,
				ClusterSetIPEnabled:   true,
				ClusterSetIPCIDRRange: []string{defaultRange4.String(), randomULA().String()},
			},
		}
		have.Spec = b.amend(have.Spec)
		if err := checkRanges(ctx, c, have.Spec.ClusterSetIPCIDRRange); err != nil {
			return nil, err
		}
		if err := c.Create(ctx, have, fieldOwner); err != nil {
			return nil, fmt.Errorf("write ClusterSetConfig %s: %w", key, err)
		}
		return have, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read ClusterSetConfig %s: %w", key, err)
	}

	want := b.amend(*have.Spec.DeepCopy())
	fixed := want.ClusterSetID != have.Spec.ClusterSetID || !slices.Equal(want.ClusterSetIPCIDRRange, have.Spec.ClusterSetIPCIDRRange)
	if !fixed && want.ClusterSetIPEnabled == have.Spec.ClusterSetIPEnabled {
		return have, nil
	}
	if fixed {
		members := &v1alpha1.MemberList{}
		if err := c.List(ctx, members, client.InNamespace(b.Namespace)); err != nil {
			return nil, fmt.Errorf("list members: %w", err)
		}
		if len(members.Items) > 0 {
			return nil, fmt.Errorf("ClusterSet %s with ranges %v has %d members, the first is %s; its id and ranges cannot change before all have left",
				have.Spec.ClusterSetID, have.Spec.ClusterSetIPCIDRRange, len(members.Items), members.Items[0].Name)
		}
		if err := checkRanges(ctx, c, want.ClusterSetIPCIDRRange); err != nil {
			return nil, err
		}
	}
	have.Spec = want
	if err := c.Update(ctx, have, fieldOwner); err != nil {
		return nil, fmt.Errorf("write ClusterSetConfig %s: %w", key, err)
	}
	return have, nil
}

// checkRanges refuses ranges of ClusterSetIPs that mean something else in the broker's own cluster, which
// may be a member too.
func checkRanges(ctx context.Context, c client.Client, ranges []string) error {
	own, err := discover(ctx, c)
	if err != nil {
		return err
	}
	for _, kind := range []struct {
		name  string
		cidrs []netip.Prefix
	}{{"pod", own.Pods}, {"node", own.Nodes}, {"service", own.Services}} {
		if a, b, ok := overlap(parsed(ranges), kind.cidrs); ok {
			return fmt.Errorf("%w: range %s of ClusterSetIPs and %s CIDR %s of the broker's own cluster; choose another --clusterset-ip-cidr-range",
				ErrOverlap, a, kind.name, b)
		}
	}
	return nil
}

// amend returns spec with what b asks for.
func (b Broker) amend(spec v1alpha1.ClusterSetConfigSpec) v1alpha1.ClusterSetConfigSpec {
	if b.ClusterSetID != "" {
		spec.ClusterSetID = b.ClusterSetID
	}
	if b.ClusterSetIPEnabled != nil {
		spec.ClusterSetIPEnabled = *b.ClusterSetIPEnabled
	}
	if b.Ranges != nil {
		spec.ClusterSetIPCIDRRange = texts(b.Ranges)
	}
	return spec
}

// accounts is who may join, and what every member may do. The one who joins members holds all rights of
// a member, for nobody can give away what he does not have.
func (b Broker) accounts() []client.Object {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: b.Namespace, Name: name, Labels: ours()}
	}
	joinRules := append(access.MemberBrokerRules(),
		rbacv1.PolicyRule{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"members"}, Verbs: []string{"get", "list", "create", "update", "patch"}},
		rbacv1.PolicyRule{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"clustersetconfigs"}, Verbs: []string{"get", "update", "patch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"serviceaccounts", "secrets"}, Verbs: []string{"get", "create", "patch"}},
		rbacv1.PolicyRule{APIGroups: []string{rbacv1.GroupName}, Resources: []string{"rolebindings"}, Verbs: []string{"get", "create", "patch"}},
	)
	return []client.Object{
		&rbacv1.Role{ObjectMeta: meta(memberRole), Rules: access.MemberBrokerRules()},
		&corev1.ServiceAccount{ObjectMeta: meta(joinAccount)},
		&rbacv1.Role{ObjectMeta: meta(joinAccount), Rules: joinRules},
		binding(b.Namespace, joinAccount, joinAccount, joinAccount),
	}
}

// binding gives role to a ServiceAccount of the same namespace.
func binding(namespace, name, role, account string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: ours()},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
	}
}

func ours() map[string]string { return map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy} }
