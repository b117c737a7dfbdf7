// Package lighthouse lets clusters that run Lighthouse, the service discovery of Submariner, take part in a ClusterSet of Isthmus, so
// that it moves over cluster by cluster.
//
// For example, clusters "east" and "west" share Submariner's broker, namespace submariner-k8s-broker of some cluster, where Isthmus has
// its broker in namespace isthmus-broker. East has joined Isthmus, and west knows nothing of it. For west, the [Bridge] writes what
// Lighthouse exports there into isthmus-broker, as member west. For east, it writes what Isthmus exports there into
// submariner-k8s-broker, as Lighthouse in east would, and west's Lighthouse finds it. When west joins Isthmus, its own controller goes
// on where the Bridge stops, and the Bridge goes on where west's Lighthouse is stopped.
//
// The Bridge and a running Lighthouse of the same cluster do not fight: both derive the same objects from the same Services, the
// Bridge changes only what differs, and it deletes only objects that carry its mark.
//
// Kinds, labels and lifecycle are those of Lighthouse 0.16 and later (pkg/agent/controller), in which one slice has the address of a
// Service. They cannot express addresses of pods for a Service that has an address of its own, so members need the setting
// --endpoints=service-vip until the last cluster has moved.
package lighthouse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

const (
	// workers is how many Services each part reconciles concurrently.
	workers = 4
	// reconcileTimeout bounds one reconcile.
	reconcileTimeout = 30 * time.Second
	// firstRetry and lastRetry bound the backoff after an error of one Service, restart that after the end of a part.
	firstRetry, lastRetry, restart = 50 * time.Millisecond, 15 * time.Second, 5 * time.Second
)

// Config identifies both brokers, which are namespaces of one API server.
type Config struct {
	// REST is the API server, with the rights of access.BridgeRules.
	REST *rest.Config
	// Namespace is the broker of Isthmus, Lighthouse that of Submariner.
	Namespace, Lighthouse string
	// Settings override those of the ClusterSet.
	Settings broker.Settings
	Log      *slog.Logger
}

// Bridge connects the clusters of two brokers.
type Bridge struct {
	cfg     Config
	manager ctrl.Manager
	client  client.WithWatch
	store   *store
	members *objectcache.Informer[*v1alpha1.Member, string]
	wake    signal.Signal // the Members changed, or a part ended
}

// New prepares a Bridge. It sends no request.
func New(cfg Config) (*Bridge, error) {
	if cfg.REST == nil || cfg.Namespace == "" || cfg.Lighthouse == "" || cfg.Log == nil {
		return nil, errors.New("bridge config: REST, Namespace, Lighthouse or Log is missing")
	}
	if cfg.Namespace == cfg.Lighthouse {
		return nil, fmt.Errorf("bridge config: namespace %s cannot be the broker of Isthmus and that of Submariner", cfg.Namespace)
	}
	if err := cfg.Settings.Validate(); err != nil {
		return nil, err
	}
	cfg.REST = rest.AddUserAgent(rest.CopyConfig(cfg.REST), v1alpha1.LighthouseBridge)
	if cfg.REST.QPS == 0 {
		cfg.REST.QPS = -1
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(discoveryv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	mgr, err := ctrl.NewManager(cfg.REST, ctrl.Options{
		Scheme: scheme, Logger: logr.FromSlogHandler(cfg.Log.Handler()).V(-int(slog.LevelDebug)),
		Metrics:        server.Options{BindAddress: "0"}, // the command serves them
		LeaderElection: true, LeaderElectionID: v1alpha1.LighthouseBridge, LeaderElectionNamespace: cfg.Namespace, LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare the bridge for %s: %w", cfg.REST.Host, err)
	}
	b := &Bridge{cfg: cfg, manager: mgr, wake: signal.New()}
	if b.client, err = client.NewWithWatch(cfg.REST, client.Options{HTTPClient: mgr.GetHTTPClient(), Scheme: scheme, Mapper: mgr.GetRESTMapper()}); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.REST.Host, err)
	}
	if b.store, err = newStore(b.client, scheme, cfg.Lighthouse); err != nil {
		return nil, err
	}
	b.members, err = objectcache.New(scheme, objectcache.Config[*v1alpha1.Member, string]{
		Source:  objectcache.Source{Object: &v1alpha1.Member{}, Namespace: cfg.Namespace},
		Compact: func(obj client.Object) *v1alpha1.Member { return obj.(*v1alpha1.Member) }, //nolint:forcetypeassert // Object says so
		After: func(was, is *v1alpha1.Member, _ bool) {
			b.wake.Notify()
			if was.IsBridged() != is.IsBridged() {
				b.store.enqueueAll() // their slices are another's from now on
			}
		},
	})
	if err != nil {
		return nil, err
	}
	return b, mgr.Add(manager.RunnableFunc(b.lead)) // which runs only while this process holds the Lease
}

// Run runs the Bridge until ctx ends, or until it loses the Lease, which is an error. It deletes none of its objects.
func (b *Bridge) Run(ctx context.Context) error {
	if err := b.manager.Start(ctx); err != nil {
		return fmt.Errorf("run the bridge: %w", err)
	}
	return nil
}

// State describes a running Bridge.
type State struct {
	Leader bool
	// Waiting is why the leader does not act yet; empty in a standby.
	Waiting string
}

// State returns the current State. Any goroutine may call it at any time.
func (b *Bridge) State() State {
	select {
	case <-b.manager.Elected():
	default:
		return State{}
	}
	s := State{Leader: true}
	for what, err := range map[string]error{"Members of namespace " + b.cfg.Namespace: b.members.Err(), "broker of Submariner, namespace " + b.cfg.Lighthouse: errors.Join(b.store.aggregates.Err(), b.store.slices.Err())} {
		if err != nil {
			s.Waiting = fmt.Sprintf("the %s of %s: %v; check the rights of ServiceAccount %s", what, b.cfg.REST.Host, err, v1alpha1.LighthouseBridge)
		}
	}
	return s
}

// lead follows both brokers until ctx ends.
func (b *Bridge) lead(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.store.run(ctx) })
	group.Go(func() error { return b.members.Run(ctx, b.client) })
	group.Go(func() error {
		if err := b.members.WaitForSync(ctx); err != nil {
			return nil //nolint:nilerr // ctx ended
		}
		return b.adjust(ctx)
	})
	return group.Wait()
}

