// Package reviews asks an API server who sent a request, and whether that account may read the path. In go requests with a token;
// out come decisions, which are cached for a short time.
package reviews

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
)

// How long decisions are cached, and how many.
const (
	allowFor = time.Minute
	denyFor  = 10 * time.Second
	// staleFor is how long a granted request stays granted while the API server does not answer.
	staleFor   = 15 * time.Minute
	maxAllowed = 1024
	maxDenied  = 4096
)

// patience is how long a request waits for its turn, and a review for its answer.
const patience = 5 * time.Second

// The programs that serve HTTP in a cluster review the tokens of requests.
//
// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// Reviews gives access to accounts with the right to the path, as a nonResourceURL.
type Reviews struct {
	tokens   authenticationclient.TokenReviewInterface
	rights   authorizationclient.SubjectAccessReviewInterface
	audience string
	allowed  *utilcache.LRUExpireCache // by key: the time until which no new review is needed
	denied   *utilcache.LRUExpireCache // by key: *httpserver.Refusal
	now      func() time.Time
	// Sources of which no request had access yet share a limit of reviews of their own, so that they do not use up that of
	// observers.
	known, unknown *rate.Limiter
}

// key is a hash of a token, where it stood, and the method and path of a request.
type key [sha256.Size]byte

// New returns the access to a program that expects tokens for an audience. It sends no request.
func New(cluster *rest.Config, audience string) (*Reviews, error) {
	own := rest.CopyConfig(cluster)
	own.QPS, own.Burst = -1, 0 // the limiters below bound the requests
	own.Timeout = patience
	client, err := rest.HTTPClientFor(own)
	if err != nil {
		return nil, fmt.Errorf("make a client for reviews: %w", err)
	}
	tokens, err := authenticationclient.NewForConfigAndClient(own, client)
	if err != nil {
		return nil, fmt.Errorf("make a client for TokenReviews: %w", err)
	}
	rights, err := authorizationclient.NewForConfigAndClient(own, client)
	if err != nil {
		return nil, fmt.Errorf("make a client for SubjectAccessReviews: %w", err)
	}
	return newReviews(tokens.TokenReviews(), rights.SubjectAccessReviews(), audience), nil
}

func newReviews(tokens authenticationclient.TokenReviewInterface, rights authorizationclient.SubjectAccessReviewInterface, audience string) *Reviews {
	return &Reviews{
		tokens: tokens, rights: rights, audience: audience, now: time.Now,
		allowed: utilcache.NewLRUExpireCache(maxAllowed), denied: utilcache.NewLRUExpireCache(maxDenied),
		known: rate.NewLimiter(20, 40), unknown: rate.NewLimiter(10, 20),
	}
}

// Check implements httpserver.Access.
func (v *Reviews) Check(r *http.Request, from *httpserver.Source) *httpserver.Refusal {
	token, audiences := v.tokenOf(r)
	if token == "" {
		return v.refuse(r, httpserver.NoToken, "the request has no token")
	}
	verb, path := strings.ToLower(r.Method), r.URL.Path
	k := key(sha256.Sum256([]byte(strings.Join([]string{token, strings.Join(audiences, " "), verb, path}, "\x00"))))
	fresh, granted := v.allowed.Get(k)
	if granted && v.now().Before(fresh.(time.Time)) {
		return nil
	}
	if refused, ok := v.denied.Get(k); ok {
		return refused.(*httpserver.Refusal)
	}
	if !from.TakeFailure() {
		return &httpserver.Refusal{Code: http.StatusTooManyRequests, Reason: httpserver.FailureRate, Message: "too many requests from this address were refused; wait a minute"}
	}
	refused := v.review(r, from, token, audiences)
	switch {
	case refused == nil:
		from.GiveBack()
		v.allowed.Add(k, v.now().Add(allowFor), staleFor)
	case refused.Reason == httpserver.Unavailable:
		from.GiveBack()
		if granted {
			return nil
		}
	default:
		v.allowed.Remove(k)
		v.denied.Add(k, refused, denyFor)
	}
	return refused
}

// tokenOf returns the token of a request and the audiences for which it must be valid; none means that of the API server. The
// API server removes the Authorization header when it forwards a request to a pod, so isthmusctl uses a header of its own.
func (v *Reviews) tokenOf(r *http.Request) (token string, audiences []string) {
	if token = r.Header.Get(status.TokenHeader); token != "" {
		return token, []string{v.audience}
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return "", nil
	}
	token = strings.TrimSpace(token)
	if slices.Contains(claimedAudiences(token), v.audience) {
		return token, []string{v.audience}
	}
	return token, nil
}

// claimedAudiences returns the audiences that a token names, without verifying it.
func claimedAudiences(token string) []string {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return nil
	}
	var claims struct {
		Audiences []string `json:"aud"`
	}
	if json.Unmarshal(text, &claims) != nil {
		return nil
	}
	return claims.Audiences
}

// review asks the API server.
func (v *Reviews) review(r *http.Request, from *httpserver.Source, token string, audiences []string) *httpserver.Refusal {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	limit := v.unknown
	if from.IsKnown() {
		limit = v.known
	}
	if err := limit.Wait(ctx); err != nil {
		return unavailable("too many tokens wait for a review")
	}
	t, err := v.tokens.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: audiences},
	}, metav1.CreateOptions{})
	if err != nil {
		return failed("TokenReviews", err)
	}
	// An API server without support for audiences returns none.
	if !t.Status.Authenticated || len(audiences) > 0 && !slices.Contains(t.Status.Audiences, v.audience) {
		return v.refuse(r, httpserver.InvalidToken, "the token is not valid here")
	}
	user := t.Status.User
	extra := map[string]authorizationv1.ExtraValue{}
	for k, values := range user.Extra {
		extra[k] = authorizationv1.ExtraValue(values)
	}
	verb := strings.ToLower(r.Method)
	a, err := v.rights.Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: r.URL.Path, Verb: verb},
	}}, metav1.CreateOptions{})
	if err != nil {
		return failed("SubjectAccessReviews", err)
	}
	if !a.Status.Allowed {
		return &httpserver.Refusal{Code: http.StatusForbidden, Reason: httpserver.Forbidden, Message: fmt.Sprintf("%s may not %s the nonResourceURL %s", user.Username, verb, r.URL.Path)}
	}
	return nil
}

// refuse returns the refusal of a request without a valid token. One that came through the API server gets 403: its client would
// take 401 for an answer of the API server.
func (v *Reviews) refuse(r *http.Request, reason, why string) *httpserver.Refusal {
	code := http.StatusUnauthorized
	if r.Header.Get(status.TokenHeader) != "" {
		code = http.StatusForbidden
	}
	return &httpserver.Refusal{Code: code, Reason: reason, Message: fmt.Sprintf(
		"%s; send one of an account with the right to %s the nonResourceURL %s: as Authorization: Bearer, or of ServiceAccount %s for audience %s in %s, as isthmusctl does",
		why, strings.ToLower(r.Method), r.URL.Path, status.ObserverAccount, v.audience, status.TokenHeader)}
}

// failed returns the refusal of a request that could not be reviewed.
func failed(kind string, err error) *httpserver.Refusal {
	if apierrors.IsForbidden(err) {
		err = errors.New("this program may not create them; bind ClusterRole system:auth-delegator to its account")
	}
	return unavailable(fmt.Sprintf("the API server answers no %s: %v", kind, err))
}

func unavailable(why string) *httpserver.Refusal {
	return &httpserver.Refusal{Code: http.StatusServiceUnavailable, Reason: httpserver.Unavailable, Message: why}
}
