package membership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

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

// memberRole is the Role of every member, in the broker's namespace.
const memberRole = "isthmus-member"

// defaultClusterSetID is the default id of a ClusterSet.
const defaultClusterSetID = "clusterset"

// How many clusters a BrokerInfo admits.
const (
	defaultAdmitted = 10
	maxAdmitted     = 10_000
)

// maxCredentialLifetime is the longest lifetime of members' tokens.
const maxCredentialLifetime = 365 * 24 * time.Hour

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
	// PullSecrets are the names of Secrets in Namespace with which nodes pull that image: nil keeps those that there are.
	PullSecrets []string
	// CredentialLifetime is that of members' tokens; 0 keeps the present value, initially 7 days.
	CredentialLifetime time.Duration
	// AdmitAnyCluster writes a BrokerInfo that admits new clusters with any id. Without it the earlier ones end.
	AdmitAnyCluster bool
	// AdmitAtMost is how many clusters the BrokerInfo admits; 0 means 10.
	AdmitAtMost int64
	// TokenTTL is the lifetime of the BrokerInfo. The API server may grant less.
	TokenTTL time.Duration
	// Server and CA (PEM) are the address of the broker for members, and its certificate authority.
	Server string
	CA     []byte
}

// Deployed is the result of DeployBroker.
type Deployed struct {
	Info   BrokerInfo // without AdmitAnyCluster it has no token
	Config *v1alpha1.ClusterSetConfig
	Notes  []string // for the administrator, one sentence each
}

// DeployBroker makes a namespace of the cluster behind c a broker, or updates one: it writes definitions, settings, admission
// policies, and a credential for joining if b asks for one. It gives members of earlier versions the right to renew their
// tokens. It refuses to change settings on which members rely, and ranges that overlap the
// cluster's own addresses (ErrOverlap).
func DeployBroker(ctx context.Context, c client.Client, b Broker) (Deployed, error) {
	if err := b.validate(); err != nil {
		return Deployed{}, err
	}
	d, err := b.deploy(ctx, c)
	if err != nil {
		return d, err
	}
	if err := errors.Join(prune(ctx, c, b.Namespace, time.Now()), pruneInvitations(ctx, c, b.Namespace, time.Now())); err != nil {
		return d, err
	}
	if err := b.limitJoins(ctx, c, &d); err != nil {
		return d, err
	}
	d.Info = describeBroker(d.Config, b.Server, b.CA)
	return d, b.admitAnyCluster(ctx, c, &d.Info)
}

// deploy writes all of a broker but what admits any cluster. It deletes nothing.
func (b Broker) deploy(ctx context.Context, c client.Client) (Deployed, error) {
	var d Deployed
	definitions, err := admin.PlanDefinitions(ctx, c)
	if err != nil {
		return d, err
	}
	if err := definitions.Apply(ctx, c); err != nil {
		return d, err
	}
	defined := time.Now()
	if err := admin.Apply(ctx, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.Namespace, Labels: admin.Ours()}}); err != nil {
		return d, err
	}
	if err := b.settings(ctx, c, &d); err != nil {
		return d, err
	}
	protection, err := b.protection()
	if err != nil {
		return d, err
	}
	for _, obj := range protection {
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
	if err := b.equipMembers(ctx, c, &d); err != nil {
		return d, err
	}
	if definitions.Extends(configDefinition) {
		if err := admin.Wait(ctx, time.Until(defined.Add(watchersFollow))); err != nil {
			return d, err
		}
		if err := b.writeAgain(ctx, c, &d); err != nil {
			return d, err
		}
	}
	return d, publishBlocks(ctx, c, b.Namespace)
}

// protection returns the objects that restrict members to what is theirs.
func (b Broker) protection() ([]client.Object, error) {
	policies, err := access.Policies(b.Namespace)
	return slices.Concat(b.memberRights(), reservedRights(b.Namespace), policies), err
}

// describeBroker returns the content of a broker-info file, without a credential.
func describeBroker(config *v1alpha1.ClusterSetConfig, server string, ca []byte) BrokerInfo {
	return BrokerInfo{
		Kind: brokerInfoKind, ClusterSetID: config.Spec.ClusterSetID,
		ClusterSetIPEnabled: &config.Spec.ClusterSetIPEnabled, ClusterSetIPCIDRRange: config.Spec.ClusterSetIPCIDRRange,
		ClusterSetIPClusterSize: config.Spec.ClusterSetIPClusterSize, Settings: config.Spec.Settings,
		Server: server, CA: ca, Namespace: config.Namespace,
	}
}