// part is a proxy that runs, or that ended by itself.
type part struct {
	*proxy

	stop context.CancelFunc
	done chan struct{}
}

// adjust runs a proxy for each cluster of Lighthouse, and one mirror, until ctx ends.
func (b *Bridge) adjust(ctx context.Context) error {
	parts := map[clusterset.ClusterID]part{}
	defer func() {
		for _, p := range parts {
			p.stop()
			<-p.done
		}
	}()
	var mirrored clusterset.ClusterID // the one whose view of the ClusterSet is mirrored
	for {
		bridged := b.bridged()
		for id, p := range parts {
			if first := len(bridged) > 0 && bridged[0].id == id; slices.ContainsFunc(bridged, isFor(id)) && !p.ended() && first == (id == mirrored) {
				continue
			}
			p.stop()
			<-p.done
			delete(parts, id)
			if id == mirrored {
				mirrored = ""
			}
		}
		for i, m := range bridged {
			if _, ok := parts[m.id]; ok {
				continue
			}
			p, err := b.start(ctx, m, i == 0)
			if err != nil {
				return err
			}
			parts[m.id] = p
			if i == 0 {
				mirrored = m.id
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-b.wake.C():
		}
	}
}

func (p part) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// member is a cluster of Lighthouse that is registered with Isthmus.
type member struct {
	id   clusterset.ClusterID
	spec v1alpha1.MemberSpec
}

func isFor(id clusterset.ClusterID) func(member) bool {
	return func(m member) bool { return m.id == id }
}

// bridged returns the clusters of Lighthouse, sorted: the Members that carry the annotation and have not left.
func (b *Bridge) bridged() []member {
	var all []member
	for _, m := range b.members.All() {
		if m.IsBridged() {
			all = append(all, member{clusterset.ClusterID(m.Name), m.Spec})
		}
	}
	slices.SortFunc(all, func(x, y member) int { return strings.Compare(string(x.id), string(y.id)) })
	return all
}

// isBridgedID reports whether a cluster still runs Lighthouse.
func (b *Bridge) isBridgedID(id clusterset.ClusterID) bool {
	return b.members.Get(b.cfg.Namespace, string(id)).IsBridged()
}

// start starts the proxy of a cluster, with the mirror if mirrors says so. If it fails, it is started again later.
func (b *Bridge) start(ctx context.Context, m member, mirrors bool) (part, error) {
	ctx, stop := context.WithCancel(ctx)
	p, err := b.newProxy(ctx, m)
	if err != nil {
		stop()
		return part{}, err
	}
	b.cfg.Log.Info("this cluster runs Lighthouse; its exports are published for it", "cluster", string(m.id))
	running := part{p, stop, make(chan struct{})}
	go func() {
		defer close(running.done)
		group, parts := errgroup.WithContext(ctx)
		group.Go(func() error { return p.run(parts, b) })
		if mirrors {
			group.Go(func() error { return b.mirror(parts, p) })
		}
		if err := group.Wait(); ctx.Err() == nil {
			b.cfg.Log.Error("the exports of a cluster of Lighthouse stop; trying again", "cluster", string(m.id), "err", err)
			time.AfterFunc(restart, b.wake.Notify)
		}
	}()
	return running, nil
}

// options are those of each controller of the Bridge.
func (b *Bridge) options() controller.Options {
	unnamed := true
	return controller.Options{
		MaxConcurrentReconciles: workers,
		ReconciliationTimeout:   reconcileTimeout,
		CacheSyncTimeout:        365 * 24 * time.Hour, // the broker may be away that long
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry),
		SkipNameValidation:      &unnamed, // one for each cluster
		Logger:                  logr.FromSlogHandler(b.cfg.Log.Handler()).V(-int(slog.LevelDebug)),
	}
}
