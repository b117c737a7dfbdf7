package bootstrap

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// itsServer names the API server of a member in errors, which name the member, too.
const itsServer = "its API server"

// credentialPrefix returns the beginning of the names of the Secrets, in a member, to which the tokens of a supervisor are bound.
func credentialPrefix(supervisor clusterset.ClusterID) string {
	return "federation-credential-" + string(supervisor) + "-"
}

func newCredential(supervisor clusterset.ClusterID) string {
	return credentialPrefix(supervisor) + rand.String(8)
}

// tokenRights returns the right of a supervisor in a member to request its own tokens, bound to the Secret credential; "" stands for
// none. former are the Secrets with its tokens that do not expire, which it may delete.
func tokenRights(namespace string, supervisor clusterset.ClusterID, credential string, former []string) []client.Object {
	m := metadata(namespace, supervisor)
	m.Name = admission.TokensName + "-" + string(supervisor)
	var rules []rbacv1.PolicyRule
	if credential != "" {
		rules = append(rules,
			rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: []string{federationv1alpha1.SupervisorAccount(supervisor)}, Verbs: []string{"create"}},
			rbacv1.PolicyRule{APIGroups: []string{federationv1alpha1.GroupVersion.Group}, Resources: []string{federationv1alpha1.ResourceCredentials}, ResourceNames: []string{credential}, Verbs: []string{"use"}})
	}
	if len(former) > 0 {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: former, Verbs: []string{"delete"}})
	}
	return []client.Object{
		&rbacv1.Role{ObjectMeta: m, Rules: rules},
		&rbacv1.RoleBinding{
			ObjectMeta: m, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: m.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: federationv1alpha1.SupervisorAccount(supervisor)}},
		},
	}
}

// credentials returns the Secrets of a supervisor's account in a member: those to which its tokens are bound, and those with a token
// that does not expire, which earlier versions of Isthmus issued.
func (s *survey) credentials(ctx context.Context, member *Cluster, supervisor clusterset.ClusterID) (bound, former []corev1.Secret, err error) {
	list := &corev1.SecretList{}
	if err := member.Client.List(ctx, list, client.InNamespace(s.namespace), client.MatchingLabels(metadata(s.namespace, supervisor).Labels)); err != nil {
		return nil, nil, fmt.Errorf("list Secrets of namespace %s: %w", s.namespace, err)
	}
	for _, secret := range list.Items {
		switch {
		case secret.Type == corev1.SecretTypeServiceAccountToken:
			former = append(former, secret)
		case strings.HasPrefix(secret.Name, credentialPrefix(supervisor)):
			bound = append(bound, secret)
		}
	}
	return bound, former, nil
}

// grant creates the account of a supervisor in a member if it is missing, with its rights. It may bind its tokens to the Secret
// credential; "" stands for none.
func (s *survey) grant(ctx context.Context, member *Cluster, supervisor clusterset.ClusterID, credential string) error {
	_, former, err := s.credentials(ctx, member, supervisor)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(former))
	for i := range former {
		names = append(names, former[i].Name)
	}
	serviceAccount, rights := account(s.namespace, supervisor)
	wanted := append([]client.Object{serviceAccount}, rights...)
	wanted = append(wanted, tokenRights(s.namespace, supervisor, credential, names)...)
	for _, obj := range wanted {
		if err := admin.Apply(ctx, member.Client, obj); err != nil {
			return err
		}
	}
	return nil
}

// createCredential creates the Secret name, to which tokens of a supervisor are bound, in a member. It is empty.
func (s *survey) createCredential(ctx context.Context, member *Cluster, supervisor clusterset.ClusterID, name string) error {
	m := metadata(s.namespace, supervisor)
	m.Name = name
	return admin.Apply(ctx, member.Client, &corev1.Secret{ObjectMeta: m, Type: corev1.SecretTypeOpaque})
}

// requestToken returns a new token of a supervisor's account in a member, bound to the Secret bound.
func (s *survey) requestToken(ctx context.Context, member *Cluster, supervisor clusterset.ClusterID, bound string) (string, error) {
	account := types.NamespacedName{Namespace: s.namespace, Name: federationv1alpha1.SupervisorAccount(supervisor)}
	token, _, err := admin.RequestToken(ctx, member.Client, account, federationv1alpha1.TokenLifetime, bound)
	if err != nil {
		return "", err
	}
	return token, admin.Accepted(ctx, member.Client, itsServer, token)
}

