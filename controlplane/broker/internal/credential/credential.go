// Package credential renews the token with which a member's controller uses the broker.
//
// For example, the token of "east" lives for 7 days. After three and a half days the controller requests another one for its own
// account, and writes it into Secret isthmus-broker of its cluster. The kubelet updates the mounted file within minutes, and all
// replicas read it from there. If the broker is away, the controller retries for the other three and a half days. A cluster that
// was away for longer needs an invitation to join again.
//
// Earlier versions of Isthmus issued tokens that do not expire. The controller replaces such a token at once, and deletes it on the
// broker when all replicas use the new one.
package credential

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const (
	// checkInterval is how often the token is looked at; a file that the kubelet has changed is noticed then.
	checkInterval = 10 * time.Second
	// firstRetry and lastRetry bound the backoff after a failed renewal.
	firstRetry = 10 * time.Second
	lastRetry  = 10 * time.Minute
	// attemptTimeout bounds one renewal.
	attemptTimeout = 30 * time.Second
	// settleTime is how long the kubelets of all replicas may take to update the mounted file.
	settleTime = 5 * time.Minute
)

var (
	expires = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_controller_broker_credential_expires_seconds",
		Help: "When this member's token for the broker expires, in seconds since 1970; 0 if it does not.",
	})
	renewals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_controller_broker_credential_renewals_total",
		Help: "Renewals of this member's token for the broker.",
	}, []string{"result"})
)

func init() { metrics.Registry.MustRegister(expires, renewals) }

// Config identifies a member, its cluster and its broker.
type Config struct {
	Self            clusterset.ClusterID
	Broker          *rest.Config // with the token, which may be a file
	BrokerNamespace string
	Local           *rest.Config // the member's own API server
	Namespace       string       // with Secret isthmus-broker
	// ClusterSet reads the settings from the broker.
	ClusterSet func(context.Context) (v1alpha1.ClusterSetConfigSpec, error)
	// Changed is called after a renewal that succeeded or failed. It must not block.
	Changed func()
	Log     *slog.Logger
	Now     func() time.Time // nil means time.Now
}

// State describes the token.
type State struct {
	Managed bool      // it is a token of the member's account, which the controller renews
	Expires time.Time // zero if it does not expire
	// Err is the reason why it is not renewed, or what to do because it has ended. Nil without a fault.
	Err   error
	Ended bool
}

// Renewer renews the token. Safe for concurrent use.
type Renewer struct {
	cfg    Config
	broker corev1client.CoreV1Interface
	local  corev1client.CoreV1Interface

	mu      sync.Mutex
	failure error // of the last renewal

	// Used by Start alone.
	written  Token // the last renewed token, which may not have reached the file yet
	failures int
	retry    time.Time // no renewal before
	seen     time.Time // since when the file has a renewed token instead of one that does not expire
	kept     bool      // the former token could not be deleted
}

// New prepares a Renewer. It sends no request.
func New(cfg Config) (*Renewer, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	broker, err := corev1client.NewForConfig(cfg.Broker)
	if err != nil {
		return nil, fmt.Errorf("prepare a client of broker %s: %w", cfg.Broker.Host, err)
	}
	local, err := corev1client.NewForConfig(cfg.Local)
	if err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	return &Renewer{cfg: cfg, broker: broker, local: local}, nil
}

// current returns the token in use. It is zero if that is none of the member's account, such as that of an administrator.
func (r *Renewer) current() Token {
	text := r.cfg.Broker.BearerToken
	if file := r.cfg.Broker.BearerTokenFile; file != "" {
		if read, err := os.ReadFile(file); err == nil {
			text = string(read)
		}
	}
	t := Parse(text)
	if t.Account != fmt.Sprintf("system:serviceaccount:%s:%s", r.cfg.BrokerNamespace, v1alpha1.MemberAccount(string(r.cfg.Self))) {
		return Token{}
	}
	return t
}

// State returns the current State.
func (r *Renewer) State() State {
	t := r.current()
	s := State{Managed: t != Token{}, Expires: t.Expires}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !s.Managed:
	case !t.Expires.IsZero() && r.cfg.Now().After(t.Expires):
		s.Ended = true
		s.Err = fmt.Errorf("the credentials of cluster %[1]s for broker %[2]s ended at %[3]s; run isthmusctl invite %[1]s on the broker and isthmusctl join with its file in cluster %[1]s, which keeps its block, ClusterSetIPs and place",
			r.cfg.Self, r.cfg.Broker.Host, t.Expires.UTC().Format(time.RFC3339))
	case r.failure != nil:
		s.Err = r.failure
	}
	return s
}

