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
	// joinAccount is the ServiceAccount whose token a broker-info file contains.
	joinAccount = "isthmus-join"
	// memberRole is the Role of every member.
	memberRole = "isthmus-member"
)

// defaultClusterSetID is the default id of a ClusterSet.
const defaultClusterSetID = "clusterset"

// Broker is the configuration for DeployBroker.
type Broker struct {
	Namespace string
	// ClusterSetID, ClusterSetIPEnabled, Ranges, ClusterSize and each of Settings: the zero value keeps the present value,
	// or else chooses the default. The defaults are "clusterset", true (false if the profile lighthouse is chosen now),
	// 243.0.0.0/8 and a random /48 of unique local addresses, 65536, and that of the profile.
	ClusterSetID        string
	ClusterSetIPEnabled *bool
	Ranges              []netip.Prefix
	ClusterSize         int64 // addresses of a new member's IPv4 block
	Settings            v1alpha1.Settings
	// QuotaController is the image of isthmus-controller with which the cluster runs the quota controller: "" keeps what there is,
	// NoQuotaController removes it.
	QuotaController string
	// TokenTTL is the lifetime of the BrokerInfo. The API server may grant less.
	TokenTTL time.Duration
	// Server and CA (PEM) are the address of the broker for members, and its certificate authority.
	Server string
	CA     []byte
}

// Deployed is the result of DeployBroker.
type Deployed struct {
	Info   BrokerInfo
	Config *v1alpha1.ClusterSetConfig
	Notes  []string // for the administrator, one sentence each
}

// DeployBroker makes a namespace of the cluster behind c a broker, or updates one: it writes definitions, settings, admission
// policies and a credential for joining. It refuses to change settings on which members rely, and ranges that overlap the
// cluster's own addresses (ErrOverlap).
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
	for _, obj := range slices.Concat(b.accounts(), reservedRights(b.Namespace), policies) {
		err := admin.Apply(ctx, c, obj)
		if meta.IsNoMatchError(err) {
			return d, fmt.Errorf("the cluster cannot be a broker, because it cannot isolate members from each other; it needs Kubernetes 1.31 or newer: %w", err)
		}
		if err != nil {
			return d, err
		}
	}
	if err := b.quotaController(ctx, c); err != nil {
		return d, err
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
			return fmt.Errorf("the ClusterSet's id follows the rules of cluster ids: %w", err)
		}
	}
	if b.TokenTTL < 10*time.Minute {
		return fmt.Errorf("API servers issue no credential for %s; give at least 10m", b.TokenTTL)
	}
	if err := checkRanges(b.Ranges); err != nil {
		return fmt.Errorf("range of ClusterSetIPs: %w", err)
	}
	if b.ClusterSize != 0 {
		return checkSize(b.ClusterSize, b.Ranges)
	}
	return nil
}

// settings creates or updates the ClusterSetConfig.
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

// create creates the ClusterSetConfig.
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

// change applies b to have, and returns the result with notes for members.
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
		notes = append(notes, "members apply changed settings when they join again: "+strings.Join(ids, ", "))
	}
	return want, notes, nil
}

// listMembers adds the members that joined before the ClusterSetConfig had a list. It skips revoked ones, which have no
// account.
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

// checkOwn refuses ranges of ClusterSetIPs that overlap addresses of the broker's own cluster, which may be a member too.
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

// checkSize refuses a requested block size that the ranges cannot have.
func (b Broker) checkSize(spec v1alpha1.ClusterSetConfigSpec) error {
	if b.ClusterSize == 0 {
		return nil
	}
	return checkSize(b.ClusterSize, parsed(spec.ClusterSetIPCIDRRange))
}

// amend returns spec with the values that b sets.
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

// accounts returns the account for joining and the Role of members. The account has all rights of a member, because RBAC
// lets a subject grant only rights that it has.
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

// binding returns a RoleBinding of role to a ServiceAccount of the same namespace.
func binding(namespace, name, role, account string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: admin.Ours()},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
	}
}
