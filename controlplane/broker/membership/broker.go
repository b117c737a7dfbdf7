package membership

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
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
	// ClusterSetID, ClusterSetIPEnabled, Ranges, ClusterSize and each of Settings: the zero value keeps what is
	// there, or chooses the default: "clusterset", true (false for a profile lighthouse that is chosen now),
	// 243.0.0.0/8 and a random /48 of unique local addresses, 65536, and that of the profile.
	ClusterSetID        string
	ClusterSetIPEnabled *bool
	Ranges              []netip.Prefix
	ClusterSize         int64 // addresses of a new member's IPv4 block
	Settings            v1alpha1.Settings
	// TokenTTL is how long clusters may join with the BrokerInfo. The API server may grant less.
	TokenTTL time.Duration
	// Server and CA (PEM) are how members reach the broker.
	Server string
	CA     []byte
}

// Deployed is what became of a Broker.
type Deployed struct {
	Info   BrokerInfo
	Config *v1alpha1.ClusterSetConfig
	Notes  []string // what the person who asked should know, one sentence each
}

// DeployBroker makes a namespace of the cluster behind c a broker, or renews what is there: definitions,
// settings, admission policies and a credential for joining. Settings that members already rely on cannot
// change; asking for that is an error, and so are ranges that overlap the cluster's own addresses
// (ErrOverlap).
func DeployBroker(ctx context.Context, c client.Client, b Broker) (Deployed, error) {
	var d Deployed
	if err := b.validate(); err != nil {
		return d, err
	}
	definitions, err := admin.PlanDefinitions(ctx, c)
	if err != nil {
		return d, err
	}
	if err := definitions.Apply(ctx, c); err != nil {
		return d, err
	}
	if err := admin.Apply(ctx, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.Namespace, Labels: admin.Ours()}}); err != nil {
		return d, err
	}
	if err := b.settings(ctx, c, &d); err != nil {
		return d, err
	}
	policies, err := access.Policies(b.Namespace)
	if err != nil {
		return d, err
	}
	for _, obj := range append(b.accounts(), policies...) {
		err := admin.Apply(ctx, c, obj)
		if meta.IsNoMatchError(err) {
			return d, fmt.Errorf("the cluster cannot be a broker, for nothing would keep members from each other's objects; it needs Kubernetes 1.31 or newer: %w", err)
		}
		if err != nil {
			return d, err
		}
	}
	if err := publishBlocks(ctx, c, b.Namespace); err != nil {
		return d, err
	}
	if err := prune(ctx, c, b.Namespace, time.Now()); err != nil {
		return d, err
	}
	seconds := int64(b.TokenTTL / time.Second)
	token := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: b.Namespace, Name: joinAccount}}
	if err := c.SubResource("token").Create(ctx, account, token); err != nil {
		return d, fmt.Errorf("request a token for ServiceAccount %s/%s: %w", b.Namespace, joinAccount, err)
	}
	d.Info = BrokerInfo{
		Kind: brokerInfoKind, ClusterSetID: d.Config.Spec.ClusterSetID,
		ClusterSetIPEnabled: &d.Config.Spec.ClusterSetIPEnabled, ClusterSetIPCIDRRange: d.Config.Spec.ClusterSetIPCIDRRange,
		ClusterSetIPClusterSize: d.Config.Spec.ClusterSetIPClusterSize, Settings: d.Config.Spec.Settings,
		Server: b.Server, CA: b.CA, Namespace: b.Namespace,
		Token: token.Status.Token, Expires: token.Status.ExpirationTimestamp.UTC(),
	}
	return d, nil
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
	if err := checkRanges(b.Ranges); err != nil {
		return fmt.Errorf("range of ClusterSetIPs: %w", err)
	}
	if b.ClusterSize != 0 {
		return checkSize(b.ClusterSize, b.Ranges)
	}
	return nil
}

