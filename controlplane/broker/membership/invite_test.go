package membership

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	renewal "github.com/isthmus-net/isthmus/controlplane/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

// An invitation admits its cluster once. The cluster gets the block that was reserved for it, and its token expires.
func TestInvitation(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "invite", Ranges: cidrs("243.0.0.0/8"), CredentialLifetime: time.Hour})
	member := cluster(t, &memberServer)
	first := invite(t, asAdmin, info, "a")
	if other := invite(t, asAdmin, info, "b"); brokerConfig(t, asAdmin, "invite").Spec.Credential("b") == "" || other.ClusterID != "b" {
		t.Errorf("the invitation of b is %+v", other)
	}
	second := invite(t, asAdmin, info, "a") // it ends the first one
	awaitRefused(t, newClient(t, first.RESTConfig()), "invite")

	r := request(second, "b", 1)
	if _, err := Join(t.Context(), newClient(t, second.RESTConfig()), member, r); err == nil || !strings.Contains(err.Error(), "the invitation is for cluster a, not for b; run isthmusctl invite b on the broker") {
		t.Errorf("joined as b: %v", err)
	}
	r = request(second, "a", 1)
	r.ClusterID = "" // the invitation has it
	j, err := Join(t.Context(), newClient(t, second.RESTConfig()), member, r)
	if err != nil {
		t.Fatal(err)
	}
	if len(j.Notes) > 0 || j.Rejoined || j.Member.Name != "a" || firstBlock(j) != "243.0.0.0/16" {
		t.Errorf("joined: %+v", j)
	}
	awaitRefused(t, newClient(t, second.RESTConfig()), "invite")
	cfg := credentials(t, member, r.Namespace)
	if err := asks(t.Context(), newClient(t, cfg), "invite"); err != nil {
		t.Errorf("the member's token: %v", err)
	}
	if left := time.Until(renewal.Parse(cfg.BearerToken).Expires); left > time.Hour || left < 50*time.Minute {
		t.Errorf("its token expires in %s", left)
	}
	// An invitation that was not used is withdrawn, and so is what it reserved when it has expired.
	if _, err := ForceLeave(t.Context(), asAdmin, "invite", "b"); err != nil {
		t.Error(err)
	}
	unused := invite(t, asAdmin, info, "c")
	if err := pruneInvitations(t.Context(), asAdmin, "invite", unused.Expires.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if all := brokerConfig(t, asAdmin, "invite").Spec.Members; len(all) != 1 || all[0].ClusterID != "a" {
		t.Errorf("the ClusterSetConfig lists %+v", all)
	}
	awaitRefused(t, newClient(t, unused.RESTConfig()), "invite")
}

