package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// ControllerSelector is the label of the Deployment of a member's controller, in the installation namespace. Its name depends on the
// chart's fullnameOverride.
const ControllerSelector = "app.kubernetes.io/name=isthmus-controller"

// brokerName names the broker in errors.
const brokerName = "the broker"

// credentialPrefix and a cluster's id begin the name of the Secret to which its tokens are bound.
const credentialPrefix = "credential-"

// named returns the metadata of an object on the broker that belongs to member id.
func named(namespace, name, id string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: admin.Ours()}
	m.Labels[v1alpha1.LabelCluster] = id
	return m
}

// newCredential returns the name of a new Secret for the tokens of member id.
func newCredential(id string) string { return credentialPrefix + id + "-" + rand.String(8) }

// credentialSecret returns the Secret to which tokens of member id are bound. It is empty: tokens end when it is deleted.
func credentialSecret(namespace, name, id string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: named(namespace, name, id), Type: corev1.SecretTypeOpaque}
}

// accountObjects returns the account of member id, the rights of a member for it, and that to request its own tokens. former
// are the Secrets of its tokens that do not expire.
func accountObjects(namespace, id string, former ...string) []client.Object {
	account := v1alpha1.MemberAccount(id)
	rights := binding(namespace, account, memberRole, account)
	tokens := binding(namespace, v1alpha1.MemberTokens(id), v1alpha1.MemberTokens(id), account)
	rights.Labels[v1alpha1.LabelCluster], tokens.Labels[v1alpha1.LabelCluster] = id, id
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: named(namespace, account, id)},
		rights,
		&rbacv1.Role{ObjectMeta: named(namespace, v1alpha1.MemberTokens(id), id), Rules: access.MemberTokenRules(id, former...)},
		tokens,
	}
}

// grantRights writes the account of member id with its rights, and the Secret for its tokens. It restores what is missing, and
// needs the rights of an administrator.
func grantRights(ctx context.Context, broker client.Client, namespace, id, credential string) error {
	rights, err := rightsOf(ctx, broker, namespace, id, credential)
	if err != nil {
		return err
	}
	for _, obj := range rights {
		if err := admin.Apply(ctx, broker, obj); err != nil {
			return fmt.Errorf("on the broker: %w", err)
		}
	}
	return nil
}

// rightsOf returns the objects of grantRights.
func rightsOf(ctx context.Context, broker client.Client, namespace, id, credential string) ([]client.Object, error) {
	former, err := formerTokens(ctx, broker, namespace, id)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(former))
	for _, s := range former {
		names = append(names, s.Name)
	}
	return append(accountObjects(namespace, id, names...), credentialSecret(namespace, credential, id)), nil
}

// createAccount is grantRights for a new member, with the rights of a broker-info file: it creates objects and changes none. An
// interrupted join has left some.
func createAccount(ctx context.Context, broker client.Client, namespace, id, credential string) error {
	for _, obj := range append(accountObjects(namespace, id), credentialSecret(namespace, credential, id)) {
		name := obj.GetName()
		err := broker.Create(ctx, obj, admin.FieldOwner)
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create %T %s/%s on the broker: %w", obj, namespace, name, err)
		}
	}
	return nil
}

