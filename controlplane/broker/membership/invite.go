package membership

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// annotationExpires on the ServiceAccount of an invitation is the time at which its token expires.
const annotationExpires = "isthmus.dev/expires"

// Invitation describes an invitation.
type Invitation struct {
	Namespace string // the broker
	ClusterID clusterset.ClusterID
	// Blocks are the requested ClusterSetIP blocks, at most one per family. A cluster that was a member keeps its own.
	Blocks []netip.Prefix
	// TTL is the lifetime of the invitation. The API server may grant less.
	TTL time.Duration
	// Server and CA (PEM) are the address of the broker for the member, and its certificate authority.
	Server string
	CA     []byte
}

// configDefinition is the definition of the ClusterSetConfig, which is a parameter of the broker's admission policies.
const configDefinition = "clustersetconfigs.isthmus.dev"

// watchersFollow is how long an API server may serve watches, its own included, by the former definition of a kind: it waits for a
// second and for the requests that are under way. Fields that only the new definition has are missing there, until the object is
// written again.
const watchersFollow = 5 * time.Second

// annotationWritten on the ClusterSetConfig is the time of the last write by markWritten.
const annotationWritten = "isthmus.dev/written-at"

// markWritten makes the next update of a ClusterSetConfig a write, also if nothing else has changed.
func markWritten(config *v1alpha1.ClusterSetConfig) {
	metav1.SetMetaDataAnnotation(&config.ObjectMeta, annotationWritten, time.Now().UTC().Format(time.RFC3339Nano))
}

// Invite prepares the broker for one cluster, and returns the file with which that cluster joins, or joins again. It reserves
// the ClusterSetIP blocks and creates the cluster's account, so that the file itself need not: its token registers that cluster,
// requests that cluster's first token, and does nothing else. An earlier invitation for the id ends. Join ends this one.
func Invite(ctx context.Context, broker client.Client, inv Invitation) (BrokerInfo, error) {
	var info BrokerInfo
	id := string(inv.ClusterID)
	if err := errors.Join(inv.ClusterID.Validate(), checkTTL(inv.TTL)); err != nil {
		return info, err
	}
	if err := pruneInvitations(ctx, broker, inv.Namespace, time.Now()); err != nil {
		return info, err
	}
	config, err := inv.reserve(ctx, broker)
	if err != nil {
		return info, err
	}
	if err := grantRights(ctx, broker, inv.Namespace, id, config.Spec.Credential(id)); err != nil {
		return info, err
	}
	if err := publishBlocks(ctx, broker, inv.Namespace); err != nil {
		return info, err
	}
	info = describeBroker(config, inv.Server, inv.CA)
	info.Kind, info.ClusterID = invitationKind, id
	info.Token, info.Expires, err = inv.issue(ctx, broker)
	return info, err
}

// checkTTL refuses a lifetime that API servers do not grant.
func checkTTL(ttl time.Duration) error {
	if ttl < 10*time.Minute {
		return fmt.Errorf("API servers issue no credential for %s; give at least 10m", ttl)
	}
	return nil
}

// reserve lists the cluster in the ClusterSetConfig with its blocks and a credential.
func (inv Invitation) reserve(ctx context.Context, broker client.Client) (*v1alpha1.ClusterSetConfig, error) {
	id := string(inv.ClusterID)
	var config *v1alpha1.ClusterSetConfig
	err := retry.RetryOnConflict(contention, func() error {
		all, err := readReservations(ctx, broker, inv.Namespace)
		if err != nil {
			return err
		}
		config = all.config
		blocks, err := inv.blocks(ctx, broker, all)
		if err != nil {
			return err
		}
		config.Spec.Members = withAnyCredential(withBlocks(config.Spec.Members, id, blocks), id)
		// Each invitation writes something, in case that the policies missed fields of the last write (watchersFollow).
		markWritten(config)
		return broker.Update(ctx, config, admin.FieldOwner)
	})
	if err != nil {
		return nil, fmt.Errorf("invite cluster %s: %w", id, err)
	}
	if config.Spec.Credential(id) == "" {
		return nil, errNoCredentials
	}
	return config, nil
}

