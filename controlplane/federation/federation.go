// Package federation is the part of a cluster's controller that needs no broker: in a supervisor it reaches the API
// servers of all members that the cluster's Federation names, takes part in the election of a leader for each, and
// where it wins brings federated Services and policies in line with what all members say. In any other cluster it
// only keeps the cluster's own claims.
//
// It is one process of which several may run, here and in other supervisors: for each member one leads. When a member
// goes silent, what it said last counts on; when this process dies, what it wrote stays, and the next leader finds
// nothing to write if nothing changed.
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
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/election"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/memory"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=federations,verbs=get;list;watch
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=federations/status;clusterclaims/status,verbs=update
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=clusterclaims,verbs=get;list;watch;create
// +kubebuilder:rbac:groups=about.k8s.io,resources=clusterproperties,verbs=get;list;watch;create;update
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=list;watch,namespace=isthmus-system

// NotFormed is the Problem of a State in a cluster that is of no federation yet.
const NotFormed = "there is no Federation; run isthmusctl federation create"

// scheme has every kind that is read or written, in members and here.
var scheme = runtime.NewScheme()

func init() {
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1beta1.Install, about.AddToScheme, federationv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			panic(err) // it does not depend on anything
		}
	}
}

// Times are those of elections, and how often a member is asked whether it is there.
type Times struct {
	election.Times

	Probe time.Duration
}

// Scaled returns the times of a federation, multiplied: 0.1 is ten times as fast, for drills.
func Scaled(factor float64) Times {
	f, d := timescale.Factor(factor), election.DefaultTimes
	return Times{Times: election.Times{Lease: f.Of(d.Lease), Renew: f.Of(d.Renew), Retry: f.Of(d.Retry)}, Probe: f.Of(5 * time.Second)}
}

// Config says which cluster this is.
type Config struct {
	// Local is the API server of the cluster itself.
	Local *rest.Config
	// Namespace is where Isthmus is installed: of the Secrets, and of Leases in every member.
	Namespace string
	// Pod names this process to people; it need not be unique.
	Pod   string
	Times Times
	// Parts makes what leaders do, of the Federation's spec. Its error is for a person to mend.
	Parts func(federationv1alpha1.FederationSpec) ([]reconcile.Part, error)
	// Machines, if not nil, makes Services of machines outside of the cluster until its ctx ends. It runs in one process
	// of the cluster at a time, whether the cluster has a Federation or not.
	Machines func(ctx context.Context) error
	Log      *slog.Logger

	identity string // CLUSTER/POD_UNIQUE, once the cluster's id is known
}

// Validate reports everything that is missing.
func (c Config) Validate() error {
	var errs []error
	for _, field := range []struct {
		name    string
		missing bool
	}{
		{"Local", c.Local == nil},
		{"Namespace", c.Namespace == ""},
		{"Pod", c.Pod == ""},
		{"Parts", c.Parts == nil},
		{"Log", c.Log == nil},
		{"Times", c.Times.Lease <= 0 || c.Times.Renew <= 0 || c.Times.Retry <= 0 || c.Times.Probe <= 0},
	} {
		if field.missing {
			errs = append(errs, fmt.Errorf("federation config: %s is missing", field.name))
		}
	}
	return errors.Join(errs...)
}

