package admin

import (
	"context"
	"fmt"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TokenRequest asks for a token that lives for lifetime, and ends earlier if Secret boundTo beside the account is deleted; "" is
// none. API servers may grant a shorter lifetime.
func TokenRequest(lifetime time.Duration, boundTo string) *authenticationv1.TokenRequest {
	r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(lifetime / time.Second))}}
	if boundTo != "" {
		r.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Secret", APIVersion: "v1", Name: boundTo}
	}
	return r
}

// RequestToken returns a new token of a ServiceAccount, and its end in UTC. See TokenRequest. It tries again while the API server
// does not know the kinds of new policies.
func RequestToken(ctx context.Context, c client.Client, account types.NamespacedName, lifetime time.Duration, boundTo string) (string, time.Time, error) {
	request := TokenRequest(lifetime, boundTo)
	of := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: account.Namespace, Name: account.Name}}
	var last error
	err := AwaitFor(ctx, learning, "its admission policies are not in effect", func() (bool, error) {
		last = c.SubResource("token").Create(ctx, of, request)
		if isLearning(last) {
			return false, nil
		}
		return true, last
	})
	if err != nil {
		if isLearning(last) {
			err = last
		}
		return "", time.Time{}, fmt.Errorf("request a token of ServiceAccount %s: %w", account, err)
	}
	return request.Status.Token, request.Status.ExpirationTimestamp.UTC(), nil
}

// learning is how long an API server may take until its admission knows a kind that was just defined: it asks for new kinds every
// half minute.
const learning = time.Minute

// isLearning reports whether an API server refused a request because its admission does not know the kind of a policy's parameter
// yet, or has not listed its objects. The reason of such an answer is Invalid, though its message says "is forbidden".
func isLearning(err error) bool {
	return apierrors.IsInvalid(err) && strings.Contains(err.Error(), "failed to configure") && strings.Contains(err.Error(), "paramKind")
}

// Accepted waits until the server accepts token. server names it in errors.
func Accepted(ctx context.Context, c client.Client, server, token string) error {
	return Await(ctx, server+" does not accept the new token", func() (bool, error) { return Accepts(ctx, c, server, token) })
}

// Refused waits until the server refuses a token that was revoked. server names it in errors.
func Refused(ctx context.Context, c client.Client, server, token string) error {
	return Await(ctx, server+" still accepts the former token", func() (bool, error) {
		ok, err := Accepts(ctx, c, server, token)
		return !ok, err
	})
}

// cacheTime is how long API servers may accept a token after its Secret is deleted: they cache the result of a check for 10 s.
const cacheTime = 11 * time.Second

// Wait waits for d, unless ctx ends.
func Wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// AwaitCaches waits until API servers accept no token any more that is bound to a Secret deleted before the call. A former token
// may be refused sooner than a copy that a thief has renewed and used since.
func AwaitCaches(ctx context.Context) error { return Wait(ctx, cacheTime) }

// Accepts asks the server whether it accepts token. server names it in errors.
func Accepts(ctx context.Context, c client.Client, server, token string) (bool, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := c.Create(ctx, review); err != nil {
		return false, fmt.Errorf("review a token on %s: %w", server, err)
	}
	return review.Status.Authenticated, nil
}
