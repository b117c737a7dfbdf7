// Package federation runs in the controller of a cluster that takes part in a federation, which needs no broker. In a
// supervisor it connects to all members that the cluster's Federation names and takes part in the election of a leader for
// each. Where it wins, package engine keeps federated Services and policies in line with all members. In any other cluster
// it only maintains the cluster's own claims.
//
// Several processes may run, here and in other supervisors; each member has one leader. When a member is silent, its last
// known objects stay in effect. When this process ends, the objects that it wrote stay, and the next leader writes nothing
// unless something changed.
package federation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/federation/engine"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/election"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=federations,verbs=get;list;watch
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=federations/status;clusterclaims/status,verbs=update
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=clusterclaims,verbs=get;list;watch;create
// +kubebuilder:rbac:groups=about.k8s.io,resources=clusterproperties,verbs=get;list;watch;create;update
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// NotFormed is the Problem of a State in a cluster that is not part of a federation yet.
const NotFormed = "there is no Federation; run isthmusctl federation create"

// scheme registers every kind that the federation reads or writes, in members and in this cluster.
var scheme = runtime.NewScheme()

func init() {
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1beta1.Install, about.AddToScheme, federationv1alpha1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err) // the kinds are fixed
		}
	}
}

// probe is the interval between two probes of a member.
const probe = 2500 * time.Millisecond

// living are the times of liveness. A dead member's endpoints are gone within the time of a Lease: 7.5 s until its API server is known
// not to answer, and two probes of its endpoints.
var living = func() liveness.Times {
	t := liveness.DefaultTimes()
	t.Renew, t.Stale, t.ProbeEvery = probe, 3*probe, probe
	return t
}()

// Scaled returns the default times, multiplied by factor, for drills.
func Scaled(factor float64) engine.Times {
	scaled, d := timescale.Factor(factor).Scale, election.DefaultTimes
	return engine.Times{Times: election.Times{Lease: scaled(d.Lease), Renew: scaled(d.Renew), Retry: scaled(d.Retry)}, Probe: scaled(probe), Liveness: living.Scale(timescale.Factor(factor))}
}

// Config describes the cluster and its process.
type Config struct {
	// Local is the API server of the cluster itself.
	Local *rest.Config
	// Namespace is the namespace of Isthmus, with the Leases, in every member.
	Namespace string
	// Pod names this process to people. It need not be unique.
	Pod   string
	Times engine.Times
	// Reconcilers makes the Reconcilers for the Federation's spec. Its error describes a fault of the spec.
	Reconcilers func(federationv1alpha1.FederationSpec) ([]reconcile.Reconciler, error)
	// Machines, if not nil, maintains Services of machines outside of the cluster until its ctx ends. It runs in one process
	// of the cluster at a time, whether the cluster has a Federation or not.
	Machines func(ctx context.Context) error
	Log      *slog.Logger
	Now      func() time.Time // for the renewal of tokens; nil means time.Now
}

// Validate returns an error for each missing field.
func (c Config) Validate() error {
	var errs []error
	for _, field := range []struct {
		name    string
		missing bool
	}{
		{"Local", c.Local == nil},
		{"Namespace", c.Namespace == ""},
		{"Pod", c.Pod == ""},
		{"Reconcilers", c.Reconcilers == nil},
		{"Log", c.Log == nil},
		{"Times", c.Times.Lease <= 0 || c.Times.Renew <= 0 || c.Times.Retry <= 0 || c.Times.Probe <= 0 || c.Times.Liveness.Validate() != nil},
	} {
		if field.missing {
			errs = append(errs, fmt.Errorf("federation config: %s is missing", field.name))
		}
	}
	return errors.Join(errs...)
}

// Federation is one process of a cluster in a federation.
type Federation struct {
	cfg    Config
	unique string // the part of the identity that names this process
	client client.WithWatch
	leases coordinationv1client.CoordinationV1Interface
	local  *objectcache.Cache
	wake   signal.Signal // something in this cluster, or in a member, may have changed

	mu      sync.Mutex
	engine  *engine.Engine
	cluster clusterset.ClusterID              // the id that the engine has
	spec    federationv1alpha1.FederationSpec // the spec that the engine has; of members only external networks
	problem string                            // why this cluster leads no member, and the remedy

	released withdrawal.Releases // releases that were handled; used by reconcile only
}

