package access_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/await"
)

// invitedBlocks are the blocks that are reserved for cluster "new", which is invited and has not joined.
var invitedBlocks = []string{"243.9.0.0/16"}

const unauthorized = "Unauthorized"

// The holders of an invitation, of one that has ended or was for another cluster, of a broker-info file, and of a member's token
// before and after its revocation attempt requests that they should not make. Every attempt is refused for the expected reason,
// and the broker does not change.
func TestHostileInvitation(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	clients := b.inviteClients()
	b.awaitJoinPolicies(clients)
	all := map[string]map[string]attack{
		"an invitation":                           b.attacksOfInvitation(),
		"an invitation of a member":               b.attacksOfSecondInvitation(),
		"a broker-info file":                      b.attacksOfJoinAccount(),
		"a broker-info file, on the settings":     b.attacksOnConfig(),
		"a member's token":                        b.attacksOnTokens(),
		"credentials that have ended":             b.attacksOfEnded("ended"),
		"an expired invitation":                   b.attacksOfEnded("expired"),
		"the broker-info file of yesterday":       b.attacksOfEnded("yesterday"),
		"a member's token after its revocation":   b.attacksOfEnded("revoked"),
		"a token of a member for another program": b.attacksOfEnded("audience"),
	}
	before := b.state()
	count := 0
	for holder, attacks := range all {
		t.Run(holder, func(t *testing.T) {
			for name, a := range attacks {
				count++
				t.Run(name, func(t *testing.T) {
					if err := closed(a.do(t.Context(), clients[a.as]), a.because); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
	if diff := cmp.Diff(before, b.state()); diff != "" {
		t.Errorf("what was attacked has changed (-before +after):\n%s", diff)
	}
	if count < 80 {
		t.Errorf("%d attempts, want at least 80", count)
	}
	t.Logf("%d attempts were refused", count)

	// The invitation and the broker-info file do what they are for.
	b.noError(create(b.registration("new", invitedBlocks))(t.Context(), clients["invitation"]))
	b.noError(boundToken(b, "new", "credential-new", 3600)(t.Context(), clients["invitation"]))
	b.noError(merge(b.memberNamed("b"), `{"spec":{"podCIDRs":["10.78.0.0/16"]}}`)(t.Context(), clients["again"]))
	b.noError(boundToken(b, "b", "credential-b", 3600)(t.Context(), clients["again"]))
	b.noError(boundToken(b, "a", "credential-a", 3600)(t.Context(), clients["member"]))
	b.noError(b.addNewcomer("late", "243.10.0.0/16")(t.Context(), clients["join"]))
	for _, obj := range b.newcomer() {
		b.noError(create(obj)(t.Context(), clients["join"]))
	}
	await.NoError(b.t, "the API server knows the newcomer", func() error {
		return boundToken(b, "late", "credential-late-1", 3600)(t.Context(), clients["join"])
	})
	b.noError(create(b.registration("late", []string{"243.10.0.0/16"}))(t.Context(), clients["join"]))
	await.NoError(b.t, "isthmus-join requests tokens of clusters that are no members alone", func() error {
		return closed(boundToken(b, "late", "credential-late-1", 3600)(t.Context(), clients["join"]), "cluster late has joined before")
	})
	// It admitted as many clusters as it may.
	if err := refused(b.addNewcomer("later", "243.12.0.0/16")(t.Context(), clients["join"]), "the broker-info file admits no more clusters"); err != nil {
		t.Error(err)
	}
}

// closed is refused for callers whom the API server does not know, too.
func closed(err error, reason string) error {
	if reason == unauthorized {
		if apierrors.IsUnauthorized(err) {
			return nil
		}
		return fmt.Errorf("the caller was not refused: %w", err)
	}
	return refused(err, reason)
}

// boundToken requests a token of member id that is bound to a Secret.
func boundToken(b *broker, id, secret string, seconds int64) attempt {
	return b.token(isthmus.MemberAccount(id), secret, seconds)
}

// token requests a token of an account; without a secret it is not bound.
func (b *broker) token(account, secret string, seconds int64) attempt {
	return func(ctx context.Context, c client.Client) error {
		request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
		if secret != "" {
			request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret}
		}
		return c.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: b.meta(account)}, request)
	}
}

// memberNamed returns an empty Member, to be patched or deleted.
func (b *broker) memberNamed(id string) *isthmus.Member {
	return &isthmus.Member{ObjectMeta: b.meta(id)}
}

// inviteClients gives the broker invitations, the account of a broker-info file, and credentials of all members, and returns
// clients of their holders.
func (b *broker) inviteClients() map[string]client.Client {
	b.t.Helper()
	config := &isthmus.ClusterSetConfig{}
	b.noError(b.admin.Get(b.t.Context(), client.ObjectKey{Namespace: b.namespace, Name: isthmus.ClusterSetConfigName}, config))
	config.Spec.Members = append(config.Spec.Members, isthmus.MemberBlocks{ClusterID: "new", ClusterSetIPCIDR: invitedBlocks})
	for i := range config.Spec.Members {
		m := &config.Spec.Members[i]
		m.Credential = "credential-" + m.ClusterID
		b.write(&corev1.Secret{ObjectMeta: b.meta(m.Credential)})
	}
	config.Spec.AdmitUpTo = int64(len(config.Spec.Members)) + 1
	b.noError(b.admin.Update(b.t.Context(), config))
	b.write(&corev1.Secret{ObjectMeta: b.meta("treasure")})
	b.account("new")
	grant := func(account string, rules []rbacv1.PolicyRule) {
		b.write(&rbacv1.Role{ObjectMeta: b.meta("of." + account), Rules: rules})
		b.write(&rbacv1.RoleBinding{
			ObjectMeta: b.meta("of." + account), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "of." + account},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: b.namespace}},
		})
	}
	for account, rules := range map[string][]rbacv1.PolicyRule{
		isthmus.InvitationAccount("new"): access.InvitationRules("new"), isthmus.InvitationAccount("b"): access.InvitationRules("b"),
		isthmus.InvitationAccount("gone"): access.InvitationRules("gone"), isthmus.JoinAccount: access.JoinRules("isthmus-member"),
		"yesterday": access.JoinRules("isthmus-member"), isthmus.QuotaController: nil,
	} {
		b.write(&corev1.ServiceAccount{ObjectMeta: b.meta(account)})
		grant(account, rules)
	}
	for id := range blocks {
		grant(isthmus.MemberAccount(id), access.MemberTokenRules(id))
	}
	clients := map[string]client.Client{
		"invitation": b.clientOf(isthmus.InvitationAccount("new")), "again": b.clientOf(isthmus.InvitationAccount("b")),
		"join": b.clientOf(isthmus.JoinAccount), "member": b.member("a"),
		"ended": b.clientOf(isthmus.InvitationAccount("gone")), "yesterday": b.clientOf("yesterday"), "revoked": b.member("a.b"),
		"expired":  b.clientWith(expiredToken(b.namespace, isthmus.InvitationAccount("new"))),
		"audience": b.clientWith(b.tokenOf(isthmus.MemberAccount("a"), "vault.example.org")),
	}
	for _, account := range []string{isthmus.InvitationAccount("gone"), "yesterday", isthmus.MemberAccount("a.b")} {
		b.noError(b.admin.Delete(b.t.Context(), &corev1.ServiceAccount{ObjectMeta: b.meta(account)}))
	}
	return clients
}