// requestToken returns a new token of member id that is bound to credential. API servers may grant a shorter lifetime. It waits
// a moment where it is forbidden, because the API server learns of new rights and settings with a delay.
func requestToken(ctx context.Context, broker client.Client, namespace, id, credential string, lifetime time.Duration) (token string, err error) {
	account := types.NamespacedName{Namespace: namespace, Name: v1alpha1.MemberAccount(id)}
	err = settled(ctx, func() error {
		token, _, err = admin.RequestToken(ctx, broker, account, lifetime, credential)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("on the broker: %w", err)
	}
	return token, nil
}

// settleTime is how long an API server may take to act on new rights, policies and settings.
const settleTime = 3 * time.Second

// settled repeats do for a moment while it is forbidden.
func settled(ctx context.Context, do func() error) error {
	until := time.Now().Add(settleTime)
	for {
		err := do()
		if !apierrors.IsForbidden(err) || time.Now().After(until) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Rotated is the result of Rotate.
type Rotated struct {
	ClusterID string
	Revoked   int // deleted old tokens
	// Restarted means that the controller runs with the new token. It is false if the member has no Deployment of it.
	Restarted bool
}

// Rotate gives the member behind member, installed in namespace, a new token for its broker and deletes the old ones. The
// controller has a valid token at any time: Rotate writes the new one into the member, restarts the controller, and
// deletes the old ones when the controller is ready, which proves that the broker accepts the new one. After an earlier
// error the old tokens stay valid. Rotate also restores the rights of a revoked member. A non-empty id must be the
// member's.
func Rotate(ctx context.Context, broker, member client.Client, namespace, id string, timeout time.Duration) (Rotated, error) {
	var r Rotated
	m, err := locate(ctx, broker, member, namespace)
	if err != nil {
		return r, err
	}
	if r.ClusterID = m.id; id != "" && id != m.id {
		return r, fmt.Errorf("this cluster is member %s, not %s; use the kubeconfig of %s", m.id, id, id)
	}
	secret := &corev1.Secret{}
	key := client.ObjectKey{Namespace: namespace, Name: v1alpha1.BrokerSecret}
	if err := member.Get(ctx, key, secret); err != nil {
		return r, fmt.Errorf("read Secret %s of the member: %w", key, err)
	}
	kubeconfig, err := withTokenFile(secret.Data[v1alpha1.BrokerSecretKubeconfig])
	if err != nil {
		return r, fmt.Errorf("read Secret %s of the member; run isthmusctl join again: %w", key, err)
	}
	config, err := m.relist(ctx, broker)
	if err != nil {
		return r, err
	}
	fresh := newCredential(m.id)
	if err := grantRights(ctx, broker, m.brokerNamespace, m.id, fresh); err != nil {
		return r, err
	}
	token, err := requestToken(ctx, broker, m.brokerNamespace, m.id, fresh, config.Spec.CredentialLifetime())
	if err == nil {
		err = admin.Accepted(ctx, broker, brokerName, token)
	}
	if err != nil {
		return r, err
	}
	write := func() error {
		err := admin.Apply(ctx, member, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.BrokerSecret, Labels: admin.Ours()},
			Data:       map[string][]byte{v1alpha1.BrokerSecretKubeconfig: kubeconfig, v1alpha1.BrokerSecretToken: []byte(token)},
		})
		if err != nil {
			return fmt.Errorf("in the member: %w", err)
		}
		return nil
	}
	if err := write(); err != nil {
		return r, err
	}
	if r.Restarted, err = restartController(ctx, member, namespace, timeout); err != nil {
		return r, fmt.Errorf("%w; the old credentials stay valid until isthmusctl rotate succeeds", err)
	}
	if r.Revoked, err = revokeTokens(ctx, broker, m.brokerNamespace, m.id, fresh); err != nil {
		return r, err
	}
	if err := m.replaceCredential(ctx, broker, string(secret.Data[v1alpha1.BrokerSecretToken]), fresh, r.Revoked > 0); err != nil {
		return r, err
	}
	return r, write() // the controller may have renewed the former token meanwhile
}

// replaceCredential binds the later tokens of the member to the Secret fresh. Before, it waits until the broker refuses the
// former tokens: with one a thief could request another that is bound to fresh.
func (m managedMember) replaceCredential(ctx context.Context, broker client.Client, former, fresh string, revoked bool) error {
	if err := removeInvitation(ctx, broker, m.brokerNamespace, m.id); err != nil {
		return err
	}
	if revoked {
		if err := admin.AwaitCaches(ctx); err != nil {
			return fmt.Errorf("the former tokens of cluster %s have ended, and the new one cannot be renewed yet; run isthmusctl rotate again: %w", m.id, err)
		}
	}
	if revoked && former != "" {
		if err := admin.Refused(ctx, broker, brokerName, former); err != nil {
			return err
		}
	}
	err := retry.RetryOnConflict(contention, func() error {
		config, err := readConfig(ctx, broker, m.brokerNamespace)
		if err != nil {
			return err
		}
		config.Spec.Members = withCredential(config.Spec.Members, m.id, fresh)
		return broker.Update(ctx, config, admin.FieldOwner)
	})
	if err != nil {
		return fmt.Errorf("write the credential of cluster %s into the ClusterSetConfig; run isthmusctl rotate again: %w", m.id, err)
	}
	config, err := readConfig(ctx, broker, m.brokerNamespace)
	if err != nil {
		return err
	}
	if config.Spec.Credential(m.id) != fresh {
		return errNoCredentials
	}
	// The Role need not permit the deletion of former tokens any more.
	return grantRights(ctx, broker, m.brokerNamespace, m.id, fresh)
}

// withTokenFile returns kubeconfig with a token file as its only credential.
func withTokenFile(kubeconfig []byte) ([]byte, error) {
	config, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read its kubeconfig: %w", err)
	}
	current := config.Contexts[config.CurrentContext]
	if current == nil || config.AuthInfos[current.AuthInfo] == nil {
		return nil, errors.New("its kubeconfig has no current context with a user")
	}
	user := config.AuthInfos[current.AuthInfo]
	user.Token, user.TokenFile = "", v1alpha1.BrokerSecretToken
	return clientcmd.Write(*config)
}

