// Package credential renews the token of a ServiceAccount in another cluster before it expires.
//
// For example, supervisor "a" holds a token of account "federation-a" of member "c", which lives for 7 days. After three and a half
// days its controller requests another one of the same account, and writes it into a Secret of its own cluster. All replicas read it
// from there. If c is away, the controller retries for the other three and a half days.
//
// Earlier versions of Isthmus issued tokens that do not expire. A Renewer replaces such a token at once, and deletes it when all
// replicas use the new one.
package credential

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

const (
	// CheckInterval is how often a token is looked at; one that another process has renewed is noticed then.
	CheckInterval = 10 * time.Second
	// firstRetry and lastRetry bound the backoff after a failed renewal.
	firstRetry = 10 * time.Second
	lastRetry  = 10 * time.Minute
	// attemptTimeout bounds one renewal.
	attemptTimeout = 30 * time.Second
	// settleTime is how long all replicas may take to use a renewed token: kubelets update mounted files within it.
	settleTime = 5 * time.Minute
)

// Keys of a Secret that holds a token.
const (
	KeyToken = v1alpha1.BrokerSecretToken
	// KeyReplaced is the key of the name of the Secret with the former token, which does not expire. It is beside the account, and
	// the key is there until it is deleted.
	KeyReplaced = v1alpha1.BrokerSecretReplaced
)

// Config describes a token. All fields are required, but for Now.
type Config struct {
	Name    string               // of the token, in the log: "the token for the broker"
	Issuer  string               // the API server with the account, in errors: "broker https://192.0.2.1:6443"
	Account types.NamespacedName // other tokens, such as those of administrators, are left alone
	// Client returns a client of the issuer, with the token.
	Client func() (corev1client.CoreV1Interface, error)
	// Current returns the token in use, and Replaced the value of KeyReplaced, as all replicas read them.
	Current  func() string
	Replaced func() (string, error)
	// Next returns the Secret beside the account to which the next token is bound, and its lifetime.
	Next   func(context.Context) (secret string, lifetime time.Duration, err error)
	Remedy string // what to do if no token is issued: "run isthmusctl deploy-broker there"
	Rotate string // the command that ends all tokens of the account: "isthmusctl rotate"
	// Local is a client of this cluster, and Secret the Secret there into which renewed tokens are written.
	Local  corev1client.CoreV1Interface
	Secret types.NamespacedName
	// Expires becomes the end of the token, in seconds since 1970, and 0 for one that does not expire. Renewals counts by result.
	Expires  prometheus.Gauge
	Renewals *prometheus.CounterVec
	// Changed is called after a renewal that succeeded or failed. It must not block.
	Changed func()
	Log     *slog.Logger
	Now     func() time.Time // nil means time.Now
}

// Renewer renews one token. Failure is safe for concurrent use.
type Renewer struct {
	cfg Config

	mu      sync.Mutex
	failure error // of the last renewal

	// Used by Check alone.
	written  Token // the last renewed token, which the replicas may not have read yet
	failures int
	retry    time.Time // no renewal before
	seen     time.Time // since when a renewed token is in use instead of one that does not expire
	kept     bool      // the former token could not be deleted
}

// New prepares a Renewer. It sends no request.
func New(cfg Config) *Renewer {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Renewer{cfg: cfg}
}

// Current returns the token in use. It is zero if that is none of the account.
func (r *Renewer) Current() Token {
	t := Parse(r.cfg.Current())
	if t.Account != fmt.Sprintf("system:serviceaccount:%s:%s", r.cfg.Account.Namespace, r.cfg.Account.Name) {
		return Token{}
	}
	return t
}

// Failure returns the error of the last renewal, nil if it succeeded.
func (r *Renewer) Failure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failure
}

