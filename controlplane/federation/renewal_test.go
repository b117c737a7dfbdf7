package federation_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/internal/credential"
	"github.com/isthmus-net/isthmus/tools/await"
)

// superviseAhead runs supervisor a with the generated rights. The returned function sets how far its clock is ahead.
func (w *testbed) superviseAhead() (ahead func(time.Duration)) {
	w.t.Helper()
	var offset atomic.Int64
	config := configOf(w.controller("a"), "one", w.log("a"))
	config.Now = func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }
	f, err := federation.New(config)
	if err != nil {
		w.t.Fatal(err)
	}
	w.run(f)
	w.awaitLeader("a/one")
	return func(d time.Duration) { offset.Store(int64(d)) }
}

// token returns the token of supervisor a for a member.
func (w *testbed) token(id clusterset.ClusterID) string {
	return string(w.secret("a", id).Data[federationv1alpha1.SecretToken])
}

// accepts reports whether a member accepts a token.
func (w *testbed) accepts(id clusterset.ClusterID, token string) bool {
	w.t.Helper()
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := w.admin[id].Create(w.t.Context(), review); err != nil {
		w.t.Fatal(err)
	}
	return review.Status.Authenticated
}

// A supervisor renews its tokens for all members when half of their life has passed, with the generated rights alone, and goes on
// leading. Both tokens are valid: watches of the former one end without an error.
func TestRenewal(t *testing.T) {
	w := newTestbed(t)
	before := map[clusterset.ClusterID]string{}
	for _, id := range ids {
		before[id] = w.token(id)
	}
	ahead := w.superviseAhead()
	w.offer("a", "web", "10.1.0.1")
	w.awaitEverywhere("web", "10.1.0.1")
	ahead(3 * 24 * time.Hour)
	<-time.After(3 * time.Second)
	for _, id := range ids {
		if w.token(id) != before[id] {
			t.Errorf("the token for %s was renewed before half of its life had passed", id)
		}
	}
	ahead(4 * 24 * time.Hour)
	for _, id := range ids {
		await.True(t, "the token is renewed", func() bool { return w.token(id) != before[id] })
	}
	ahead(0)
	for _, id := range ids {
		left := time.Until(credential.Parse(w.token(id)).Expires)
		if left < federationv1alpha1.TokenLifetime-time.Hour || left > federationv1alpha1.TokenLifetime || !w.accepts(id, w.token(id)) || !w.accepts(id, before[id]) {
			t.Errorf("the token for %s expires in %s, or one of both is refused", id, left)
		}
	}
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.1.0.1", "10.3.0.1")
	for _, id := range ids {
		await.NoError(t, "the status of "+string(id), func() error { // a busy member answers late once
			if s := w.status("a", id); !s.Reachable || s.Message != "" {
				return fmt.Errorf("it is %+v", s)
			}
			return nil
		})
	}
}

// A supervisor has a token of an earlier version, which does not expire. Its controller goes on with it until isthmusctl federation
// create has run. It replaces the token then, and deletes it some minutes later.
func TestTokenOfEarlierVersion(t *testing.T) {
	w := newTestbed(t)
	account, stored := &corev1.ServiceAccount{}, w.secret("a", "c")
	if err := w.admin["c"].Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "federation-a"}, account); err != nil {
		t.Fatal(err)
	}
	former := servers["c"].LastingToken(t, account, "federation-a-token-x")
	issued := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "federation-a-token-x", Annotations: map[string]string{corev1.ServiceAccountNameKey: account.Name},
			Labels: account.Labels,
		},
		Type: corev1.SecretTypeServiceAccountToken, Data: map[string][]byte{corev1.ServiceAccountTokenKey: []byte(former)},
	}
	w.create("c", issued)
	stored.Data[federationv1alpha1.SecretToken] = []byte(former)
	delete(stored.Data, federationv1alpha1.SecretCredential)
	if err := w.admin["a"].Update(t.Context(), stored); err != nil {
		t.Fatal(err)
	}
	ahead := w.superviseAhead()
	<-time.After(3 * time.Second)
	if w.token("c") != former {
		t.Error("the token was replaced without a Secret to bind the next one to")
	}
	if err := w.form(w.clusters(ids...)...); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the token is replaced", func() bool { return w.token("c") != former })
	if left := time.Until(credential.Parse(w.token("c")).Expires); left < federationv1alpha1.TokenLifetime-time.Hour {
		t.Errorf("the token expires in %s", left)
	}
	<-time.After(3 * time.Second)
	if err := w.admin["c"].Get(t.Context(), client.ObjectKeyFromObject(issued), issued); err != nil {
		t.Errorf("the former token was deleted while another process may use it: %v", err)
	}
	ahead(10 * time.Minute)
	await.True(t, "the former token is deleted", func() bool {
		return apierrors.IsNotFound(w.admin["c"].Get(t.Context(), client.ObjectKeyFromObject(issued), issued)) && !w.accepts("c", former)
	})
	await.True(t, "the Secret no longer names the former token", func() bool {
		_, there := w.secret("a", "c").Data[federationv1alpha1.SecretReplaced]
		return !there
	})
	if !w.accepts("c", w.token("c")) {
		t.Error("the new token is not valid")
	}
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.3.0.1")
}