// Controller returns the Deployment of the controller in a member's installation namespace, or nil if there is none. Two are an
// error: either could run.
func Controller(ctx context.Context, member client.Reader, namespace string) (*appsv1.Deployment, error) {
	selector, err := labels.Parse(ControllerSelector)
	if err != nil {
		return nil, err
	}
	all := &appsv1.DeploymentList{}
	if err := member.List(ctx, all, client.InNamespace(namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("list Deployments in namespace %s: %w", namespace, err)
	}
	return OnlyOne(all.Items, "Deployment", namespace, ControllerSelector)
}

// OnlyOne returns the only one of a namespace's workloads of a kind with a label, or nil if there is none. Two are an error: either could
// be that of this installation.
func OnlyOne[T any, P interface {
	*T
	metav1.Object
}](all []T, kind, namespace, label string) (*T, error) {
	switch n := len(all); n {
	case 0:
		return nil, nil //nolint:nilnil // its absence is no error
	case 1:
		return &all[0], nil
	default:
		return nil, fmt.Errorf("namespace %s has %d %ss with the label %s, %s and %s; delete the one that is not of this installation",
			namespace, n, kind, label, P(&all[0]).GetName(), P(&all[1]).GetName())
	}
}

// restartController restarts the pods of the member's controller and waits until the new ones are ready. It returns false
// if the member has no Deployment of the controller.
func restartController(ctx context.Context, member client.Client, namespace string, timeout time.Duration) (bool, error) {
	d, err := Controller(ctx, member, namespace)
	if err != nil || d == nil {
		return false, err
	}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{
		"annotations": map[string]any{"isthmus.dev/restarted-at": time.Now().UTC().Format(time.RFC3339Nano)},
	}}}})
	if err != nil {
		return false, fmt.Errorf("encode annotation: %w", err)
	}
	err = member.Patch(ctx, d, client.RawPatch(types.StrategicMergePatchType, patch), admin.FieldOwner)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	what := fmt.Sprintf("Deployment %s/%s", namespace, d.Name)
	if err != nil {
		return false, fmt.Errorf("restart %s: %w", what, err)
	}
	overdue := fmt.Sprintf("%s is not ready with the new credentials after %s", what, timeout)
	return true, admin.AwaitFor(ctx, timeout, overdue, func() (bool, error) {
		if err := member.Get(ctx, client.ObjectKeyFromObject(d), d); err != nil {
			return false, fmt.Errorf("read %s: %w", what, err)
		}
		want := int32(1)
		if d.Spec.Replicas != nil {
			want = *d.Spec.Replicas
		}
		s := d.Status
		return s.ObservedGeneration >= d.Generation && s.UpdatedReplicas == want && s.Replicas == want && s.ReadyReplicas == want, nil
	})
}