// clientOf returns a client with a token of an account.
func (b *broker) clientOf(account string) client.Client {
	b.t.Helper()
	return b.clientWith(b.tokenOf(account))
}

func (b *broker) tokenOf(account string, audiences ...string) string {
	b.t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}
	b.noError(b.admin.SubResource("token").Create(b.t.Context(), &corev1.ServiceAccount{ObjectMeta: b.meta(account)}, request))
	return request.Status.Token
}

// clientWith returns a client that needs no discovery, for which an ended token would not suffice.
func (b *broker) clientWith(token string) client.Client {
	b.t.Helper()
	c := rest.AnonymousClientConfig(server.Config(b.t))
	c.BearerToken, c.QPS = token, -1
	made, err := client.New(c, client.Options{Scheme: scheme, Mapper: b.admin.RESTMapper()})
	b.noError(err)
	return made
}

// expiredToken returns a token that has expired, without a valid signature: API servers sign none for less than ten minutes.
func expiredToken(namespace, account string) string {
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(`{"alg":"ES256"}`)) + "." +
		encode(fmt.Appendf(nil, `{"iss":"https://kubernetes.default.svc","sub":"system:serviceaccount:%s:%s","exp":1700000000}`, namespace, account)) + "." + encode(make([]byte, 64))
}

