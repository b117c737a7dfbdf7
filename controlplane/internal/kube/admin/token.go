package admin

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Token returns the token that an API server writes into secret, which exists and has type service-account-token. server
// names the server in errors. Such a token does not expire. Deleting the Secret revokes it.
func Token(ctx context.Context, c client.Client, server string, secret *corev1.Secret) (string, error) {
	key := client.ObjectKeyFromObject(secret)
	err := Await(ctx, fmt.Sprintf("%s issued no token into Secret %s; check that its controller manager runs", server, key), func() (bool, error) {
		if err := c.Get(ctx, key, secret); err != nil {
			return false, fmt.Errorf("read Secret %s on %s: %w", key, server, err)
		}
		return len(secret.Data[corev1.ServiceAccountTokenKey]) > 0, nil
	})
	return string(secret.Data[corev1.ServiceAccountTokenKey]), err
}

// Accepted waits until the server accepts token. server names it in errors.
func Accepted(ctx context.Context, c client.Client, server, token string) error {
	return Await(ctx, server+" does not accept the new token", func() (bool, error) { return authenticated(ctx, c, server, token) })
}

// Refused waits until the server refuses a token that was revoked. server names it in errors.
func Refused(ctx context.Context, c client.Client, server, token string) error {
	return Await(ctx, server+" still accepts the former token", func() (bool, error) {
		ok, err := authenticated(ctx, c, server, token)
		return !ok, err
	})
}

// authenticated asks the server whether it accepts token.
func authenticated(ctx context.Context, c client.Client, server, token string) (bool, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := c.Create(ctx, review); err != nil {
		return false, fmt.Errorf("review a token on %s: %w", server, err)
	}
	return review.Status.Authenticated, nil
}
