package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// annotationTokenSecret on a member's ServiceAccount names the Secret of its token, if it is not the Secret of the first
// join.
const annotationTokenSecret = "isthmus.dev/token-secret"

// controllerDeployment is the Deployment of a member's controller, in the installation namespace.
const controllerDeployment = "isthmus-controller"

// brokerName names the broker in errors.
const brokerName = "the broker"

// named returns the metadata of an object on the broker that belongs to member id.
func named(namespace, name, id string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: admin.Ours()}
	m.Labels[v1alpha1.LabelCluster] = id
	return m
}

// tokenSecret returns the Secret for which the broker issues a token of member id.
func tokenSecret(namespace, name, id string) *corev1.Secret {
	s := &corev1.Secret{ObjectMeta: named(namespace, name, id), Type: corev1.SecretTypeServiceAccountToken}
	s.Annotations = map[string]string{corev1.ServiceAccountNameKey: v1alpha1.MemberAccount(id)}
	return s
}

// ensureAccount creates member id's account on the broker if it is missing, and returns its token.
func ensureAccount(ctx context.Context, broker client.Client, namespace, id string) (string, error) {
	account := &corev1.ServiceAccount{ObjectMeta: named(namespace, v1alpha1.MemberAccount(id), id)}
	if err := grantRights(ctx, broker, account, id); err != nil {
		return "", err
	}
	if err := broker.Get(ctx, client.ObjectKeyFromObject(account), account); err != nil {
		return "", fmt.Errorf("read ServiceAccount %s/%s on the broker: %w", namespace, account.Name, err)
	}
	name := account.Annotations[annotationTokenSecret]
	if name == "" {
		name = account.Name + "-token"
	}
	secret := tokenSecret(namespace, name, id)
	if err := admin.Apply(ctx, broker, secret); err != nil {
		return "", fmt.Errorf("on the broker: %w", err)
	}
	return admin.Token(ctx, broker, brokerName, secret)
}

// grantRights creates account and binds it to the Role of members.
func grantRights(ctx context.Context, broker client.Client, account *corev1.ServiceAccount, id string) error {
	bound := binding(account.Namespace, account.Name, memberRole, account.Name)
	bound.Labels[v1alpha1.LabelCluster] = id
	for _, obj := range []client.Object{account, bound} {
		if err := admin.Apply(ctx, broker, obj); err != nil {
			return fmt.Errorf("on the broker: %w", err)
		}
	}
	return nil
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
	fresh, token, err := m.newToken(ctx, broker)
	if err != nil {
		return r, err
	}
	err = admin.Apply(ctx, member, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.BrokerSecret, Labels: admin.Ours()},
		Data:       map[string][]byte{v1alpha1.BrokerSecretKubeconfig: kubeconfig, v1alpha1.BrokerSecretToken: []byte(token)},
	})
	if err != nil {
		return r, fmt.Errorf("in the member: %w", err)
	}
	if r.Restarted, err = restartController(ctx, member, namespace, timeout); err != nil {
		return r, fmt.Errorf("%w; the old credentials stay valid until isthmusctl rotate succeeds", err)
	}
	r.Revoked, err = revokeTokens(ctx, broker, m.brokerNamespace, m.id, fresh)
	return r, err
}

// newToken creates another token of the member, records it for a later join, and waits until the broker accepts it.
func (m managedMember) newToken(ctx context.Context, broker client.Client) (secret, token string, err error) {
	if err := m.relist(ctx, broker); err != nil {
		return "", "", err
	}
	account := &corev1.ServiceAccount{ObjectMeta: named(m.brokerNamespace, v1alpha1.MemberAccount(m.id), m.id)}
	if err := grantRights(ctx, broker, account, m.id); err != nil {
		return "", "", err
	}
	fresh := tokenSecret(m.brokerNamespace, "", m.id)
	fresh.GenerateName = account.Name + "-token-"
	if err := broker.Create(ctx, fresh, admin.FieldOwner); err != nil {
		return "", "", fmt.Errorf("create a new token on the broker: %w", err)
	}
	if token, err = admin.Token(ctx, broker, brokerName, fresh); err != nil {
		return "", "", err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{annotationTokenSecret: fresh.Name}}})
	if err != nil {
		return "", "", fmt.Errorf("encode annotation: %w", err)
	}
	if err := broker.Patch(ctx, account, client.RawPatch(types.MergePatchType, patch), admin.FieldOwner); err != nil {
		return "", "", fmt.Errorf("write ServiceAccount %s/%s on the broker: %w", account.Namespace, account.Name, err)
	}
	err = admin.Accepted(ctx, broker, brokerName, token)
	return fresh.Name, token, err
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

// restartController restarts the pods of the member's controller and waits until the new ones are ready. It returns false
// if the member has no Deployment of the controller.
func restartController(ctx context.Context, member client.Client, namespace string, timeout time.Duration) (bool, error) {
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: controllerDeployment}}
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
	what := fmt.Sprintf("Deployment %s/%s", namespace, controllerDeployment)
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

// revokeTokens deletes all tokens of a member but that of the Secret named keep, and returns their number.
func revokeTokens(ctx context.Context, broker client.Client, namespace, id, keep string) (int, error) {
	secrets := &corev1.SecretList{}
	if err := broker.List(ctx, secrets, client.InNamespace(namespace), client.MatchingFields{"type": string(corev1.SecretTypeServiceAccountToken)}); err != nil {
		return 0, fmt.Errorf("list Secrets on the broker: %w", err)
	}
	revoked := 0
	for i := range secrets.Items {
		s := &secrets.Items[i]
		if s.Name == keep || s.Annotations[corev1.ServiceAccountNameKey] != v1alpha1.MemberAccount(id) {
			continue
		}
		if err := broker.Delete(ctx, s); client.IgnoreNotFound(err) != nil {
			return revoked, fmt.Errorf("delete Secret %s/%s on the broker: %w", namespace, s.Name, err)
		}
		revoked++
	}
	return revoked, nil
}

// Revoke removes all rights and credentials of member id on the broker in namespace. Removing the rights takes effect at
// once; the API server may accept deleted tokens for some more seconds. The member's published objects stay until Leave
// or ForceLeave. An unknown id is ErrNoMember.
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
	account := named(namespace, v1alpha1.MemberAccount(id), id)
	if err := admin.DeleteIfThere(ctx, broker, &rbacv1.RoleBinding{ObjectMeta: account}); err != nil {
		return err
	}
	if err := unlist(ctx, broker, namespace, id); err != nil {
		return err
	}
	if _, err := revokeTokens(ctx, broker, namespace, id, ""); err != nil {
		return err
	}
	return admin.DeleteIfThere(ctx, broker, &corev1.ServiceAccount{ObjectMeta: account})
}