// awaitJoinPolicies returns when the policies and rights of joins are in force, and ended tokens are refused.
func (b *broker) awaitJoinPolicies(clients map[string]client.Client) {
	b.t.Helper()
	ctx := b.t.Context()
	wrong := b.registration("new", []string{"10.0.0.0/8"})
	await.NoError(b.t, "the policies of joins are in force", func() error {
		return errors.Join(
			refused(b.token("member-a", "", 600)(ctx, clients["member"]), "must be bound to Secret/credential-a"),
			refused(clients["invitation"].Create(ctx, wrong.DeepCopy(), client.DryRunAll), "does not give cluster new the blocks"),
			refused(boundToken(b, "a", "credential-a", 600)(ctx, clients["join"]), "cluster a has joined before"),
			refused(clients["join"].Create(ctx, &corev1.ServiceAccount{ObjectMeta: b.meta("x")}, client.DryRunAll), "creates only accounts of members"),
			refused(clients["again"].Patch(ctx, b.memberNamed("b"), client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"podCIDRs":["10.77.1.0/24"]}}`)), client.DryRunAll), "may not add addresses of member a"),
			clients["invitation"].Create(ctx, b.registration("new", invitedBlocks), client.DryRunAll),
		)
	})
	for _, name := range []string{"ended", "yesterday", "revoked", "expired", "audience"} {
		await.NoError(b.t, "the token is refused: "+name, func() error {
			return closed(clients[name].List(ctx, &isthmus.MemberList{}, client.InNamespace(b.namespace)), unauthorized)
		})
	}
}

func (b *broker) attacksOfInvitation() map[string]attack {
	by := func(do attempt, because string) attack { return attack{as: "invitation", do: do, because: because} }
	lacks := func(verb, resource string, do attempt) attack {
		return by(do, fmt.Sprintf("cannot %s resource %q", verb, resource))
	}
	own := func(edit func(*isthmus.Member)) attempt {
		return create(alter(b.registration("new", invitedBlocks), edit))
	}
	spec := func(edit func(*isthmus.MemberSpec)) attempt { return own(func(m *isthmus.Member) { edit(&m.Spec) }) }
	list := func(all client.ObjectList) attempt {
		return func(ctx context.Context, c client.Client) error {
			return c.List(ctx, all, client.InNamespace(b.namespace))
		}
	}
	get := func(name string) attempt {
		return func(ctx context.Context, c client.Client) error {
			return c.Get(ctx, client.ObjectKey{Namespace: b.namespace, Name: name}, &corev1.Secret{})
		}
	}
	account := func(name string) *corev1.ServiceAccount { return &corev1.ServiceAccount{ObjectMeta: b.meta(name)} }
	const only, tokens = "registers only cluster new", "serviceaccounts/token"
	return map[string]attack{
		"another cluster":          by(create(b.registration("c", invitedBlocks)), only),
		"another by spec alone":    by(spec(func(s *isthmus.MemberSpec) { s.ClusterID = "b" }), only),
		"another by label alone":   by(own(func(m *isthmus.Member) { m.Labels[isthmus.LabelCluster] = "b" }), only),
		"no label":                 by(own(func(m *isthmus.Member) { m.Labels = nil }), only),
		"a name that is completed": by(own(func(m *isthmus.Member) { m.Name, m.GenerateName = "", "new-" }), only),
		"a larger block":           by(spec(func(s *isthmus.MemberSpec) { s.ClusterSetIPCIDR = []string{"243.0.0.0/8"} }), "does not give cluster new the blocks"),
		"another's block":          by(spec(func(s *isthmus.MemberSpec) { s.ClusterSetIPCIDR = blocks["b"] }), "does not give cluster new the blocks"),
		"no block":                 by(spec(func(s *isthmus.MemberSpec) { s.ClusterSetIPCIDR = nil }), "does not give cluster new the blocks"),
		"an early time":            by(spec(func(s *isthmus.MemberSpec) { s.JoinTime = metav1.NewTime(time.Now().Add(-time.Hour)) }), "spec.joinTime may not be in the past"),
		"a tombstone":              by(spec(func(s *isthmus.MemberSpec) { s.LeftAt = new(metav1.Now()) }), "may not remove a cluster"),
		"settings of its own":      by(spec(func(s *isthmus.MemberSpec) { s.Endpoints = isthmus.EndpointsServiceVIP }), "the settings of the ClusterSet"),
		"another ClusterSet":       by(spec(func(s *isthmus.MemberSpec) { s.ClusterSetID = "other" }), "the settings of the ClusterSet"),
		"a finalizer":              by(own(func(m *isthmus.Member) { m.Finalizers = []string{"example.com/never"} }), "no owners, finalizers"),
		"an owner": by(own(func(m *isthmus.Member) {
			m.OwnerReferences = b.ownedBy(isthmus.GroupVersion.WithKind("Member"), b.memberNamed("b"), true)
		}), "no owners, finalizers"),
		"a label of others":                by(own(func(m *isthmus.Member) { m.Labels["app"] = "web" }), "no owners, finalizers"),
		"an annotation of others":          by(own(func(m *isthmus.Member) { m.Annotations[isthmus.AnnotationReleaseHold] = "b=1" }), "no owners, finalizers"),
		"change another":                   lacks("patch", "members", merge(b.memberNamed("b"), `{"spec":{"podCIDRs":[]}}`)),
		"apply another":                    lacks("patch", "members", apply(b.registration("b", blocks["b"]))),
		"update another":                   lacks("update", "members", update(b, b.memberNamed("b"), func(*isthmus.Member) {})),
		"delete another":                   lacks("delete", "members", remove(b.memberNamed("b"))),
		"delete all":                       lacks("deletecollection", "members", removeAll(b, b.memberNamed(""))),
		"read Secrets":                     lacks("list", "secrets", list(&corev1.SecretList{})),
		"read a Secret":                    lacks("get", "secrets", get("treasure")),
		"read its credential":              lacks("get", "secrets", get("credential-new")),
		"a Secret":                         lacks("create", "secrets", create(&corev1.Secret{ObjectMeta: b.meta("mine")})),
		"delete another's credential":      lacks("delete", "secrets", remove(&corev1.Secret{ObjectMeta: b.meta("credential-b")})),
		"a token of a member":              lacks("create", tokens, boundToken(b, "b", "credential-b", 600)),
		"a token of the quota controller":  lacks("create", tokens, b.token(isthmus.QuotaController, "", 600)),
		"a longer invitation":              lacks("create", tokens, b.token(isthmus.InvitationAccount("new"), "", 86400*365)),
		"a token of isthmus-join":          lacks("create", tokens, b.token(isthmus.JoinAccount, "", 600)),
		"a token that outlives a rotation": by(b.token("member-new", "", 600), "the token is bound to /; that of member new must be bound to Secret/credential-new"),
		"a token bound to another's":       by(b.token("member-new", "credential-b", 600), "must be bound to Secret/credential-new"),
		"a token for a year":               by(b.token("member-new", "credential-new", 86400*365), "lives for at most 604800 seconds"),
		"delete a member's account":        lacks("delete", "serviceaccounts", remove(account("member-b"))),
		"delete another invitation":        lacks("delete", "serviceaccounts", remove(account(isthmus.InvitationAccount("b")))),
		"another account":                  lacks("create", "serviceaccounts", create(account("member-c"))),
		"change the settings":              lacks("patch", "clustersetconfigs", merge(&isthmus.ClusterSetConfig{ObjectMeta: b.meta(isthmus.ClusterSetConfigName)}, `{"spec":{"members":[]}}`)),
		"more rights":                      lacks("create", "rolebindings", create(&rbacv1.RoleBinding{ObjectMeta: b.meta("mine")})),
		"another role":                     lacks("create", "roles", create(&rbacv1.Role{ObjectMeta: b.meta("mine")})),
		"an export of a member":            lacks("create", "exportrecords", create(b.record("b", "fresh", "demo"))),
		"read exports":                     lacks("list", "exportrecords", list(&isthmus.ExportRecordList{})),
		"a member's Lease":                 lacks("create", "leases", create(b.lease("b"))),
		"a ConfigMap":                      lacks("create", "configmaps", create(&corev1.ConfigMap{ObjectMeta: b.meta("mine")})),
	}
}

func (b *broker) attacksOfSecondInvitation() map[string]attack {
	by := func(do attempt, because string) attack { return attack{as: "again", do: do, because: because} }
	change := func(patch string) attempt { return merge(b.memberNamed("b"), patch) }
	return map[string]attack{
		"addresses of another member":     by(change(`{"spec":{"podCIDRs":["10.77.0.0/24"]}}`), "cluster b may not add addresses of member a"),
		"a supernet around another":       by(change(`{"spec":{"podSupernets":["10.0.0.0/8"]}}`), "cluster b may not add addresses of member a"),
		"addresses around another member": by(change(`{"spec":{"extraCIDRs":["10.0.0.0/8"]}}`), "cluster b may not add addresses of member a"),
		"an earlier time":                 by(change(`{"spec":{"joinTime":"2001-01-01T00:00:00Z"}}`), "spec.joinTime may not be in the past"),
		"another cluster behind the id":   by(change(`{"metadata":{"annotations":{"isthmus.dev/cluster-uid":"x"}}}`), "another cluster joined as b"),
		"a removal":                       by(change(`{"spec":{"leftAt":"2026-01-01T00:00:00Z"}}`), "may not remove a cluster"),
		"a larger block":                  by(change(`{"spec":{"clustersetIPCIDR":["243.0.0.0/8"]}}`), "does not give cluster b the blocks"),
		"another's registration":          by(merge(b.memberNamed("a"), `{"spec":{"podCIDRs":[]}}`), `cannot patch resource "members"`),
		"a token of another member":       by(boundToken(b, "a", "credential-a", 600), `cannot create resource "serviceaccounts/token"`),
		"a token for a year":              by(boundToken(b, "b", "credential-b", 86400*365), "lives for at most 604800 seconds"),
	}
}

func (b *broker) attacksOfJoinAccount() map[string]attack {
	by := func(do attempt, because string) attack { return attack{as: "join", do: do, because: because} }
	owned := func(name, id string) metav1.ObjectMeta {
		m := b.meta(name)
		m.Labels = map[string]string{isthmus.LabelCluster: id}
		return m
	}
	role := func(name, id string, rules []rbacv1.PolicyRule) attempt {
		return create(&rbacv1.Role{ObjectMeta: owned(name, id), Rules: rules})
	}
	bind := func(name, id, to, account string) attempt {
		return create(&rbacv1.RoleBinding{
			ObjectMeta: owned(name, id), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: to},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: b.namespace}},
		})
	}
	all := []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}}
	forged := &corev1.Secret{ObjectMeta: owned("credential-b-x", "b"), Type: corev1.SecretTypeServiceAccountToken}
	forged.Annotations = map[string]string{corev1.ServiceAccountNameKey: "member-b"}
	const bindings = "gives a member's account only the Roles of that member"
	return map[string]attack{
		"change a member":            by(merge(b.memberNamed("b"), `{"spec":{"podCIDRs":[]}}`), "isthmus-join registers only new clusters"),
		"apply a member":             by(apply(b.registration("b", blocks["b"])), "isthmus-join registers only new clusters"),
		"remove a member":            by(merge(b.memberNamed("b"), `{"spec":{"leftAt":"2026-01-01T00:00:00Z"}}`), "isthmus-join"),
		"delete a member":            by(remove(b.memberNamed("b")), `cannot delete resource "members"`),
		"a token of a member":        by(boundToken(b, "b", "credential-b", 600), "cluster b has joined before; it needs an invitation to join again: isthmusctl invite b"),
		"a token of the quotas":      by(b.token(isthmus.QuotaController, "", 600), "isthmus-join may not request a token of isthmus-quota-controller"),
		"a token of an invitation":   by(b.token(isthmus.InvitationAccount("b"), "", 600), "isthmus-join may not request a token of isthmus-invitation-b"),
		"a longer broker-info file":  by(b.token(isthmus.JoinAccount, "", 86400*365), "isthmus-join may not request a token of isthmus-join"),
		"an account of another name": by(create(&corev1.ServiceAccount{ObjectMeta: owned("mine", "c")}), "creates only accounts of members"),
		"a token in a Secret":        by(create(forged), "creates only empty Secrets"),
		"a Secret with another name": by(create(&corev1.Secret{ObjectMeta: owned("mine", "c")}), "creates only empty Secrets"),
		"read Secrets": by(func(ctx context.Context, c client.Client) error {
			return c.List(ctx, &corev1.SecretList{}, client.InNamespace(b.namespace))
		}, `cannot list resource "secrets"`),
		"change a Secret":              by(merge(&corev1.Secret{ObjectMeta: b.meta("treasure")}, `{"data":{}}`), `cannot patch resource "secrets"`),
		"a Role with all rights":       by(role("member-c-token", "c", all), "attempting to grant RBAC permissions not currently held"),
		"a Role for another's tokens":  by(role("member-c-token", "c", access.MemberTokenRules("b")), "creates only the Role with which a member requests its own token"),
		"rights of a member":           by(bind("member-c", "c", "isthmus-member", isthmus.JoinAccount), bindings),
		"rights for another account":   by(bind("member-c", "c", "isthmus-member", "default"), bindings),
		"a binding of another name":    by(bind("mine", "c", "isthmus-member", "member-c"), bindings),
		"an export of a member":        by(create(b.record("b", "fresh", "demo")), `cannot create resource "exportrecords"`),
		"another ConfigMap":            by(create(&corev1.ConfigMap{ObjectMeta: b.meta("mine")}), "writes only ConfigMap isthmus-clusterset-ip"),
		"delete a member's account":    by(remove(&corev1.ServiceAccount{ObjectMeta: b.meta("member-b")}), `cannot delete resource "serviceaccounts"`),
		"a cluster without a block":    by(create(b.registration("c", nil)), "does not give cluster c the blocks"),
		"a cluster that owns a member": by(create(alter(b.registration("c", nil), func(m *isthmus.Member) { m.Finalizers = []string{"example.com/never"} })), "isthmus.dev"),
	}
}

// addNewcomer adds a cluster to the ClusterSetConfig, as a join does.
func (b *broker) addNewcomer(id, block string) attempt {
	return b.configured(func(c *isthmus.ClusterSetConfig) {
		c.Spec.Members = append(c.Spec.Members, isthmus.MemberBlocks{ClusterID: id, ClusterSetIPCIDR: []string{block}, Credential: "credential-" + id + "-1"})
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, "join.isthmus.dev/"+id, "{}")
	})
}

// newcomer returns the objects that a join creates for cluster "late".
func (b *broker) newcomer() []client.Object {
	owned := func(name string) metav1.ObjectMeta {
		m := b.meta(name)
		m.Labels = map[string]string{isthmus.LabelCluster: "late"}
		return m
	}
	bind := func(name, role string) client.Object {
		return &rbacv1.RoleBinding{
			ObjectMeta: owned(name), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "member-late", Namespace: b.namespace}},
		}
	}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: owned("member-late")}, &corev1.Secret{ObjectMeta: owned("credential-late-1")},
		&rbacv1.Role{ObjectMeta: owned("member-late-token"), Rules: access.MemberTokenRules("late")},
		bind("member-late", "isthmus-member"), bind("member-late-token", "member-late-token"),
	}
}

// configured updates the ClusterSetConfig.
func (b *broker) configured(edit func(*isthmus.ClusterSetConfig)) attempt {
	return update(b, &isthmus.ClusterSetConfig{ObjectMeta: b.meta(isthmus.ClusterSetConfigName)}, edit)
}

func (b *broker) attacksOnConfig() map[string]attack {
	by := func(because string, edit func(*isthmus.ClusterSetConfig)) attack {
		return attack{as: "join", do: b.configured(edit), because: because}
	}
	members := func(because string, edit func([]isthmus.MemberBlocks) []isthmus.MemberBlocks) attack {
		return by(because, func(c *isthmus.ClusterSetConfig) { c.Spec.Members = edit(c.Spec.Members) })
	}
	added := func(id string, block string) isthmus.MemberBlocks {
		return isthmus.MemberBlocks{ClusterID: id, ClusterSetIPCIDR: []string{block}, Credential: "credential-" + id + "-1"}
	}
	const one = "adds one member at a time to the ClusterSetConfig, and changes or removes none"
	type list = []isthmus.MemberBlocks
	return map[string]attack{
		"other quotas":       by("changes no settings", func(c *isthmus.ClusterSetConfig) { c.Spec.Quotas = &isthmus.Quotas{Services: 1} }),
		"another ClusterSet": by("changes no settings", func(c *isthmus.ClusterSetConfig) { c.Spec.ClusterSetID = "other" }),
		"room for more":      by("changes no settings", func(c *isthmus.ClusterSetConfig) { c.Spec.AdmitUpTo = 1000 }),
		"longer tokens":      by("changes no settings", func(c *isthmus.ClusterSetConfig) { c.Spec.CredentialLifetimeSeconds = 31536000 }),
		"labels":             by("changes no settings", func(c *isthmus.ClusterSetConfig) { c.Labels = map[string]string{"app": "web"} }),
		"no members":         members(one, func(list) list { return nil }),
		"one member fewer":   members(one, func(l list) list { return l[1:] }),
		"another block":      members(one, func(l list) list { l[0].ClusterSetIPCIDR = []string{"243.11.0.0/16"}; return l }),
		"another credential": members(one, func(l list) list { l[0].Credential = "mine"; return l }),
		"two members":        members(one, func(l list) list { return append(l, added("c", "243.12.0.0/16"), added("d", "243.13.0.0/16")) }),
		"a block of another": members("overlap", func(l list) list { return append(l, added("c", "243.2.7.0/24")) }),
		"a block around all": members("overlap", func(l list) list { return append(l, added("c", "243.0.0.0/8")) }),
		"an annotation":      by("only the annotation", func(c *isthmus.ClusterSetConfig) { metav1.SetMetaDataAnnotation(&c.ObjectMeta, "x", "y") }),
		"a place of a member": by("has joined, or is invited", func(c *isthmus.ClusterSetConfig) {
			metav1.SetMetaDataAnnotation(&c.ObjectMeta, "join.isthmus.dev/b", "{}")
		}),
		"a place of the invited": by("has joined, or is invited", func(c *isthmus.ClusterSetConfig) {
			metav1.SetMetaDataAnnotation(&c.ObjectMeta, "join.isthmus.dev/new", "{}")
		}),
		"an owner": by("may not be set by isthmus-join", func(c *isthmus.ClusterSetConfig) {
			c.OwnerReferences = b.ownedBy(isthmus.GroupVersion.WithKind("Member"), b.memberNamed("b"), true)
		}),
	}
}

func (b *broker) attacksOnTokens() map[string]attack {
	by := func(do attempt, because string) attack { return attack{as: "member", do: do, because: because} }
	const lacks = `cannot create resource "serviceaccounts/token"`
	return map[string]attack{
		"one that outlives a rotation": by(b.token("member-a", "", 600), "must be bound to Secret/credential-a"),
		"one bound to another's":       by(b.token("member-a", "credential-b", 600), "must be bound to Secret/credential-a"),
		"one bound to any Secret":      by(b.token("member-a", "treasure", 600), "must be bound to Secret/credential-a"),
		"one for a year":               by(b.token("member-a", "credential-a", 86400*365), "lives for at most 604800 seconds"),
		"one of another member":        by(boundToken(b, "b", "credential-b", 600), lacks),
		"one of an invitation":         by(b.token(isthmus.InvitationAccount("b"), "", 600), lacks),
		"one of isthmus-join":          by(b.token(isthmus.JoinAccount, "", 600), lacks),
		"one of the quota controller":  by(b.token(isthmus.QuotaController, "", 600), lacks),
	}
}

// attacksOfEnded are attempts with credentials that have ended.
func (b *broker) attacksOfEnded(holder string) map[string]attack {
	attacks := map[string]attack{}
	for name, do := range map[string]attempt{
		"register a cluster": create(b.registration("c", nil)),
		"read Secrets": func(ctx context.Context, c client.Client) error {
			return c.List(ctx, &corev1.SecretList{}, client.InNamespace(b.namespace))
		},
		"a token":   boundToken(b, "new", "credential-new", 600),
		"an export": create(b.record("a", strings.ReplaceAll(holder, ".", "-"), "demo")),
	} {
		attacks[name] = attack{as: holder, do: do, because: unauthorized}
	}
	return attacks
}