// blocks returns the ClusterSetIP blocks of the invited cluster: those that it has or was promised, or else free ones.
func (inv Invitation) blocks(ctx context.Context, broker client.Client, all *reservations) ([]string, error) {
	id := string(inv.ClusterID)
	if own := all.own(id); own != nil && len(own.Spec.ClusterSetIPCIDR) > 0 && (own.registered || len(inv.Blocks) == 0) {
		if asked := texts(inv.Blocks); !containsAll(own.Spec.ClusterSetIPCIDR, asked) {
			return nil, fmt.Errorf("cluster %s is a member with the ClusterSetIP blocks %s; isthmusctl member set %s --clusterset-ip-cidr changes them",
				id, strings.Join(own.Spec.ClusterSetIPCIDR, ", "), id)
		}
		return own.Spec.ClusterSetIPCIDR, nil
	}
	chosen, err := chooseBlocks(all.config.Spec, inv.Blocks, parsed(all.gone[id].ClusterSetIPCIDR), all.others(id))
	if err != nil {
		return nil, err
	}
	spec := v1alpha1.MemberSpec{ClusterID: id, ClusterSetIPCIDR: texts(chosen)}
	return spec.ClusterSetIPCIDR, checkFormerMember(ctx, broker, inv.Namespace, all, spec)
}

// issue creates the account of the invitation with its rights, and returns its token. Kubernetes deletes the Role and the binding
// with the account.
func (inv Invitation) issue(ctx context.Context, broker client.Client) (token string, expires time.Time, err error) {
	id := string(inv.ClusterID)
	name := v1alpha1.InvitationAccount(id)
	if err := removeInvitation(ctx, broker, inv.Namespace, id); err != nil {
		return "", expires, err
	}
	account := &corev1.ServiceAccount{ObjectMeta: named(inv.Namespace, name, id)}
	account.Annotations = map[string]string{annotationExpires: time.Now().Add(inv.TTL).UTC().Format(time.RFC3339)}
	if err := broker.Create(ctx, account, admin.FieldOwner); err != nil {
		return "", expires, fmt.Errorf("create ServiceAccount %s/%s on the broker: %w", inv.Namespace, name, err)
	}
	owner := []metav1.OwnerReference{{APIVersion: "v1", Kind: "ServiceAccount", Name: name, UID: account.UID}}
	role := &rbacv1.Role{ObjectMeta: named(inv.Namespace, name, id), Rules: access.InvitationRules(id)}
	bound := binding(inv.Namespace, name, name, name)
	bound.Labels[v1alpha1.LabelCluster] = id
	role.OwnerReferences, bound.OwnerReferences = owner, owner
	for _, obj := range []client.Object{role, bound} {
		if err := admin.Apply(ctx, broker, obj); err != nil {
			return "", expires, fmt.Errorf("on the broker: %w", err)
		}
	}
	return admin.RequestToken(ctx, broker, client.ObjectKeyFromObject(account), inv.TTL, "")
}

// removeInvitation deletes an invitation for cluster id, if there is one. Its token ends with its account.
func removeInvitation(ctx context.Context, broker client.Client, namespace, id string) error {
	meta := metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.InvitationAccount(id)}
	for _, obj := range []client.Object{&rbacv1.RoleBinding{ObjectMeta: meta}, &rbacv1.Role{ObjectMeta: meta}, &corev1.ServiceAccount{ObjectMeta: meta}} {
		if err := admin.DeleteIfThere(ctx, broker, obj); err != nil {
			return err
		}
	}
	return nil
}

// endInvitation deletes the account of the invitation with which a cluster has joined.
func endInvitation(ctx context.Context, broker client.Client, namespace, id string) error {
	return admin.DeleteIfThere(ctx, broker, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.InvitationAccount(id)}})
}

// pruneInvitations removes expired invitations, and what they reserved for clusters that never joined.
func pruneInvitations(ctx context.Context, broker client.Client, namespace string, now time.Time) error {
	accounts := &corev1.ServiceAccountList{}
	if err := broker.List(ctx, accounts, client.InNamespace(namespace), client.HasLabels{v1alpha1.LabelCluster}); err != nil {
		return fmt.Errorf("list ServiceAccounts on the broker: %w", err)
	}
	for _, a := range accounts.Items {
		id := a.Labels[v1alpha1.LabelCluster]
		expires, err := time.Parse(time.RFC3339, a.Annotations[annotationExpires])
		if a.Name != v1alpha1.InvitationAccount(id) || err != nil || now.Before(expires) {
			continue
		}
		all, err := readReservations(ctx, broker, namespace)
		if err != nil {
			return err
		}
		remove := removeInvitation
		if !slices.ContainsFunc(all.claims, func(c claim) bool { return c.id == id && !c.invited() }) {
			remove = revokeAccount
		}
		if err := remove(ctx, broker, namespace, id); err != nil {
			return err
		}
	}
	return nil
}