// settings creates the ClusterSetConfig, or brings it to what b asks for.
func (b Broker) settings(ctx context.Context, c client.Client, d *Deployed) error {
	key := client.ObjectKey{Namespace: b.Namespace, Name: v1alpha1.ClusterSetConfigName}
	return retry.RetryOnConflict(contention, func() error {
		have := &v1alpha1.ClusterSetConfig{}
		err := c.Get(ctx, key, have)
		switch {
		case apierrors.IsNotFound(err):
			return b.create(ctx, c, d)
		case err != nil:
			return fmt.Errorf("read ClusterSetConfig %s: %w", key, err)
		}
		members := &v1alpha1.MemberList{}
		if err := c.List(ctx, members, client.InNamespace(b.Namespace)); err != nil {
			return fmt.Errorf("list members: %w", err)
		}
		want, notes, err := b.change(have.Spec, members.Items)
		if err != nil {
			return err
		}
		if err := listMembers(ctx, c, &want, members.Items); err != nil {
			return err
		}
		d.Config, d.Notes = have, notes
		if equality.Semantic.DeepEqual(want, have.Spec) {
			return nil
		}
		if !slices.Equal(want.ClusterSetIPCIDRRange, have.Spec.ClusterSetIPCIDRRange) {
			if err := checkOwn(ctx, c, want.ClusterSetIPCIDRRange); err != nil {
				return err
			}
		}
		have.Spec = want
		if err := c.Update(ctx, have, admin.FieldOwner); err != nil {
			return fmt.Errorf("write ClusterSetConfig %s: %w", key, err)
		}
		return nil
	})
}

// create writes the first settings.
func (b Broker) create(ctx context.Context, c client.Client, d *Deployed) error {
	spec := b.amend(v1alpha1.ClusterSetConfigSpec{
		ClusterSetID:          defaultClusterSetID,
		ClusterSetIPEnabled:   true,
		ClusterSetIPCIDRRange: []string{defaultRange4.String(), randomULA().String()},
	})
	if err := checkOwn(ctx, c, spec.ClusterSetIPCIDRRange); err != nil {
		return err
	}
	if err := b.checkSize(spec); err != nil {
		return err
	}
	d.Config = &v1alpha1.ClusterSetConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.Namespace, Name: v1alpha1.ClusterSetConfigName, Labels: admin.Ours()},
		Spec:       spec,
	}
	if err := c.Create(ctx, d.Config, admin.FieldOwner); err != nil {
		return fmt.Errorf("write ClusterSetConfig %s: %w", client.ObjectKeyFromObject(d.Config), err)
	}
	return nil
}

// change returns what have becomes by what b asks for, and what follows for members.
func (b Broker) change(have v1alpha1.ClusterSetConfigSpec, members []v1alpha1.Member) (v1alpha1.ClusterSetConfigSpec, []string, error) {
	want := b.amend(*have.DeepCopy())
	if err := b.checkSize(want); err != nil {
		return want, nil, err
	}
	var ids []string
	for _, m := range members {
		if m.Spec.LeftAt == nil {
			ids = append(ids, m.Name)
		}
	}
	if len(ids) == 0 {
		return want, nil, nil
	}
	if want.ClusterSetID != have.ClusterSetID || !slices.Equal(want.ClusterSetIPCIDRRange, have.ClusterSetIPCIDRRange) {
		return want, nil, fmt.Errorf("ClusterSet %s with ranges %v has %d members, the first is %s; its id and ranges cannot change before all have left",
			have.ClusterSetID, have.ClusterSetIPCIDRRange, len(ids), ids[0])
	}
	var notes []string
	if want.Settings != have.Settings || want.ClusterSetIPEnabled != have.ClusterSetIPEnabled {
		notes = append(notes, "members take changed settings over when they join again: "+strings.Join(ids, ", "))
	}
	return want, notes, nil
}

