package bootstrap

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/credential"
)

// tokenRequest returns a request for a token that is bound to a Secret.
func tokenRequest(secret string, lifetime time.Duration) *authenticationv1.TokenRequest {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(lifetime / time.Second))}}
	if secret != "" {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Secret", APIVersion: "v1", Name: secret}
	}
	return request
}

// requestAs requests a token of an account in c with another token.
func requestAs(t *testing.T, token, account string, request *authenticationv1.TokenRequest) (string, error) {
	t.Helper()
	request = request.DeepCopy()
	err := newClient(t, as(t, token)).SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}, request)
	return request.Status.Token, err
}

// binds returns the Secret in c to which the tokens of supervisor a are bound.
func binds(t *testing.T, a Cluster) string {
	t.Helper()
	s, err := handed(t, a, "c")
	if err != nil {
		t.Fatal(err)
	}
	return string(s.Data[federationv1alpha1.SecretCredential])
}

// A thief of a supervisor's token gets no token that outlives a rotation: neither an unbound or longer one, nor one of another account,
// nor one that is bound to another Secret. The thief deletes no Secrets.
func TestStolenSupervisorToken(t *testing.T) {
	a, b, c := newTestbed(t)
	if _, err := Form(t.Context(), Formation{ClusterSet: "prod", Namespace: namespace, Clusters: []Cluster{supervisor(a), supervisor(b), c}}); err != nil {
		t.Fatal(err)
	}
	stolen, week := held(t, a, "c"), federationv1alpha1.TokenLifetime
	if left := time.Until(credential.Parse(stolen).Expires); left > week || left < week-time.Hour {
		t.Errorf("the token expires in %s", left)
	}
	other := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "other"}}
	put(t, c, other)
	t.Cleanup(func() { _ = c.Client.Delete(context.Background(), other) })
	renewed := ""
	await(t, "a supervisor cannot renew its token", func() bool {
		var err error
		renewed, err = requestAs(t, stolen, "federation-a", tokenRequest(binds(t, a), week))
		return err == nil
	})
	// An API server enforces a policy some time after its creation.
	await(t, "the policy on tokens is not enforced", func() bool {
		_, err := requestAs(t, stolen, "federation-a", tokenRequest("", time.Hour))
		return apierrors.IsForbidden(err)
	})
	for name, tc := range map[string]struct {
		account string
		request *authenticationv1.TokenRequest
		because string
	}{
		"a longer one":                {"federation-a", tokenRequest(binds(t, a), week+time.Hour), "lives for at most 604800 seconds"},
		"an unbound one":              {"federation-a", tokenRequest("", time.Hour), "the token is bound to /,"},
		"one bound to another":        {"federation-a", tokenRequest("other", time.Hour), "the token is bound to Secret/other,"},
		"one bound to b's":            {"federation-a", tokenRequest(binds(t, b), time.Hour), "the token is bound to Secret/federation-credential-b-"},
		"one of another supervisor":   {"federation-b", tokenRequest(binds(t, b), time.Hour), "forbidden"},
		"one of an unrelated account": {"default", tokenRequest(binds(t, a), time.Hour), "forbidden"},
	} {
		if _, err := requestAs(t, stolen, tc.account, tc.request); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), tc.because) {
			t.Errorf("%s: %v, want %q", name, err, tc.because)
		}
	}
	thief := newClient(t, as(t, stolen))
	for _, name := range []string{"other", binds(t, a), binds(t, b)} {
		if err := thief.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}); !apierrors.IsForbidden(err) {
			t.Errorf("it may delete Secret %s: %v", name, err)
		}
	}

	done := make(chan error, 1)
	go func() {
		_, err := Rotate(t.Context(), namespace, []Cluster{supervisor(a), c}, time.Second)
		done <- err
	}()
	// As long as the stolen tokens are valid, they get no token that is bound to the new Secret.
	for finished := false; !finished; {
		for _, token := range []string{stolen, renewed} {
			if kept, err := requestAs(t, token, "federation-a", tokenRequest(binds(t, a), time.Hour)); err == nil {
				renewed = kept
			}
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			finished = true
		case <-time.After(200 * time.Millisecond):
		}
	}
	for name, token := range map[string]string{"stolen": stolen, "renewed": renewed} {
		if accepts(t, token) {
			t.Errorf("the %s token is valid after the rotation", name)
		}
	}
	if !accepts(t, held(t, a, "c")) {
		t.Error("the new token is not valid")
	}
	await(t, "the new token cannot be renewed", func() bool {
		_, err := requestAs(t, held(t, a, "c"), "federation-a", tokenRequest(binds(t, a), week))
		return err == nil
	})
	removeSupervisors(t, a, b, c)
}