// limitJoins writes how many members the BrokerInfo admits clusters up to.
func (b Broker) limitJoins(ctx context.Context, c client.Client, d *Deployed) error {
	// The API server drops the new field until it serves the new definition.
	return admin.Await(ctx, "write how many clusters the file admits", func() (bool, error) {
		err := retry.RetryOnConflict(contention, func() (err error) {
			if d.Config, err = readConfig(ctx, c, b.Namespace); err != nil {
				return err
			}
			most := int64(0)
			if b.AdmitAnyCluster {
				most = int64(len(d.Config.Spec.Members)) + cmp.Or(b.AdmitAtMost, defaultAdmitted)
			}
			if d.Config.Spec.AdmitUpTo == most {
				return nil
			}
			d.Config.Spec.AdmitUpTo = most
			return c.Update(ctx, d.Config, admin.FieldOwner)
		})
		return (d.Config.Spec.AdmitUpTo > 0) == b.AdmitAnyCluster, err
	})
}

// admitAnyCluster writes the account that may register new clusters, and its token into info; or it removes that account.
func (b Broker) admitAnyCluster(ctx context.Context, c client.Client, info *BrokerInfo) error {
	role := joinRole(b.Namespace)
	account, bound := &corev1.ServiceAccount{ObjectMeta: role.ObjectMeta}, binding(b.Namespace, role.Name, role.Name, role.Name)
	for _, obj := range []client.Object{bound, role, account} {
		write := func() error { return admin.Apply(ctx, c, obj) }
		if !b.AdmitAnyCluster {
			write = func() error { return admin.DeleteIfThere(ctx, c, obj) }
		}
		if err := write(); err != nil {
			return err
		}
	}
	if !b.AdmitAnyCluster {
		return nil
	}
	var err error
	info.Token, info.Expires, err = admin.RequestToken(ctx, c, client.ObjectKeyFromObject(account), b.TokenTTL, "")
	return err
}

// joinRole returns the rights of a BrokerInfo that admits any cluster.
func joinRole(namespace string) *rbacv1.Role {
	return &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.JoinAccount, Labels: admin.Ours()}, Rules: access.JoinRules(memberRole),
	}
}

// equipMembers gives present members without a credential one, so that their controllers replace the tokens of an earlier version.
func (b Broker) equipMembers(ctx context.Context, c client.Client, d *Deployed) error {
	// The API server drops the new field until it serves the new definition.
	err := admin.Await(ctx, "write the members' credentials", func() (bool, error) {
		err := retry.RetryOnConflict(contention, func() error {
			config, err := readConfig(ctx, c, b.Namespace)
			if err != nil {
				return err
			}
			d.Config = config
			before := slices.Clone(config.Spec.Members)
			for _, m := range before {
				config.Spec.Members = withAnyCredential(config.Spec.Members, m.ClusterID)
			}
			if equality.Semantic.DeepEqual(before, config.Spec.Members) {
				return nil
			}
			return c.Update(ctx, config, admin.FieldOwner)
		})
		return !slices.ContainsFunc(d.Config.Spec.Members, func(m v1alpha1.MemberBlocks) bool { return m.Credential == "" }), err
	})
	if err != nil {
		return err
	}
	// All members, because an earlier run may have been interrupted here.
	for _, m := range d.Config.Spec.Members {
		if err := grantRights(ctx, c, b.Namespace, m.ClusterID, m.Credential); err != nil {
			return err
		}
	}
	return nil
}

// writeAgain writes the ClusterSetConfig as it is, so that those who missed fields of the last write get them.
func (b Broker) writeAgain(ctx context.Context, c client.Client, d *Deployed) error {
	return retry.RetryOnConflict(contention, func() (err error) {
		if d.Config, err = readConfig(ctx, c, b.Namespace); err != nil {
			return err
		}
		markWritten(d.Config)
		return c.Update(ctx, d.Config, admin.FieldOwner)
	})
}

func (b Broker) validate() error {
	if b.ClusterSetID != "" {
		if err := clusterset.ClusterID(b.ClusterSetID).Validate(); err != nil {
			return fmt.Errorf("the ClusterSet's id follows the rules of cluster ids: %w", err)
		}
	}
	if b.AdmitAnyCluster {
		if err := checkTTL(b.TokenTTL); err != nil {
			return err
		}
		if n := b.AdmitAtMost; n < 0 || n > maxAdmitted {
			return fmt.Errorf("a file cannot admit %d clusters; choose 1 to %d", n, maxAdmitted)
		}
	}
	if l := b.CredentialLifetime; l != 0 && (l < 10*time.Minute || l > maxCredentialLifetime) {
		return fmt.Errorf("members' tokens cannot live for %s; choose 10m to 8760h (a year)", l)
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
	if b.CredentialLifetime != 0 {
		spec.CredentialLifetimeSeconds = int64(b.CredentialLifetime / time.Second)
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

// memberRights returns the Role of members.
func (b Broker) memberRights() []client.Object {
	return []client.Object{&rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.Namespace, Name: memberRole, Labels: admin.Ours()}, Rules: access.MemberBrokerRules(),
	}}
}

// binding returns a RoleBinding of role to a ServiceAccount of the same namespace.
func binding(namespace, name, role, account string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: admin.Ours()},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
	}
}
