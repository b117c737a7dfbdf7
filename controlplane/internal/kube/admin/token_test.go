package admin

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// An API server refuses tokens until its admission knows the kind of a policy's parameter. Any other refusal is final.
func TestRequestTokenWhilePoliciesAreNew(t *testing.T) {
	learning := apierrors.NewForbidden(corev1.Resource("serviceaccounts"), "isthmus-join",
		errors.New("failed to configure binding: paramKind kind Member not yet synced to use for admission"))
	final := apierrors.NewForbidden(corev1.Resource("serviceaccounts"), "isthmus-join", errors.New("denied request"))
	for name, c := range map[string]struct {
		refused int
		err     error
		tries   int
		want    string // "" means a token
	}{
		"at once":         {0, nil, 1, ""},
		"after a while":   {3, learning, 4, ""},
		"never":           {1 << 20, learning, 600, "not yet synced"},
		"another refusal": {1, final, 1, "denied request"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tries := 0
				server := interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{
					SubResourceCreate: func(_ context.Context, _ client.Client, _ string, _, into client.Object, _ ...client.SubResourceCreateOption) error {
						if tries++; tries <= c.refused {
							return c.err
						}
						into.(*authenticationv1.TokenRequest).Status.Token = "token" //nolint:forcetypeassert // RequestToken says so
						return nil
					},
				})
				token, _, err := RequestToken(t.Context(), server, types.NamespacedName{Namespace: "isthmus-broker", Name: "isthmus-join"}, time.Hour, "")
				if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || err == nil && token != "token" {
					t.Errorf("%q, %v", token, err)
				}
				if tries < c.tries || tries > c.tries+1 {
					t.Errorf("%d tries, want %d", tries, c.tries)
				}
			})
		})
	}
}
