package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
)

// errDenied is why somebody may not see.
var errDenied = errors.New("this needs the header " + status.TokenHeader + ": a token of ServiceAccount " + status.ObserverAccount +
	" for audience " + status.TokenAudience + ", as kubectl create token makes and isthmusctl sends")

// Who asks to see what clients do.
//
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create

// access decides who may see what clients do on this node: whoever may make a token of a certain ServiceAccount. Where
// there is no API server to ask, it is the processes of the node itself.
type access struct {
	reviews authenticationclient.TokenReviewInterface // nil without an API server
	account string                                    // the name of the ServiceAccount as a user
}

func newAccess(cluster *rest.Config, namespace string) (access, error) {
	a := access{account: "system:serviceaccount:" + namespace + ":" + status.ObserverAccount}
	if cluster == nil {
		return a, nil
	}
	own := rest.CopyConfig(cluster)
	own.QPS, own.Burst = 5, 20 // anybody may send a token to be looked at
	client, err := kubernetes.NewForConfig(own)
	if err != nil {
		return access{}, fmt.Errorf("make a client for TokenReviews: %w", err)
	}
	a.reviews = client.AuthenticationV1().TokenReviews()
	return a, nil
}

// check returns nil for whoever may see, errDenied for others, and another error when that cannot be told.
func (a access) check(r *http.Request) error {
	if a.reviews == nil {
		if !isOfNode(r) {
			return errors.New("only processes of this node may see this, by a loopback address")
		}
		return nil
	}
	return a.review(r.Context(), r.Header.Get(status.TokenHeader))
}

// isOfNode reports whether a process of the node itself asks.
func isOfNode(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && from.Addr().Unmap().IsLoopback()
}

// guardNode serves with h those who may see, and the processes of the node: what DNS tells to all who ask for it by
// name.
func (a access) guardNode(h http.HandlerFunc) http.HandlerFunc {
	guarded := a.guard(h)
	return func(w http.ResponseWriter, r *http.Request) {
		if isOfNode(r) {
			h(w, r)
			return
		}
		guarded(w, r)
	}
}

// review asks the API server whose token this is.
func (a access) review(ctx context.Context, token string) error {
	if token == "" {
		return errDenied
	}
	r, err := a.reviews.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{status.TokenAudience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("ask the API server whose token this is: %w", err)
	}
	// An API server that knows nothing of audiences names none.
	if !r.Status.Authenticated || r.Status.User.Username != a.account || !slices.Contains(r.Status.Audiences, status.TokenAudience) {
		return errDenied
	}
	return nil
}

// guard serves with h those who may see.
func (a access) guard(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch err := a.check(r); {
		case err == nil:
			h(w, r)
		case r.Context().Err() != nil:
		case errors.Is(err, errDenied) || a.reviews == nil:
			http.Error(w, err.Error(), http.StatusForbidden)
		default:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	}
}
