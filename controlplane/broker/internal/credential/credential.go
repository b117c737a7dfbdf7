// Package credential renews the token with which a member's controller uses the broker.
//
// For example, the token of "east" lives for 7 days. After three and a half days the controller requests another one for its own
// account, and writes it into Secret isthmus-broker of its cluster. The kubelet updates the mounted file within minutes, and all
// replicas read it from there. If the broker is away, the controller retries for the other three and a half days. A cluster that
// was away for longer needs an invitation to join again.
//
// Package controlplane/internal/credential has the rules of renewal. This one knows the broker: its settings, its errors and the file
// with the token.
package credential

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/credential"
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
	cfg   Config
	token *credential.Renewer
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
	r := &Renewer{cfg: cfg}
	r.token = credential.New(credential.Config{
		Name: "the token for the broker", Issuer: "broker " + cfg.Broker.Host,
		Account: types.NamespacedName{Namespace: cfg.BrokerNamespace, Name: v1alpha1.MemberAccount(string(cfg.Self))},
		Client:  func() (corev1client.CoreV1Interface, error) { return broker, nil },
		Current: r.current, Replaced: r.replaced, Next: r.next,
		Remedy: "run isthmusctl deploy-broker there", Rotate: "isthmusctl rotate",
		Local: local, Secret: types.NamespacedName{Namespace: cfg.Namespace, Name: v1alpha1.BrokerSecret},
		Expires: expires, Renewals: renewals, Changed: cfg.Changed, Log: cfg.Log, Now: cfg.Now,
	})
	return r, nil
}

// current returns the text of the token in use.
func (r *Renewer) current() string {
	if file := r.cfg.Broker.BearerTokenFile; file != "" {
		if read, err := os.ReadFile(file); err == nil {
			return string(read)
		}
	}
	return r.cfg.Broker.BearerToken
}

// replaced returns the name of the Secret on the broker with the former token, "" if there is none.
func (r *Renewer) replaced() (string, error) {
	if r.cfg.Broker.BearerTokenFile == "" {
		return "", nil
	}
	name, err := os.ReadFile(filepath.Join(filepath.Dir(r.cfg.Broker.BearerTokenFile), v1alpha1.BrokerSecretReplaced))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read the name of the former token: %w", err)
	}
	return string(name), nil
}

// next returns the Secret on the broker to which the next token is bound, and its lifetime.
func (r *Renewer) next(ctx context.Context) (string, time.Duration, error) {
	spec, err := r.cfg.ClusterSet(ctx)
	if err != nil {
		return "", 0, fmt.Errorf("read the ClusterSetConfig on broker %s: %w", r.cfg.Broker.Host, err)
	}
	secret := spec.Credential(string(r.cfg.Self))
	if secret == "" {
		return "", 0, fmt.Errorf("the ClusterSetConfig on broker %s has no credential of cluster %s; run isthmusctl deploy-broker there", r.cfg.Broker.Host, r.cfg.Self)
	}
	return secret, spec.CredentialLifetime(), nil
}

// State returns the current State.
func (r *Renewer) State() State {
	t := r.token.Current()
	s := State{Managed: t != credential.Token{}, Expires: t.Expires}
	switch {
	case !s.Managed:
	case !t.Expires.IsZero() && r.cfg.Now().After(t.Expires):
		s.Ended = true
		s.Err = fmt.Errorf("the credentials of cluster %[1]s for broker %[2]s ended at %[3]s; run isthmusctl invite %[1]s on the broker and isthmusctl join with its file in cluster %[1]s, which keeps its block, ClusterSetIPs and place",
			r.cfg.Self, r.cfg.Broker.Host, t.Expires.UTC().Format(time.RFC3339))
	default:
		s.Err = r.token.Failure()
	}
	return s
}

// Start renews the token until ctx ends, and always returns nil. A manager runs it while it leads.
func (r *Renewer) Start(ctx context.Context) error {
	r.token.Run(ctx)
	return nil
}