// stored returns the content of the supervisor's Secret for a member. It is empty if there is no Secret.
func stored(ctx context.Context, supervisor, member *Cluster) (map[string][]byte, error) {
	secret := &corev1.Secret{ObjectMeta: secretMeta(secretPrefix + string(member.ID))}
	if err := supervisor.Client.Get(ctx, client.ObjectKeyFromObject(secret), secret); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return secret.Data, nil
}

// ensureToken gives a supervisor an account in a member, and a token of it. A token that the member accepts stays, even one that does
// not expire: the supervisor's controller replaces it.
func (s *survey) ensureToken(ctx context.Context, supervisor, member *Cluster) error {
	have, err := stored(ctx, supervisor, member)
	if err != nil {
		return supervisor.wrap(err)
	}
	bound := string(have[federationv1alpha1.SecretCredential])
	if !strings.HasPrefix(bound, credentialPrefix(supervisor.ID)) {
		bound = newCredential(supervisor.ID)
	}
	if err := s.createCredential(ctx, member, supervisor.ID, bound); err != nil {
		return member.wrap(err)
	}
	if err := s.grant(ctx, member, supervisor.ID, bound); err != nil {
		return member.wrap(err)
	}
	token := string(have[federationv1alpha1.SecretToken])
	valid := credential.Parse(token).Account == fmt.Sprintf("system:serviceaccount:%s:%s", s.namespace, federationv1alpha1.SupervisorAccount(supervisor.ID))
	if valid {
		if valid, err = admin.Accepts(ctx, member.Client, itsServer, token); err != nil {
			return member.wrap(err)
		}
	}
	if valid {
		return supervisor.wrap(s.storeToken(ctx, supervisor, member, bound, token))
	}
	if token, err = s.requestToken(ctx, member, supervisor.ID, bound); err != nil {
		return member.wrap(err)
	}
	if err := s.storeToken(ctx, supervisor, member, bound, token); err != nil {
		return supervisor.wrap(err)
	}
	if _, err = s.revokeTokens(ctx, member, supervisor.ID, bound); err != nil {
		return member.wrap(err)
	}
	return supervisor.wrap(forgetFormer(ctx, supervisor, member))
}

// storeToken writes a supervisor's token for a member, and the Secret to which later ones are bound, into the supervisor.
func (*survey) storeToken(ctx context.Context, supervisor, member *Cluster, bound, token string) error {
	return admin.Apply(ctx, supervisor.Client, &corev1.Secret{
		ObjectMeta: secretMeta(secretPrefix + string(member.ID)),
		Data: map[string][]byte{
			federationv1alpha1.SecretToken: []byte(token), federationv1alpha1.SecretCA: member.CA, federationv1alpha1.SecretCredential: []byte(bound),
		},
	})
}

// forgetFormer tells a supervisor's controller that the member has none of its tokens that do not expire.
func forgetFormer(ctx context.Context, supervisor, member *Cluster) error {
	secret := &corev1.Secret{ObjectMeta: secretMeta(secretPrefix + string(member.ID))}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"data":{%q:null}}`, federationv1alpha1.SecretReplaced))
	if err := supervisor.Client.Patch(ctx, secret, patch, admin.FieldOwner); err != nil {
		return fmt.Errorf("write Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}

// revokeTokens ends all tokens of a supervisor for a member but those that are bound to keep. It returns the number of deleted Secrets.
func (s *survey) revokeTokens(ctx context.Context, member *Cluster, supervisor clusterset.ClusterID, keep string) (int, error) {
	bound, former, err := s.credentials(ctx, member, supervisor)
	if err != nil {
		return 0, err
	}
	revoked := 0
	for _, secret := range append(bound, former...) {
		if secret.Name == keep {
			continue
		}
		if err := admin.DeleteIfThere(ctx, member.Client, &secret); err != nil {
			return revoked, err
		}
		revoked++
	}
	return revoked, nil
}

// removeAccount removes the rights of a supervisor in a member, which takes effect at once, and then its tokens and its
// account.
func (s *survey) removeAccount(ctx context.Context, member *Cluster, supervisor clusterset.ClusterID) error {
	serviceAccount, rights := account(s.namespace, supervisor)
	for _, obj := range append(rights, tokenRights(s.namespace, supervisor, "", nil)...) {
		if err := admin.DeleteOwn(ctx, member.Client, obj); err != nil {
			return err
		}
	}
	if _, err := s.revokeTokens(ctx, member, supervisor, ""); err != nil {
		return err
	}
	return admin.DeleteOwn(ctx, member.Client, serviceAccount)
}