// Run checks the token at CheckInterval until ctx ends.
func (r *Renewer) Run(ctx context.Context) {
	tick := time.NewTicker(CheckInterval)
	defer tick.Stop()
	for {
		r.Check(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Check renews the token if that is due, and deletes the former one if it does not expire. Calls must not overlap.
func (r *Renewer) Check(ctx context.Context) {
	t, now := r.Current(), r.cfg.Now()
	if t == (Token{}) {
		return
	}
	r.cfg.Expires.Set(0)
	if !t.Expires.IsZero() {
		r.cfg.Expires.Set(float64(t.Expires.Unix()))
	}
	newest := t
	if r.written.Expires.After(t.Expires) {
		newest = r.written
	}
	ended := !t.Expires.IsZero() && now.After(t.Expires) // the issuer accepts no request
	if !ended && !now.Before(newest.Due()) && !now.Before(r.retry) {
		ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
		defer cancel()
		r.report(r.renew(ctx, t), now)
	}
	if !t.Expires.IsZero() && !ended {
		r.deleteFormer(ctx, now)
	}
}

// report records the result of a renewal.
func (r *Renewer) report(err error, now time.Time) {
	r.mu.Lock()
	before := r.failure
	r.failure = err
	r.mu.Unlock()
	if err == nil {
		r.cfg.Renewals.WithLabelValues("ok").Inc()
		r.failures, r.retry = 0, time.Time{}
		r.cfg.Log.Info("renewed "+r.cfg.Name, "expires", r.written.Expires)
	} else {
		r.cfg.Renewals.WithLabelValues("error").Inc()
		r.retry = now.Add(min(firstRetry<<min(r.failures, 10), lastRetry))
		r.failures++
		if before == nil || before.Error() != err.Error() {
			r.cfg.Log.Error(r.cfg.Name+" is not renewed, retrying", "err", err)
		}
	}
	r.cfg.Changed()
}

// renew requests a token from the issuer and writes it into the Secret. former is the token in use.
func (r *Renewer) renew(ctx context.Context, former Token) error {
	secret, lifetime, err := r.cfg.Next(ctx)
	if err != nil {
		return err
	}
	issuer, err := r.cfg.Client()
	if err != nil {
		return err
	}
	answer, err := issuer.ServiceAccounts(r.cfg.Account.Namespace).CreateToken(ctx, r.cfg.Account.Name, admin.TokenRequest(lifetime, secret), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("request a token on %s; if this lasts, %s: %w", r.cfg.Issuer, r.cfg.Remedy, err)
	}
	fresh := Token{Issued: r.cfg.Now(), Expires: answer.Status.ExpirationTimestamp.Time}
	data := map[string]any{KeyToken: []byte(answer.Status.Token)}
	if former.Expires.IsZero() && former.Secret != "" {
		data[KeyReplaced] = []byte(former.Secret)
	}
	if err := r.patch(ctx, data); err != nil {
		return err
	}
	r.written = fresh
	return nil
}

// patch changes values of the Secret.
func (r *Renewer) patch(ctx context.Context, data map[string]any) error {
	body, err := json.Marshal(map[string]any{"data": data})
	if err != nil {
		return fmt.Errorf("encode a patch: %w", err)
	}
	_, err = r.cfg.Local.Secrets(r.cfg.Secret.Namespace).Patch(ctx, r.cfg.Secret.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: v1alpha1.FieldOwner})
	if err != nil {
		return fmt.Errorf("write the renewed token into Secret %s: %w", r.cfg.Secret, err)
	}
	return nil
}

// deleteFormer deletes the token that does not expire, when all replicas use a renewed one. Without the right it stays until
// an administrator rotates the tokens.
func (r *Renewer) deleteFormer(ctx context.Context, now time.Time) {
	if r.kept {
		return
	}
	name, err := r.cfg.Replaced()
	if err == nil && name == "" {
		r.seen = time.Time{}
		return
	}
	if r.seen.IsZero() {
		r.seen = now
	}
	if err != nil || now.Sub(r.seen) < settleTime {
		return
	}
	issuer, err := r.cfg.Client()
	if err == nil {
		err = issuer.Secrets(r.cfg.Account.Namespace).Delete(ctx, name, metav1.DeleteOptions{})
	}
	switch {
	case err == nil || apierrors.IsNotFound(err):
		err = r.patch(ctx, map[string]any{KeyReplaced: nil})
		if err == nil {
			r.kept = true // the replicas' copy lags behind
			r.cfg.Log.Info("deleted the former token, which did not expire; "+r.cfg.Name+" is valid instead", "secret", name)
			return
		}
	case apierrors.IsForbidden(err):
		r.kept = true
	}
	r.cfg.Log.Error("the former token, which does not expire, could not be deleted; "+r.cfg.Rotate+" deletes it", "token", r.cfg.Name, "err", err)
}