// listMembers adds to the ClusterSetConfig the members that joined before it had a list. One that was revoked
// has no account, and is not added.
func listMembers(ctx context.Context, c client.Client, spec *v1alpha1.ClusterSetConfigSpec, members []v1alpha1.Member) error {
	for _, m := range members {
		if m.Spec.LeftAt != nil || slices.ContainsFunc(spec.Members, func(b v1alpha1.MemberBlocks) bool { return b.ClusterID == m.Name }) {
			continue
		}
		key := client.ObjectKey{Namespace: m.Namespace, Name: v1alpha1.MemberAccount(m.Name)}
		err := c.Get(ctx, key, &corev1.ServiceAccount{})
		switch {
		case err == nil:
			spec.Members = withBlocks(spec.Members, m.Name, m.Spec.ClusterSetIPCIDR)
		case !apierrors.IsNotFound(err):
			return fmt.Errorf("read ServiceAccount %s: %w", key, err)
		}
	}
	return nil
}

// checkOwn refuses ranges of ClusterSetIPs that mean something else in the broker's own cluster, which
// may be a member too.
func checkOwn(ctx context.Context, c client.Client, ranges []string) error {
	own, err := discover(ctx, c)
	if err != nil {
		return err
	}
	for _, kind := range []struct {
		name  string
		found []Found
	}{{"pod", own.pods}, {"node", own.nodes}, {"service", own.services}} {
		if a, b, ok := overlap(parsed(ranges), prefixes(kind.found)); ok {
			return fmt.Errorf("%w: range %s of ClusterSetIPs and %s CIDR %s of the broker's own cluster; choose another --clusterset-ip-cidr-range",
				ErrOverlap, a, kind.name, b)
		}
	}
	return nil
}

// checkSize refuses a size of blocks that is asked for and that the ranges cannot have.
func (b Broker) checkSize(spec v1alpha1.ClusterSetConfigSpec) error {
	if b.ClusterSize == 0 {
		return nil
	}
	return checkSize(b.ClusterSize, parsed(spec.ClusterSetIPCIDRRange))
}

// amend returns spec with what b asks for.
func (b Broker) amend(spec v1alpha1.ClusterSetConfigSpec) v1alpha1.ClusterSetConfigSpec {
	spec.ClusterSetID = cmp.Or(b.ClusterSetID, spec.ClusterSetID)
	if b.Settings.Profile != "" && b.Settings.Profile != cmp.Or(spec.Profile, v1alpha1.ProfileKEP) {
		spec.ClusterSetIPEnabled = b.Settings.Profile != v1alpha1.ProfileLighthouse
	}
	if b.ClusterSetIPEnabled != nil {
		spec.ClusterSetIPEnabled = *b.ClusterSetIPEnabled
	}
	if b.Ranges != nil {
		spec.ClusterSetIPCIDRRange = texts(b.Ranges)
	}
	if b.ClusterSize != 0 {
		spec.ClusterSetIPClusterSize = 1 << bitsFor(b.ClusterSize)
	}
	spec.Settings = v1alpha1.Settings{
		Profile:            cmp.Or(b.Settings.Profile, spec.Profile),
		PortMerge:          cmp.Or(b.Settings.PortMerge, spec.PortMerge),
		TypeConflict:       cmp.Or(b.Settings.TypeConflict, spec.TypeConflict),
		Endpoints:          cmp.Or(b.Settings.Endpoints, spec.Endpoints),
		ConflictPrecedence: cmp.Or(b.Settings.ConflictPrecedence, spec.ConflictPrecedence),
	}
	return spec
}

// accounts is who may join, and what every member may do. The one who joins members holds all rights of
// a member, for nobody can give away what he does not have.
func (b Broker) accounts() []client.Object {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: b.Namespace, Name: name, Labels: admin.Ours()}
	}
	joinRules := append(access.MemberBrokerRules(),
		rbacv1.PolicyRule{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"members"}, Verbs: []string{"get", "list", "create", "update", "patch", "delete"}},
		rbacv1.PolicyRule{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"clustersetconfigs"}, Verbs: []string{"get", "update", "patch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"serviceaccounts", "secrets"}, Verbs: []string{"get", "create", "patch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "create", "update"}},
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
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: admin.Ours()},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
	}
}