// formerTokens returns the Secrets with tokens of member id that do not expire. Earlier versions of Isthmus issued them.
func formerTokens(ctx context.Context, broker client.Client, namespace, id string) ([]corev1.Secret, error) {
	secrets := &corev1.SecretList{}
	if err := broker.List(ctx, secrets, client.InNamespace(namespace), client.MatchingFields{"type": string(corev1.SecretTypeServiceAccountToken)}); err != nil {
		return nil, fmt.Errorf("list Secrets on the broker: %w", err)
	}
	return slices.DeleteFunc(secrets.Items, func(s corev1.Secret) bool {
		return s.Annotations[corev1.ServiceAccountNameKey] != v1alpha1.MemberAccount(id)
	}), nil
}

// revokeTokens deletes the Secrets of all tokens of a member but those that are bound to keep, and returns their number.
func revokeTokens(ctx context.Context, broker client.Client, namespace, id, keep string) (int, error) {
	all, err := formerTokens(ctx, broker, namespace, id)
	if err != nil {
		return 0, err
	}
	bound := &corev1.SecretList{}
	if err := broker.List(ctx, bound, client.InNamespace(namespace), client.MatchingLabels{v1alpha1.LabelCluster: id}); err != nil {
		return 0, fmt.Errorf("list Secrets on the broker: %w", err)
	}
	for _, s := range bound.Items {
		if strings.HasPrefix(s.Name, credentialPrefix) && s.Name != keep {
			all = append(all, s)
		}
	}
	for i := range all {
		if err := broker.Delete(ctx, &all[i]); client.IgnoreNotFound(err) != nil {
			return i, fmt.Errorf("delete Secret %s/%s on the broker: %w", namespace, all[i].Name, err)
		}
	}
	return len(all), nil
}

// Revoke removes all rights and credentials of member id on the broker in namespace, and an invitation for it. Removing the
// rights takes effect at once; the API server may accept deleted tokens for some more seconds. The member's published objects
// stay until Leave or ForceLeave. An unknown id is ErrNoMember.
func Revoke(ctx context.Context, broker client.Client, namespace, id string) error {
	if _, err := readConfig(ctx, broker, namespace); err != nil {
		return err
	}
	if _, err := readMember(ctx, broker, namespace, id); err != nil {
		return err
	}
	return revokeAccount(ctx, broker, namespace, id)
}

// revokeAccount removes all rights and then all credentials of member id on the broker.
func revokeAccount(ctx context.Context, broker client.Client, namespace, id string) error {
	if err := removeInvitation(ctx, broker, namespace, id); err != nil {
		return err
	}
	account, tokens := named(namespace, v1alpha1.MemberAccount(id), id), named(namespace, v1alpha1.MemberTokens(id), id)
	for _, obj := range []client.Object{&rbacv1.RoleBinding{ObjectMeta: account}, &rbacv1.RoleBinding{ObjectMeta: tokens}, &rbacv1.Role{ObjectMeta: tokens}} {
		if err := admin.DeleteIfThere(ctx, broker, obj); err != nil {
			return err
		}
	}
	if err := unlist(ctx, broker, namespace, id); err != nil {
		return err
	}
	if _, err := revokeTokens(ctx, broker, namespace, id, ""); err != nil {
		return err
	}
	return admin.DeleteIfThere(ctx, broker, &corev1.ServiceAccount{ObjectMeta: account})
}