// New prepares a Federation. It sends nothing.
func New(cfg Config) (*Federation, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Local = rest.AddUserAgent(rest.CopyConfig(cfg.Local), "isthmus-federation")
	if cfg.Local.QPS == 0 {
		cfg.Local.QPS = -1
	}
	f := &Federation{cfg: cfg, unique: cfg.Pod + "_" + string(uuid.NewUUID()), wake: signal.New(), released: withdrawal.Releases{}}
	var err error
	if f.client, err = client.NewWithWatch(cfg.Local, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	if f.leases, err = coordinationv1client.NewForConfig(cfg.Local); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	f.local, err = objectcache.NewCache(scheme, []objectcache.Kind{
		{Source: objectcache.Source{Object: &federationv1alpha1.Federation{}, Optional: true}},
		{Source: objectcache.Source{Object: &federationv1alpha1.ClusterClaim{}, Optional: true}},
		{Source: objectcache.Source{Object: &about.ClusterProperty{}, Optional: true}},
		// Only supervisors have the right to read these.
		{Source: objectcache.Source{Object: &corev1.Secret{}, Namespace: federationv1alpha1.SecretNamespace, Keep: isTarget, Trim: trimSecret, SkipIfForbidden: true}},
	}, func(int, client.Object, client.Object, bool) { f.changed() }, f.changed)
	return f, err
}

// isTarget reports whether a Secret may hold a member's credentials.
func isTarget(o client.Object) bool {
	s, ok := o.(*corev1.Secret)
	return ok && s.Type != corev1.SecretTypeServiceAccountToken && len(s.Data[federationv1alpha1.SecretToken]) > 0 && len(s.Data[federationv1alpha1.SecretCA]) > 0
}

func trimSecret(o any) (any, error) {
	if s, ok := o.(*corev1.Secret); ok {
		kept := map[string][]byte{}
		for _, key := range []string{federationv1alpha1.SecretToken, federationv1alpha1.SecretCA, federationv1alpha1.SecretCredential, federationv1alpha1.SecretReplaced} {
			if value, ok := s.Data[key]; ok {
				kept[key] = value
			}
		}
		s.Data = kept
	}
	return o, nil
}

// changed makes Run reconcile this cluster again.
func (f *Federation) changed() { f.wake.Notify() }

// Run works until ctx ends. The objects that it wrote stay, and it gives its Leases back.
func (f *Federation) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer f.stopEngine()
	following, stop := context.WithCancel(ctx)
	defer stop()
	for _, i := range f.local.Informers() {
		running.Go(func() { f.follow(following, i) })
	}
	candidate := election.New(f.leases, types.NamespacedName{Namespace: f.cfg.Namespace, Name: federationv1alpha1.ControllerLease}, f.unique, f.cfg.Times.Times)
	running.Go(func() {
		if err := candidate.Run(following, f.runExclusive); err != nil {
			f.cfg.Log.Error("the Federation's status cannot be written", "err", err)
		}
	})
	for {
		if err := f.reconcile(ctx); err != nil {
			f.cfg.Log.Error("the Federation of this cluster cannot be reconciled", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-f.wake.C():
		}
	}
}

// follow fills an informer of this cluster until ctx ends.
func (f *Federation) follow(ctx context.Context, i *objectcache.ObjectInformer) {
	follow := i.Follower(f.client)
	logged := ""
	for ctx.Err() == nil {
		err := follow(ctx)
		if err != nil && err.Error() != logged && !i.Skipped() {
			logged = err.Error()
			f.cfg.Log.Error("this cluster cannot be read; its last known objects stay in effect", "err", err)
		}
		f.changed()
		select {
		case <-ctx.Done():
		case <-time.After(f.cfg.Times.Probe):
		}
	}
}

// stopEngine stops the engine, if there is one.
func (f *Federation) stopEngine() {
	f.mu.Lock()
	former := f.engine
	f.engine = nil
	f.mu.Unlock()
	if former != nil {
		former.Stop()
	}
}

// claim returns the value of a claim of this cluster, "" if there is none.
func (f *Federation) claim(ctx context.Context, name string) (string, error) {
	var claims federationv1alpha1.ClusterClaimList
	err := f.local.List(ctx, &claims)
	if errors.Is(err, objectcache.ErrKindMissing) {
		return "", nil
	}
	for _, c := range claims.Items {
		if c.Spec.Name == name {
			return c.Spec.Value, nil
		}
	}
	return "", err
}

// reconcile runs the engine that the cluster's Federation needs.
func (f *Federation) reconcile(ctx context.Context) error {
	if !f.local.Synced() {
		return nil // it is called again
	}
	federation := &federationv1alpha1.Federation{}
	err := f.local.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, federation)
	if apierrors.IsNotFound(err) || errors.Is(err, objectcache.ErrKindMissing) {
		f.idle(NotFormed)
		return nil
	}
	if err != nil {
		return err
	}
	if len(federation.Spec.Members) == 0 {
		f.idle("")
		return nil
	}
	id, err := f.claim(ctx, federationv1alpha1.ClaimID)
	if err != nil {
		return err
	}
	supervisor, err := f.claim(ctx, federationv1alpha1.ClaimSupervisor)
	if err != nil {
		return err
	}
	switch {
	case id == "":
		f.idle(fmt.Sprintf("this cluster has no ClusterClaim %s, and its Federation names members; create it", federationv1alpha1.ClaimID))
		return nil
	case supervisor != "true":
		f.idle(fmt.Sprintf("this cluster has no ClusterClaim %s with the value \"true\", and its Federation names members; create it, or remove spec.members", federationv1alpha1.ClaimSupervisor))
		return nil
	}
	return f.work(ctx, clusterset.ClusterID(id), federation)
}

// idle stops the engine, because of a problem or, with "", because there is no work.
func (f *Federation) idle(problem string) {
	f.stopEngine()
	f.mu.Lock()
	defer f.mu.Unlock()
	if problem != "" && problem != f.problem {
		f.cfg.Log.Warn("this cluster leads no member", "problem", problem)
	}
	f.problem = problem
}