// Start renews the token until ctx ends, and always returns nil. A manager runs it while it leads.
func (r *Renewer) Start(ctx context.Context) error {
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	for {
		r.check(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// check renews the token if that is due, and deletes the former one if it does not expire.
func (r *Renewer) check(ctx context.Context) {
	t, now := r.current(), r.cfg.Now()
	if t == (Token{}) {
		return
	}
	expires.Set(0)
	if !t.Expires.IsZero() {
		expires.Set(float64(t.Expires.Unix()))
	}
	newest := t
	if r.written.Expires.After(t.Expires) {
		newest = r.written
	}
	ended := !t.Expires.IsZero() && now.After(t.Expires) // the broker accepts no request
	if !ended && !now.Before(newest.due()) && !now.Before(r.retry) {
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
		renewals.WithLabelValues("ok").Inc()
		r.failures, r.retry = 0, time.Time{}
		r.cfg.Log.Info("renewed the token for the broker", "expires", r.written.Expires)
	} else {
		renewals.WithLabelValues("error").Inc()
		r.retry = now.Add(min(firstRetry<<min(r.failures, 10), lastRetry))
		r.failures++
		if before == nil || before.Error() != err.Error() {
			r.cfg.Log.Error("the token for the broker is not renewed, retrying", "err", err)
		}
	}
	r.cfg.Changed()
}

// renew requests a token on the broker and writes it into the member's Secret. former is the token in use.
func (r *Renewer) renew(ctx context.Context, former Token) error {
	spec, err := r.cfg.ClusterSet(ctx)
	if err != nil {
		return fmt.Errorf("read the ClusterSetConfig on broker %s: %w", r.cfg.Broker.Host, err)
	}
	id := string(r.cfg.Self)
	secret := spec.Credential(id)
	if secret == "" {
		return fmt.Errorf("the ClusterSetConfig on broker %s has no credential of cluster %s; run isthmusctl deploy-broker there", r.cfg.Broker.Host, id)
	}
	seconds := int64(spec.CredentialLifetime() / time.Second)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &seconds, BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Secret", APIVersion: "v1", Name: secret},
	}}
	answer, err := r.broker.ServiceAccounts(r.cfg.BrokerNamespace).CreateToken(ctx, v1alpha1.MemberAccount(id), request, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("request a token on broker %s; if this lasts, run isthmusctl deploy-broker there: %w", r.cfg.Broker.Host, err)
	}
	fresh := Token{Issued: r.cfg.Now(), Expires: answer.Status.ExpirationTimestamp.Time}
	data := map[string]any{v1alpha1.BrokerSecretToken: []byte(answer.Status.Token)}
	if former.Expires.IsZero() && former.Secret != "" {
		data[v1alpha1.BrokerSecretReplaced] = []byte(former.Secret)
	}
	if err := r.patch(ctx, data); err != nil {
		return err
	}
	r.written = fresh
	return nil
}

// patch changes values of the member's Secret.
func (r *Renewer) patch(ctx context.Context, data map[string]any) error {
	body, err := json.Marshal(map[string]any{"data": data})
	if err != nil {
		return fmt.Errorf("encode a patch: %w", err)
	}
	_, err = r.local.Secrets(r.cfg.Namespace).Patch(ctx, v1alpha1.BrokerSecret, types.MergePatchType, body, metav1.PatchOptions{FieldManager: v1alpha1.FieldOwner})
	if err != nil {
		return fmt.Errorf("write the renewed token into Secret %s/%s: %w", r.cfg.Namespace, v1alpha1.BrokerSecret, err)
	}
	return nil
}

// deleteFormer deletes the token that does not expire, when all replicas use a renewed one. Without the right it stays until
// isthmusctl rotate.
func (r *Renewer) deleteFormer(ctx context.Context, now time.Time) {
	if r.cfg.Broker.BearerTokenFile == "" || r.kept {
		return
	}
	name, err := os.ReadFile(filepath.Join(filepath.Dir(r.cfg.Broker.BearerTokenFile), v1alpha1.BrokerSecretReplaced))
	if errors.Is(err, fs.ErrNotExist) || len(name) == 0 {
		r.seen = time.Time{}
		return
	}
	if r.seen.IsZero() {
		r.seen = now
	}
	if err != nil || now.Sub(r.seen) < settleTime {
		return
	}
	err = r.broker.Secrets(r.cfg.BrokerNamespace).Delete(ctx, string(name), metav1.DeleteOptions{})
	switch {
	case err == nil || apierrors.IsNotFound(err):
		err = r.patch(ctx, map[string]any{v1alpha1.BrokerSecretReplaced: nil})
		if err == nil {
			r.kept = true // the file lags behind
			r.cfg.Log.Info("deleted the former token for the broker, which did not expire", "secret", string(name))
			return
		}
	case apierrors.IsForbidden(err):
		r.kept = true
	}
	r.cfg.Log.Error("the former token for the broker, which does not expire, could not be deleted; isthmusctl rotate deletes it", "err", err)
}