// Federation is the federation's part of one process.
type Federation struct {
	cfg    Config
	unique string
	client client.WithWatch
	leases coordinationv1client.CoordinationV1Interface
	local  *memory.Memory
	wake   chan struct{} // something here, or of a member, may have changed

	mu      sync.Mutex
	crew    *crew
	of      clusterset.ClusterID              // whose crew it is
	spec    federationv1alpha1.FederationSpec // of the crew, without members
	problem string                            // why this cluster does not do its part, and what to do

	released withdrawal.Releases // what has been done of the annotation; reconcile's alone
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
	f := &Federation{cfg: cfg, unique: cfg.Pod + "_" + string(uuid.NewUUID()), wake: make(chan struct{}, 1), released: withdrawal.Releases{}}
	var err error
	if f.client, err = client.NewWithWatch(cfg.Local, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	if f.leases, err = coordinationv1client.NewForConfig(cfg.Local); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	f.local, err = memory.New(scheme, []reconcile.Watch{
		{Object: &federationv1alpha1.Federation{}, Optional: true},
		{Object: &federationv1alpha1.ClusterClaim{}, Optional: true},
		{Object: &about.ClusterProperty{}, Optional: true},
		{Object: &corev1.Secret{}, Namespace: cfg.Namespace, Keep: isTarget, Trim: trimSecret},
	}, func(reconcile.Watch, client.Object, client.Object) { f.changed() }, f.changed)
	return f, err
}

// isTarget reports whether a Secret may be that of a member.
func isTarget(o client.Object) bool {
	s, ok := o.(*corev1.Secret)
	return ok && s.Type != corev1.SecretTypeServiceAccountToken && len(s.Data[federationv1alpha1.SecretToken]) > 0 && len(s.Data[federationv1alpha1.SecretCA]) > 0
}

func trimSecret(o any) (any, error) {
	if s, ok := o.(*corev1.Secret); ok {
		s.Data = map[string][]byte{federationv1alpha1.SecretToken: s.Data[federationv1alpha1.SecretToken], federationv1alpha1.SecretCA: s.Data[federationv1alpha1.SecretCA]}
	}
	return o, nil
}

// changed makes Run look at everything here again.
func (f *Federation) changed() {
	select {
	case f.wake <- struct{}{}:
	default: // it will
	}
}

// Run works until ctx ends. It leaves everything it wrote where it is, and gives its Leases back.
func (f *Federation) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	defer f.dismiss()
	following, stop := context.WithCancel(ctx)
	defer stop()
	for _, k := range f.local.Kinds() {
		running.Go(func() { f.follow(following, k) })
	}
	scribe := election.New(f.leases, types.NamespacedName{Namespace: f.cfg.Namespace, Name: federationv1alpha1.ControllerLease}, f.unique, f.cfg.Times.Times)
	running.Go(func() {
		if err := scribe.Run(following, f.alone); err != nil {
			f.cfg.Log.Error("the Federation's status cannot be written", "err", err)
		}
	})
	for {
		if err := f.reconcile(ctx); err != nil {
			f.cfg.Log.Error("the Federation of this cluster cannot be followed", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-f.wake:
		}
	}
}

// follow keeps a kind of this cluster current.
func (f *Federation) follow(ctx context.Context, k *memory.Kind) {
	follow := k.Follower(f.client)
	said := ""
	for ctx.Err() == nil {
		err := follow(ctx)
		if err != nil && err.Error() != said {
			said = err.Error()
			f.cfg.Log.Error("this cluster cannot be read; what was read of it counts on", "err", err)
		}
		f.changed()
		select {
		case <-ctx.Done():
		case <-time.After(f.cfg.Times.Probe):
		}
	}
}

// dismiss ends the crew.
func (f *Federation) dismiss() {
	f.mu.Lock()
	was := f.crew
	f.crew = nil
	f.mu.Unlock()
	if was != nil {
		was.stop()
	}
}

// claim returns what this cluster claims, "" for nothing.
func (f *Federation) claim(ctx context.Context, name string) (string, error) {
	var claims federationv1alpha1.ClusterClaimList
	err := f.local.List(ctx, &claims)
	if errors.Is(err, reconcile.ErrKindMissing) {
		return "", nil
	}
	for _, c := range claims.Items {
		if c.Spec.Name == name {
			return c.Spec.Value, nil
		}
	}
	return "", err
}

// reconcile makes the crew be that of the cluster's Federation.
func (f *Federation) reconcile(ctx context.Context) error {
	if !f.local.Read() {
		return nil // it is called again
	}
	federation := &federationv1alpha1.Federation{}
	err := f.local.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, federation)
	if apierrors.IsNotFound(err) || errors.Is(err, reconcile.ErrKindMissing) {
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
		f.idle(fmt.Sprintf("this cluster has no ClusterClaim %s with the value \"true\", and its Federation names members; create it, or take spec.members away", federationv1alpha1.ClaimSupervisor))
		return nil
	}
	return f.work(ctx, clusterset.ClusterID(id), federation)
}

// idle ends all work, because of a problem or, with "", because there is none to do.
func (f *Federation) idle(problem string) {
	f.dismiss()
	f.mu.Lock()
	defer f.mu.Unlock()
	if problem != "" && problem != f.problem {
		f.cfg.Log.Warn("this cluster leads no member", "problem", problem)
	}
	f.problem = problem
}

