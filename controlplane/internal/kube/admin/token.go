package admin

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Token returns the token that an API server puts into secret, which is of type service-account-token and there
// already. what names the server, as "the broker".
//
// A token in a Secret works on every Kubernetes and stays valid while its holder is away for long, where a requested
// one would run out and lock it out. Deleting the Secret revokes it.
func Token(ctx context.Context, c client.Client, what string, secret *corev1.Secret) (string, error) {
	key := client.ObjectKeyFromObject(secret)
	err := Await(ctx, fmt.Sprintf("%s issued no token into Secret %s; is its controller manager running?", what, key), func() (bool, error) {
		if err := c.Get(ctx, key, secret); err != nil {
			return false, fmt.Errorf("read Secret %s on %s: %w", key, what, err)
		}
		return len(secret.Data[corev1.ServiceAccountTokenKey]) > 0, nil
	})
	return string(secret.Data[corev1.ServiceAccountTokenKey]), err
}

// Accepted waits until the server, which what names, accepts token.
func Accepted(ctx context.Context, c client.Client, what, token string) error {
	return Await(ctx, what+" does not accept the new token", func() (bool, error) {
		review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
		if err := c.Create(ctx, review); err != nil {
			return false, fmt.Errorf("try the new token on %s: %w", what, err)
		}
		return review.Status.Authenticated, nil
	})
}
