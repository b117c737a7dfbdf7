package federation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

var (
	tokenExpires = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_federation_credential_expires_seconds",
		Help: "When this supervisor's token for the member expires, in seconds since 1970; 0 if it does not.",
	}, []string{"member"})
	tokenRenewals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_federation_credential_renewals_total",
		Help: "Renewals of this supervisor's token for the member.",
	}, []string{"member", "result"})
)

func init() { metrics.Registry.MustRegister(tokenExpires, tokenRenewals) }

// tokenRenewer renews this supervisor's tokens for the members of its Federation. One process of the cluster runs it. All of them read
// renewed tokens from the cluster's Secrets.
type tokenRenewer struct {
	federation *Federation
	local      corev1client.CoreV1Interface
	members    map[renewedToken]*credential.Renewer
}

// renewedToken identifies a token that a Renewer renews.
type renewedToken struct {
	cluster clusterset.ClusterID // the supervisor
	member  clusterset.ClusterID
	secret  string
}

// run renews tokens until ctx ends.
func (r *tokenRenewer) run(ctx context.Context) {
	defer func() {
		tokenExpires.Reset()
		tokenRenewals.Reset()
	}()
	logged := ""
	for ctx.Err() == nil {
		if err := r.check(ctx); err != nil && ctx.Err() == nil && err.Error() != logged {
			logged = err.Error()
			r.federation.cfg.Log.Error("tokens for members cannot be renewed", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(r.federation.cfg.Times.Probe):
		}
	}
}

// check renews the tokens for reachable members that are due.
func (r *tokenRenewer) check(ctx context.Context) error {
	federation := &federationv1alpha1.Federation{}
	err := r.federation.local.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, federation)
	if errors.Is(err, objectcache.ErrNotSynced) || errors.Is(err, objectcache.ErrKindMissing) {
		return nil // it is called again
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read the Federation: %w", err)
	}
	r.federation.mu.Lock()
	cluster := r.federation.cluster
	r.federation.mu.Unlock()
	wanted := map[renewedToken]bool{}
	for _, m := range federation.Spec.Members {
		key := renewedToken{cluster: cluster, member: clusterset.ClusterID(m.ClusterID), secret: m.Secret}
		wanted[key] = true
		if r.members[key] == nil {
			r.members[key] = r.renewer(key)
		}
		if r.federation.memberConfig(key.member) != nil {
			r.members[key].Check(ctx)
		}
	}
	for key := range r.members {
		if !wanted[key] {
			delete(r.members, key)
			tokenExpires.DeleteLabelValues(string(key.member))
			tokenRenewals.DeletePartialMatch(prometheus.Labels{"member": string(key.member)})
		}
	}
	return nil
}

// renewer returns the Renewer of one token.
func (r *tokenRenewer) renewer(key renewedToken) *credential.Renewer {
	f := r.federation
	labels := prometheus.Labels{"member": string(key.member)}
	return credential.New(credential.Config{
		Name: "the token for member " + string(key.member), Issuer: "member " + string(key.member),
		Account: types.NamespacedName{Namespace: f.cfg.Namespace, Name: federationv1alpha1.SupervisorAccount(key.cluster)},
		Client: func() (corev1client.CoreV1Interface, error) {
			config := f.memberConfig(key.member)
			if config == nil {
				return nil, fmt.Errorf("member %s cannot be reached", key.member)
			}
			return corev1client.NewForConfig(config)
		},
		Current:  func() string { return string(r.secret(key.secret)[federationv1alpha1.SecretToken]) },
		Replaced: func() (string, error) { return string(r.secret(key.secret)[federationv1alpha1.SecretReplaced]), nil },
		Next: func(context.Context) (string, time.Duration, error) {
			bound := string(r.secret(key.secret)[federationv1alpha1.SecretCredential])
			if bound == "" {
				return "", 0, fmt.Errorf("an earlier version stored the token in Secret %s/%s, without the key %s; run isthmusctl federation create again",
					federationv1alpha1.SecretNamespace, key.secret, federationv1alpha1.SecretCredential)
			}
			return bound, federationv1alpha1.TokenLifetime, nil
		},
		Remedy: "run isthmusctl federation create again", Rotate: "isthmusctl federation rotate",
		Local: r.local, Secret: types.NamespacedName{Namespace: federationv1alpha1.SecretNamespace, Name: key.secret},
		Expires: tokenExpires.With(labels), Renewals: tokenRenewals.MustCurryWith(labels),
		Changed: func() {}, Log: f.cfg.Log, Now: f.cfg.Now,
	})
}

// secret returns the content of a Secret with a token, which is empty if there is none.
func (r *tokenRenewer) secret(name string) map[string][]byte {
	secret := &corev1.Secret{}
	key := client.ObjectKey{Namespace: federationv1alpha1.SecretNamespace, Name: name}
	if err := r.federation.local.Get(context.Background(), key, secret); err != nil {
		return nil // the member counts as unreachable
	}
	return secret.Data
}

// memberConfig returns the configuration of clients of a member that is reachable, else nil.
func (f *Federation) memberConfig(id clusterset.ClusterID) *rest.Config {
	f.mu.Lock()
	e := f.engine
	f.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.ReachableConfig(id)
}