// work makes a crew work on the members of a Federation.
func (f *Federation) work(ctx context.Context, id clusterset.ClusterID, federation *federationv1alpha1.Federation) error {
	spec := *federation.Spec.DeepCopy()
	spec.Members = nil
	f.mu.Lock()
	same := f.crew != nil && f.of == id && reflect.DeepEqual(spec, f.spec)
	f.mu.Unlock()
	if !same {
		parts, err := f.cfg.Parts(spec)
		if err != nil {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.problem = err.Error() // what worked goes on
			return err
		}
		f.dismiss()
		cfg := f.cfg
		cfg.identity = string(id) + "/" + f.unique
		f.mu.Lock()
		f.crew, f.of, f.spec = newCrew(ctx, cfg, parts, f.changed), id, spec
		f.mu.Unlock()
	}
	targets, pinned := map[string]*member.Target{}, map[string]string{}
	for _, m := range federation.Spec.Members {
		secret := &corev1.Secret{}
		err := f.local.Get(ctx, client.ObjectKey{Namespace: f.cfg.Namespace, Name: m.Secret}, secret)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err == nil {
			targets[m.ClusterID] = &member.Target{Server: m.Server, Token: string(secret.Data[federationv1alpha1.SecretToken]), CA: string(secret.Data[federationv1alpha1.SecretCA])}
		}
	}
	for _, m := range federation.Status.Members {
		pinned[m.ClusterID] = m.ClusterUID
	}
	f.mu.Lock()
	f.problem = ""
	crew := f.crew
	f.mu.Unlock()
	err := crew.set(federation.Spec.Members, targets, pinned)
	for _, id := range f.released.Take(federation.Annotations[federationv1alpha1.AnnotationReleaseHold]) {
		crew.release(id)
	}
	return err
}

// State is how a federation is doing, as this process sees it.
type State struct {
	Cluster clusterset.ClusterID // "" until it is known
	Problem string               // why this cluster does not do its part, and what to do
	Members []MemberState        // sorted by id; none in a cluster that leads nobody
}

// MemberState is how a member looks from here.
type MemberState struct {
	ID         clusterset.ClusterID
	Leader     string // CLUSTER/POD, "" for nobody
	Leading    bool   // it is this process
	Epoch      int64
	Reachable  bool
	Supervisor bool
	Problem    string // why it is not reachable, and what to do
	Stuck      string // what does not go on in it although it is reachable, and what to do
	UID        string // of its namespace kube-system
	Counts     map[string]int
	Held       int // of what it offered, vanished and taken for there nevertheless
}

// State may be called at any time, from any goroutine.
func (f *Federation) State() State {
	f.mu.Lock()
	s := State{Cluster: f.of, Problem: f.problem}
	crew := f.crew
	f.mu.Unlock()
	if crew != nil {
		s.Members = crew.states()
	}
	return s
}

// alone is what one process of the cluster does at a time, until ctx ends.
func (f *Federation) alone(ctx context.Context, _ fenced.Term) {
	var running sync.WaitGroup
	defer running.Wait()
	if f.cfg.Machines != nil {
		running.Go(func() {
			if err := f.cfg.Machines(ctx); err != nil && ctx.Err() == nil {
				f.cfg.Log.Error("Services of machines are not kept any more", "err", err)
			}
		})
	}
	diary, err := newDiary(f.cfg.Local)
	if err == nil {
		defer diary.Shutdown()
		err = diary.write(ctx, f.cfg.Log)
	}
	if err != nil {
		f.cfg.Log.Error("the Federation's status cannot be written", "err", err)
		return
	}
	f.write(ctx, diary.NewRecorder(scheme, "isthmus-federation"))
}

// write keeps the Federation's status and the cluster's claims until ctx ends.
func (f *Federation) write(ctx context.Context, tell events.EventRecorder) {
	tick := time.NewTicker(f.cfg.Times.Retry)
	defer tick.Stop()
	for {
		if err := f.writeStatus(ctx, tell); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
			f.cfg.Log.Error("the Federation's status cannot be written", "err", err)
		}
		if err := f.keepClaims(ctx); err != nil && ctx.Err() == nil {
			f.cfg.Log.Error("the cluster's claims cannot be kept", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