// removeSupervisors ends a federation of the supervisors a and b and the child c.
func removeSupervisors(t *testing.T, a, b, c Cluster) {
	t.Helper()
	all := []Cluster{supervisor(a), supervisor(b), c}
	if _, err := Remove(t.Context(), Removal{ID: "b", Namespace: namespace, Clusters: all}); err != nil {
		t.Fatal(err)
	}
	removeAll(t, c, a)
}

// A federation of an earlier version has tokens that do not expire. Form keeps them, and lets the controller replace them. Rotate ends
// them in any case.
func TestTokensOfEarlierVersion(t *testing.T) {
	a, _, c := newTestbed(t)
	formPair(t, a, c)
	former := makeEarlier(t, a, c)
	formPair(t, a, c)
	if held(t, a, "c") != former || !accepts(t, former) {
		t.Error("Form replaced a valid token")
	}
	await(t, "the supervisor cannot replace its token", func() bool {
		_, err := requestAs(t, former, "federation-a", tokenRequest(binds(t, a), time.Hour))
		return err == nil
	})
	asSupervisor := newClient(t, as(t, former))
	old := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "federation-a-token-x"}}
	if err := asSupervisor.Delete(t.Context(), old.DeepCopy(), client.DryRunAll); err != nil {
		t.Errorf("the supervisor cannot delete its former token: %v", err)
	}
	pending := &corev1.Secret{ObjectMeta: secretMeta("federation-c")}
	if err := a.Client.Patch(t.Context(), pending, client.RawPatch(types.MergePatchType, []byte(`{"stringData":{"replaced":"federation-a-token-x"}}`))); err != nil {
		t.Fatal(err)
	}
	rotated, err := Rotate(t.Context(), namespace, []Cluster{supervisor(a), c}, 0)
	if err != nil || !slices.Contains(rotated, Rotated{"a", "c", 2}) { // and the Secret of the replacement
		t.Errorf("rotated %+v, %v", rotated, err)
	}
	if accepts(t, former) || !accepts(t, held(t, a, "c")) {
		t.Error("the former token is valid after a rotation, or the new one is not")
	}
	if s, err := handed(t, a, "c"); err != nil || len(s.Data) != 3 {
		t.Errorf("the Secret still names the former token: %d keys, %v", len(s.Data), err)
	}
	removeAll(t, c, a)
}

// makeEarlier gives supervisor a a token for c as an earlier version did, and returns it.
func makeEarlier(t *testing.T, a, c Cluster) string {
	t.Helper()
	account := &corev1.ServiceAccount{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "federation-a"}, account); err != nil {
		t.Fatal(err)
	}
	s := survey{namespace: namespace}
	if _, err := s.revokeTokens(t.Context(), &c, "a", ""); err != nil {
		t.Fatal(err)
	}
	former := serverC.LastingToken(t, account, "federation-a-token-x")
	secret := &corev1.Secret{
		ObjectMeta: metadata(namespace, "a"), Type: corev1.SecretTypeServiceAccountToken,
		Data: map[string][]byte{corev1.ServiceAccountTokenKey: []byte(former)},
	}
	secret.Name = "federation-a-token-x"
	secret.Annotations = map[string]string{corev1.ServiceAccountNameKey: account.Name}
	put(t, c, secret)
	if err := s.storeToken(t.Context(), &a, &c, "", former); err != nil {
		t.Fatal(err)
	}
	return former
}
