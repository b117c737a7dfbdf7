// Package quotacontroller bounds what each member stores on a broker. It runs beside the broker's API server, for its
// administrator.
//
// For example, the quota is 10,000 Services, and the hostile member "east" writes as many export records as it can. Within a
// second the controller lists east in the status of the ClusterSetConfig, and the broker's admission policies refuse further
// records of east. It then deletes east's youngest records down to 20,000. The 10,000 oldest, which the other members import,
// stay; east still updates and deletes them, and creates again once it is within its quota.
//
// Readers apply the same quotas by themselves, so a broker without this controller harms no other member, but is not bounded.
// While the controller is away, the status stays as it is: listed members stay refused, and no object is deleted.
package quotacontroller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// DefaultGrace is how long an aggregate stays without a record beside it. A broker that lost its objects gets its aggregates and
// records back in any order, and a member may be away for minutes.
const DefaultGrace = 10 * time.Minute

// Config identifies the broker.
type Config struct {
	// REST is the broker's API server, with the rights of access.QuotaControllerRules.
	REST      *rest.Config
	Namespace string
	// Grace is how long an aggregate stays without a record of any member beside it; 0 means DefaultGrace.
	Grace time.Duration
	Log   *slog.Logger
}

// Controller bounds what each member stores on a broker. Safe for concurrent use.
type Controller struct {
	cfg     Config
	manager ctrl.Manager
	client  client.WithWatch
	events  events.EventRecorder

	configs    *objectcache.Informer[*v1alpha1.ClusterSetConfig, string]
	records    *objectcache.Informer[*object, clusterset.ServiceName]
	slices     *objectcache.Informer[*object, clusterset.ServiceName]
	aggregates *objectcache.Informer[*object, clusterset.ServiceName]

	wake    signal.Signal // the amounts of a member changed, or the settings
	counted atomic.Bool   // all objects have been counted once
	fault   atomic.Pointer[error]

	mu      sync.Mutex
	stored  map[clusterset.ClusterID]amounts
	orphans map[clusterset.ServiceName]orphan

	// These belong to one goroutine each.
	written time.Time // of the last status
	marked  map[types.UID]struct{}
}

// New prepares a Controller. It sends no request.
func New(cfg Config) (*Controller, error) {
	if cfg.REST == nil || cfg.Namespace == "" || cfg.Log == nil {
		return nil, errors.New("quota controller config: REST, Namespace or Log is missing")
	}
	if cfg.Grace == 0 {
		cfg.Grace = DefaultGrace
	}
	cfg.REST = rest.AddUserAgent(rest.CopyConfig(cfg.REST), v1alpha1.QuotaController)
	if cfg.REST.QPS == 0 {
		cfg.REST.QPS = -1 // deletions have a limit of their own
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(discoveryv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	mgr, err := ctrl.NewManager(cfg.REST, ctrl.Options{
		Scheme:                        scheme,
		Logger:                        logr.FromSlogHandler(cfg.Log.Handler()).V(-int(slog.LevelDebug)),
		Metrics:                       server.Options{BindAddress: "0"}, // the command serves them
		LeaderElection:                true,
		LeaderElectionID:              v1alpha1.QuotaController,
		LeaderElectionNamespace:       cfg.Namespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare the quota controller for %s: %w", cfg.REST.Host, err)
	}
	c := &Controller{
		cfg: cfg, manager: mgr, events: mgr.GetEventRecorder(v1alpha1.QuotaController), wake: signal.New(),
		stored: map[clusterset.ClusterID]amounts{}, orphans: map[clusterset.ServiceName]orphan{},
	}
	if c.client, err = client.NewWithWatch(cfg.REST, client.Options{HTTPClient: mgr.GetHTTPClient(), Scheme: scheme, Mapper: mgr.GetRESTMapper()}); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.REST.Host, err)
	}
	if err := c.createCaches(scheme); err != nil {
		return nil, err
	}
	return c, mgr.Add(manager.RunnableFunc(c.lead)) // which runs only while this process holds the Lease
}

// Run runs the controller until ctx ends, or until it loses the Lease, which is an error.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.manager.Start(ctx); err != nil {
		return fmt.Errorf("run the quota controller: %w", err)
	}
	return nil
}

// lead follows the broker and acts on it until ctx ends.
func (c *Controller) lead(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.configs.Run(ctx, c.client) })
	group.Go(func() error { return c.records.Run(ctx, c.client) })
	group.Go(func() error { return c.slices.Run(ctx, c.client) })
	group.Go(func() error { return c.aggregates.Run(ctx, c.client) })
	group.Go(func() error {
		for _, wait := range []func(context.Context) error{c.configs.WaitForSync, c.records.WaitForSync, c.slices.WaitForSync, c.aggregates.WaitForSync} {
			if err := wait(ctx); err != nil {
				return nil //nolint:nilerr // ctx ended
			}
		}
		c.countOrphans()
		c.counted.Store(true)
		c.cfg.Log.Info("all objects of the broker are counted", "namespace", c.cfg.Namespace)
		acts, ctx := errgroup.WithContext(ctx)
		acts.Go(func() error { return c.publish(ctx) })
		acts.Go(func() error { return c.sweep(ctx) })
		return acts.Wait()
	})
	return group.Wait()
}

// State describes a running Controller.
type State struct {
	Leader bool
	// Waiting is why the leader does not act yet, or its last error; empty in a standby.
	Waiting string
}

// State returns the current State. Any goroutine may call it at any time.
func (c *Controller) State() State {
	select {
	case <-c.manager.Elected():
	default:
		return State{}
	}
	s := State{Leader: true}
	switch err := c.fault.Load(); {
	case !c.counted.Load():
		s.Waiting = fmt.Sprintf("broker %s, namespace %s, is not read completely yet; check its address, its definitions and the rights of ServiceAccount %s",
			c.cfg.REST.Host, c.cfg.Namespace, v1alpha1.QuotaController)
	case err != nil && *err != nil:
		s.Waiting = (*err).Error()
	}
	return s
}

// config returns the ClusterSetConfig, nil while there is none. It is shared and must not be changed.
func (c *Controller) config() *v1alpha1.ClusterSetConfig {
	return c.configs.Get(c.cfg.Namespace, v1alpha1.ClusterSetConfigName)
}
