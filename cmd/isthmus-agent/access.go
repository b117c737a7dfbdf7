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

// errDenied is the error of a request without a valid token.
var errDenied = errors.New("the request needs the header " + status.TokenHeader + " with a token of ServiceAccount " + status.ObserverAccount +
	" for audience " + status.TokenAudience + ", as made by kubectl create token and sent by isthmusctl")

// TokenReviews authenticate requests for introspection.
//
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create

// access authorizes introspection, which shows the connections of clients on this node. A request needs a token of one
// ServiceAccount. Without an API server to check tokens, only processes of the node have access.
type access struct {
	reviews authenticationclient.TokenReviewInterface // nil without an API server
	account string                                    // user name of the ServiceAccount
}

func newAccess(cluster *rest.Config, namespace string) (access, error) {
	a := access{account: "system:serviceaccount:" + namespace + ":" + status.ObserverAccount}
	if cluster == nil {
		return a, nil
	}
	own := rest.CopyConfig(cluster)
	own.QPS, own.Burst = 5, 20 // limits the reviews that unauthenticated requests can cause
	client, err := kubernetes.NewForConfig(own)
	if err != nil {
		return access{}, fmt.Errorf("make a client for TokenReviews: %w", err)
	}
	a.reviews = client.AuthenticationV1().TokenReviews()
	return a, nil
}

// check returns nil if a request has access, errDenied if not, and another error if the token cannot be checked.
func (a access) check(r *http.Request) error {
	if a.reviews == nil {
		if !isLocal(r) {
			return errors.New("only processes of this node have access, over a loopback address")
		}
		return nil
	}
	return a.review(r.Context(), r.Header.Get(status.TokenHeader))
}

// isLocal reports whether a request comes from a process of the node.
func isLocal(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && from.Addr().Unmap().IsLoopback()
}

// guardRecords calls h for requests with access and for all requests from the node: DNS gives the same records to anyone who
// asks for them by name.
func (a access) guardRecords(h http.HandlerFunc) http.HandlerFunc {
	guarded := a.guard(h)
	return func(w http.ResponseWriter, r *http.Request) {
		if isLocal(r) {
			h(w, r)
			return
		}
		guarded(w, r)
	}
}

// review asks the API server whether token is valid and belongs to the account.
func (a access) review(ctx context.Context, token string) error {
	if token == "" {
		return errDenied
	}
	r, err := a.reviews.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{status.TokenAudience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("review the token: %w", err)
	}
	// An API server without support for audiences returns none.
	if !r.Status.Authenticated || r.Status.User.Username != a.account || !slices.Contains(r.Status.Audiences, status.TokenAudience) {
		return errDenied
	}
	return nil
}

// guard calls h for requests with access.
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
