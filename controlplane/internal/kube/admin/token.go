package admin

import (
	"context"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

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

// AwaitCaches waits until API servers accept no token any more that is bound to a Secret deleted before the call. A former token
// may be refused sooner than a copy that a thief has renewed and used since.
func AwaitCaches(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(cacheTime):
		return nil
	}
}

// Accepts asks the server whether it accepts token. server names it in errors.
func Accepts(ctx context.Context, c client.Client, server, token string) (bool, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := c.Create(ctx, review); err != nil {
		return false, fmt.Errorf("review a token on %s: %w", server, err)
	}
	return review.Status.Authenticated, nil
}