// awaitRefused waits until the broker does not know a token any more. API servers cache tokens for ten seconds.
func awaitRefused(t *testing.T, c client.Client, namespace string) {
	t.Helper()
	err := admin.Await(t.Context(), "the token is still valid", func() (bool, error) {
		return apierrors.IsUnauthorized(asks(t.Context(), c, namespace)), nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A member that was away for longer than its token lives is told what to do: to join again with an invitation for its id. It
// keeps its block and its place.
func TestSleptForTooLong(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "slept", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	r := request(invite(t, asAdmin, info, "a"), "a", 1)
	first, err := Join(t.Context(), newClient(t, r.Broker.RESTConfig()), member, r)
	if err != nil {
		t.Fatal(err)
	}
	before := credentials(t, member, r.Namespace)
	expires := renewal.Parse(before.BearerToken).Expires
	late := newRenewer(t, before, r, func() time.Time { return expires.Add(time.Hour) })
	want := fmt.Sprintf("the credentials of cluster a for broker %s ended at %s; run isthmusctl invite a on the broker and isthmusctl join with its file in cluster a, which keeps its block, ClusterSetIPs and place",
		info.Server, expires.UTC().Format(time.RFC3339))
	if s := late.State(); !s.Ended || s.Err == nil || s.Err.Error() != want {
		t.Errorf("it says %v, want %s", s.Err, want)
	}
	runFor(t, late)
	if credentials(t, member, r.Namespace).BearerToken != before.BearerToken {
		t.Error("an expired token was renewed")
	}

	r.Broker = invite(t, asAdmin, info, "a")
	again, err := Join(t.Context(), newClient(t, r.Broker.RESTConfig()), member, r)
	if err != nil {
		t.Fatal(err)
	}
	if !again.Rejoined || firstBlock(again) != firstBlock(first) || !again.Member.Spec.JoinTime.Equal(&first.Member.Spec.JoinTime) {
		t.Errorf("joined %+v, and again %+v", first.Member.Spec, again.Member.Spec)
	}
	after := credentials(t, member, r.Namespace)
	if after.BearerToken == before.BearerToken {
		t.Error("it has the same token")
	}
	if err := asks(t.Context(), newClient(t, after), "slept"); err != nil {
		t.Errorf("its new token: %v", err)
	}
}

// newRenewer returns the Renewer of member a that joined by r, with the controller's own rights in its cluster.
func newRenewer(t *testing.T, broker *rest.Config, r Request, now func() time.Time) *credential.Renewer {
	t.Helper()
	local := memberServer.Config(t)
	local.Impersonate.UserName = "system:serviceaccount:" + r.Namespace + ":isthmus-controller"
	asMember := newClient(t, broker)
	renewer, err := credential.New(credential.Config{
		Self: "a", Broker: broker, BrokerNamespace: r.Broker.Namespace, Local: local, Namespace: r.Namespace,
		ClusterSet: func(ctx context.Context) (v1alpha1.ClusterSetConfigSpec, error) {
			config, err := readConfig(ctx, asMember, r.Broker.Namespace)
			if err != nil {
				return v1alpha1.ClusterSetConfigSpec{}, err
			}
			return config.Spec, nil
		},
		Changed: func() {}, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: now,
	})
	if err != nil {
		t.Fatal(err)
	}
	return renewer
}

// runFor runs a Renewer for one check.
func runFor(t *testing.T, r *credential.Renewer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := r.Start(ctx); err != nil {
		t.Error(err)
	}
}

// awaitToken runs a Renewer until the member's Secret has another token than before, and returns the Secret.
func awaitToken(t *testing.T, r *credential.Renewer, member client.Client, namespace, before string) *corev1.Secret {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Start(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	secret := &corev1.Secret{}
	err := admin.Await(t.Context(), "the token is not renewed", func() (bool, error) {
		err := member.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: v1alpha1.BrokerSecret}, secret)
		return string(secret.Data[v1alpha1.BrokerSecretToken]) != before, err
	})
	if err != nil {
		t.Fatalf("%v; the state is %+v", err, r.State())
	}
	return secret
}

// A controller renews its token when half of its life has passed, with no other right than to patch its Secret. The token is
// revoked with the others.
func TestRenewal(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "renew", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	r := request(invite(t, asAdmin, info, "a"), "a", 1)
	if _, err := Join(t.Context(), newClient(t, r.Broker.RESTConfig()), member, r); err != nil {
		t.Fatal(err)
	}
	grantController(t, member, r.Namespace)
	cfg := credentials(t, member, r.Namespace)
	if left := time.Until(renewal.Parse(cfg.BearerToken).Expires); left < 6*24*time.Hour || left > 7*24*time.Hour {
		t.Errorf("the token expires in %s", left)
	}
	runFor(t, newRenewer(t, cfg, r, func() time.Time { return time.Now().Add(3 * 24 * time.Hour) }))
	if credentials(t, member, r.Namespace).BearerToken != cfg.BearerToken {
		t.Error("the token was renewed before half of its life had passed")
	}
	renewer := newRenewer(t, cfg, r, func() time.Time { return time.Now().Add(4 * 24 * time.Hour) })
	secret := awaitToken(t, renewer, member, r.Namespace, cfg.BearerToken)
	if len(secret.Data) != 2 {
		t.Errorf("the Secret has %d keys", len(secret.Data))
	}
	if s := renewer.State(); !s.Managed || s.Err != nil || s.Ended {
		t.Errorf("the state is %+v", s)
	}
	fresh := newClient(t, credentials(t, member, r.Namespace))
	if err := asks(t.Context(), fresh, "renew"); err != nil {
		t.Errorf("the renewed token: %v", err)
	}
	// Tokens of before and after end together.
	if err := Revoke(t.Context(), asAdmin, "renew", "a"); err != nil {
		t.Fatal(err)
	}
	old := rest.CopyConfig(cfg)
	old.BearerTokenFile = ""
	awaitRefused(t, newClient(t, old), "renew")
	awaitRefused(t, fresh, "renew")
}

// grantController gives the controller in namespace of the member its generated rights.
func grantController(t *testing.T, member client.Client, namespace string) {
	t.Helper()
	for _, obj := range apitest.Rights(t, "../../rbac/role.yaml", namespace, "system:serviceaccount:"+namespace+":isthmus-controller") {
		put(t, member, obj)
	}
}

// A member of an earlier version has a token that does not expire. It is valid until its controller has replaced it, which needs
// a broker of this version with its definitions, and is deleted then.
func TestTokenOfEarlierVersion(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "earlier", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	grantController(t, member, r.Namespace)
	dir := makeEarlier(t, asAdmin, member, "earlier", r.Namespace)
	earlier := &rest.Config{Host: info.Server, TLSClientConfig: rest.TLSClientConfig{CAData: info.CA}, BearerTokenFile: dir + "/token"}
	secret := &corev1.Secret{}
	if err := member.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: v1alpha1.BrokerSecret}, secret); err != nil {
		t.Fatal(err)
	}
	former := string(secret.Data[v1alpha1.BrokerSecretToken])
	thief := &rest.Config{Host: info.Server, TLSClientConfig: rest.TLSClientConfig{CAData: info.CA}, BearerToken: former}
	if err := asks(t.Context(), newClient(t, thief), "earlier"); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	renewer := newRenewer(t, earlier, r, func() time.Time { return now })
	runFor(t, renewer)
	if s := renewer.State(); !s.Managed || !s.Expires.IsZero() || s.Err == nil || !strings.Contains(s.Err.Error(), "has no credential of cluster a; run isthmusctl deploy-broker there") {
		t.Errorf("on a broker of an earlier version the state is %+v", s)
	}
	if err := asks(t.Context(), newClient(t, thief), "earlier"); err != nil {
		t.Errorf("the former token: %v", err)
	}

	removeCredentials(t, asAdmin)
	if _, err := DeployBroker(t.Context(), asAdmin, Broker{Namespace: "earlier"}); err != nil {
		t.Fatal(err)
	}
	renewer = newRenewer(t, earlier, r, func() time.Time { return now })
	mount(t, dir, awaitToken(t, renewer, member, r.Namespace, former))
	if s := renewer.State(); s.Err != nil || s.Expires.IsZero() {
		t.Errorf("the state is %+v", s)
	}
	runFor(t, renewer)
	if err := asks(t.Context(), newClient(t, thief), "earlier"); err != nil {
		t.Errorf("the former token was deleted while a replica may use it: %v", err)
	}
	now = now.Add(10 * time.Minute)
	runFor(t, renewer)
	awaitRefused(t, newClient(t, thief), "earlier")
	if err := asks(t.Context(), newClient(t, earlier), "earlier"); err != nil {
		t.Errorf("the renewed token: %v", err)
	}
}