// work runs an engine for the members of a Federation.
func (f *Federation) work(ctx context.Context, id clusterset.ClusterID, federation *federationv1alpha1.Federation) error {
	if err := f.ensureEngine(ctx, id, federation); err != nil {
		return err
	}
	targets, err := f.targets(ctx, federation.Spec.Members)
	if err != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.problem = err.Error()
		return err
	}
	pinned := map[string]string{}
	for _, m := range federation.Status.Members {
		pinned[m.ClusterID] = m.ClusterUID
	}
	f.mu.Lock()
	f.problem = ""
	e := f.engine
	f.mu.Unlock()
	err = e.SetMembers(federation.Spec.Members, targets, pinned)
	for _, id := range f.released.Take(federation.Annotations[federationv1alpha1.AnnotationReleaseHold]) {
		e.Release(id)
	}
	return err
}

// ensureEngine replaces the engine if the cluster's id or the spec has changed, members excluded but for their external networks.
func (f *Federation) ensureEngine(ctx context.Context, id clusterset.ClusterID, federation *federationv1alpha1.Federation) error {
	spec := *federation.Spec.DeepCopy()
	spec.Members = nil
	for _, m := range federation.Spec.Members {
		if len(m.ExternalCIDRs) > 0 {
			spec.Members = append(spec.Members, federationv1alpha1.MemberCluster{ClusterID: m.ClusterID, ExternalCIDRs: m.ExternalCIDRs})
		}
	}
	f.mu.Lock()
	same := f.engine != nil && f.cluster == id && reflect.DeepEqual(spec, f.spec)
	f.mu.Unlock()
	if same {
		return nil
	}
	reconcilers, err := f.cfg.Reconcilers(spec)
	if err != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.problem = err.Error() // the former engine goes on
		return err
	}
	f.stopEngine()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cluster, f.spec = id, spec
	f.engine = engine.New(ctx, engine.Config{
		Scheme: scheme, Namespace: f.cfg.Namespace, Identity: string(id) + "/" + f.unique, Times: f.cfg.Times, Reconcilers: reconcilers,
		LastingReasons: []string{services.ReasonTaken}, Changed: f.changed, Log: f.cfg.Log,
	})
	return nil
}

// targets returns the addresses and credentials of members, by their ids. Members without a Secret are left out.
func (f *Federation) targets(ctx context.Context, members []federationv1alpha1.MemberCluster) (map[string]*member.Target, error) {
	targets := map[string]*member.Target{}
	for _, m := range members {
		secret := &corev1.Secret{}
		err := f.local.Get(ctx, client.ObjectKey{Namespace: federationv1alpha1.SecretNamespace, Name: m.Secret}, secret)
		if errors.Is(err, objectcache.ErrNotSynced) {
			return nil, fmt.Errorf("this cluster's controller may not read the Secrets of namespace %s; run isthmusctl federation create again: %w", federationv1alpha1.SecretNamespace, err)
		}
		if client.IgnoreNotFound(err) != nil {
			return nil, err
		}
		if err == nil {
			targets[m.ClusterID] = &member.Target{Server: m.Server, Token: string(secret.Data[federationv1alpha1.SecretToken]), CA: string(secret.Data[federationv1alpha1.SecretCA])}
		}
	}
	return targets, nil
}

// State is the state of a federation as this process sees it.
type State struct {
	Cluster clusterset.ClusterID // "" until it is known
	Problem string               // why this cluster leads no member, and the remedy
	Members []engine.MemberState // sorted by id; none in a cluster that leads no member
}

// State returns the current state. It may be called at any time, from any goroutine.
func (f *Federation) State() State {
	f.mu.Lock()
	s := State{Cluster: f.cluster, Problem: f.problem}
	e := f.engine
	f.mu.Unlock()
	if e != nil {
		s.Members = e.States()
	}
	return s
}

// runExclusive is the work of one process of the cluster at a time. It returns when ctx ends.
func (f *Federation) runExclusive(ctx context.Context, _ fenced.Term) {
	var running sync.WaitGroup
	defer running.Wait()
	if f.cfg.Machines != nil {
		running.Go(func() {
			if err := f.cfg.Machines(ctx); err != nil && ctx.Err() == nil {
				f.cfg.Log.Error("Services of machines are no longer maintained", "err", err)
			}
		})
	}
	local, err := corev1client.NewForConfig(f.cfg.Local)
	if err != nil {
		f.cfg.Log.Error("tokens for members cannot be renewed", "err", err)
	} else {
		r := &tokenRenewer{federation: f, local: local, members: map[renewedToken]*credential.Renewer{}}
		running.Go(func() { r.run(ctx) })
	}
	w := &statusWriter{client: f.client, local: f.local, state: f.State, interval: f.cfg.Times.Retry, log: f.cfg.Log}
	if err := w.run(ctx, f.cfg.Local); err != nil {
		f.cfg.Log.Error("the Federation's status cannot be written", "err", err)
	}
}
