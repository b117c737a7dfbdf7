package admin

import (
	"context"
	"fmt"

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

// Accepts asks the server whether it accepts token. server names it in errors.
func Accepts(ctx context.Context, c client.Client, server, token string) (bool, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := c.Create(ctx, review); err != nil {
		return false, fmt.Errorf("review a token on %s: %w", server, err)
	}
	return review.Status.Authenticated, nil
}