// removeCredentials gives the broker an earlier definition of the ClusterSetConfig, without the credentials of members. The API
// server's own watches follow it.
func removeCredentials(t *testing.T, asAdmin client.Client) {
	t.Helper()
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Name: configDefinition}, crd); err != nil {
		t.Fatal(err)
	}
	members := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["members"].Items.Schema.Properties
	if _, ok := members["credential"]; !ok {
		t.Fatal("the definition has no credential of a member")
	}
	delete(members, "credential")
	if err := asAdmin.Update(t.Context(), crd); err != nil {
		t.Fatal(err)
	}
	<-time.After(watchersFollow)
}

// makeEarlier makes member a one that an earlier version has joined, and returns a folder with its credentials.
func makeEarlier(t *testing.T, asAdmin, member client.Client, namespace, install string) string {
	t.Helper()
	config := brokerConfig(t, asAdmin, namespace)
	config.Spec.Members = withCredential(config.Spec.Members, "a", "")
	if err := asAdmin.Update(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	account := &corev1.ServiceAccount{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: v1alpha1.MemberAccount("a")}, account); err != nil {
		t.Fatal(err)
	}
	token := []byte(brokerServer.LastingToken(t, account, "member-a-token"))
	issued := &corev1.Secret{
		ObjectMeta: named(namespace, "member-a-token", "a"), Type: corev1.SecretTypeServiceAccountToken,
		Data: map[string][]byte{corev1.ServiceAccountTokenKey: token},
	}
	issued.Annotations = map[string]string{corev1.ServiceAccountNameKey: account.Name}
	if err := asAdmin.Create(t.Context(), issued); err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{}
	if err := member.Get(t.Context(), client.ObjectKey{Namespace: install, Name: v1alpha1.BrokerSecret}, secret); err != nil {
		t.Fatal(err)
	}
	secret.Data[v1alpha1.BrokerSecretToken] = token
	if err := member.Update(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	mount(t, dir, secret)
	return dir
}

// A token of a member's account for another audience, such as another system that trusts the broker's cluster, opens nothing on
// the broker.
func TestTokenForAnotherAudience(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "audience"})
	for _, id := range []clusterset.ClusterID{"a"} {
		if _, err := reserve(t, asAdmin, "uid", request(info, id, 1)); err != nil {
			t.Fatal(err)
		}
	}
	for audience, want := range map[string]bool{"": true, "vault.example.org": false} {
		request := &authenticationv1.TokenRequest{}
		if audience != "" {
			request.Spec.Audiences = []string{audience}
		}
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "audience", Name: v1alpha1.MemberAccount("a")}}
		if err := asAdmin.SubResource("token").Create(t.Context(), account, request); err != nil {
			t.Fatal(err)
		}
		cfg := &rest.Config{Host: info.Server, TLSClientConfig: rest.TLSClientConfig{CAData: info.CA}, BearerToken: request.Status.Token}
		c, err := client.New(cfg, client.Options{Scheme: asAdmin.Scheme(), Mapper: asAdmin.RESTMapper()})
		if err != nil {
			t.Fatal(err)
		}
		if err := asks(t.Context(), c, "audience"); (err == nil) != want || !want && !apierrors.IsUnauthorized(err) {
			t.Errorf("a token for %q: %v", audience, err)
		}
	}
}
