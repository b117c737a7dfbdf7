package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/probes"
	"github.com/isthmus-net/isthmus/gateway/openstack"
)

const (
	// leaseName is the Lease of the active replica.
	leaseName = "isthmus-gateway-controller"
	// DefaultResync is the time between two full syncs, which also undo manual changes in the cloud.
	DefaultResync = 5 * time.Minute
	// firstRetry and lastRetry bound the time between retries, for instance after an exhausted quota.
	firstRetry = 200 * time.Millisecond
	lastRetry  = time.Minute
)

// Config holds the settings of a Controller.
type Config struct {
	Settings Settings
	// Local is the cluster's API server. Namespace holds the Lease and the Secrets with BGP passwords.
	Local     *rest.Config
	Namespace string
	// ManagedBy selects the EndpointSlices of ServiceImports by the controllers that wrote them: the values of the label
	// endpointslice.kubernetes.io/managed-by. Empty selects those of any MCS implementation.
	ManagedBy []string
	// Cloud may be nil if no pool uses Neutron.
	Cloud Cloud
	// TLS returns the configuration for connecting to the gateway with the given certificate name.
	TLS func(identity string) *tls.Config
	// Renewal says which certificates the controller renews.
	Renewal Renewal
	// Resync is the time between two full syncs; 0: DefaultResync.
	Resync time.Duration
	Log    *slog.Logger
}

// Controller keeps ports, floating IPs and gateways in step with Services.
type Controller struct {
	cfg      Config
	manager  ctrl.Manager
	holder   atomic.Pointer[string] // identity that holds the Lease, once this replica has won it
	synced   atomic.Bool
	requests chan event.GenericEvent
	renewer  *renewer // nil: certificates are not renewed
}

// New prepares a controller.
func New(c Config) (*Controller, error) {
	if err := c.Settings.Complete(); err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	for i, p := range c.Settings.Pools {
		if (p.Neutron != nil || p.FailoverIP != nil) && c.Cloud == nil {
			return nil, fmt.Errorf("settings: pools[%d] needs a cloud; name one of clouds.yaml by --cloud", i)
		}
	}
	if c.Resync == 0 {
		c.Resync = DefaultResync
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	local := rest.AddUserAgent(rest.CopyConfig(c.Local), leaseName)
	if local.QPS == 0 {
		local.QPS = -1 // the API server limits the load itself
	}
	mgr, err := ctrl.NewManager(local, ctrl.Options{
		Scheme:                        scheme,
		Logger:                        logr.FromSlogHandler(c.Log.Handler()).V(-int(slog.LevelDebug)),
		Cache:                         cache.Options{DefaultTransform: cache.TransformStripManagedFields()},
		Metrics:                       server.Options{BindAddress: "0"}, // the command serves metrics
		LeaderElection:                true,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       c.Namespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare the controller for %s: %w", local.Host, err)
	}
	is := &Controller{cfg: c, manager: mgr, requests: make(chan event.GenericEvent, 1024)}
	if c.Renewal.Authority != "" {
		is.renewer = &renewer{
			Renewal: c.Renewal, namespace: c.Namespace, live: mgr.GetAPIReader(), client: mgr.GetClient(),
			events: mgr.GetEventRecorder(leaseName), log: c.Log, now: time.Now,
		}
		if err := mgr.Add(manager.RunnableFunc(is.renewer.run)); err != nil {
			return nil, err
		}
	}
	return is, mgr.Add(manager.RunnableFunc(is.work))
}

// Ready returns nil while this replica waits for the Lease, or once it holds the Lease and has completed a sync.
func (c *Controller) Ready() error {
	select {
	case <-c.manager.Elected():
		if !c.synced.Load() {
			return errors.New("the initial sync has not succeeded yet; the log says why")
		}
	default:
	}
	return nil
}

// Run works until ctx ends, or until the Lease is lost, which is an error. It leaves everything in place.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.manager.Start(ctx); err != nil {
		return fmt.Errorf("run the gateway controller: %w", err)
	}
	return nil
}

// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,verbs=get;create;update,namespace=isthmus-system
// +kubebuilder:rbac:groups="",resources=events,verbs=create;patch,namespace=isthmus-system
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups="",resources=services,verbs=list;watch;patch
// +kubebuilder:rbac:groups="",resources=services/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=nodes,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=list;watch
// +kubebuilder:rbac:groups=gateway.isthmus.dev,resources=gatewaynodes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=gateway.isthmus.dev,resources=gatewaynodes/status,verbs=patch

// work runs while the replica holds the Lease: agent clients, probes of nodes, and a controller with one worker.
func (c *Controller) work(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	ask := func(name types.NamespacedName) { c.enqueue(ctx, name) }
	gateways := agents.Config{TLS: c.cfg.TLS, Fence: c.fence, Changed: func() { ask(gatewaysKey) }, Log: c.cfg.Log}
	if r := c.renewer; r != nil {
		gateways.Sign, gateways.Renewed = r.sign, func(gateway string, err error) { r.renewed(ctx, gateway, err) }
	}
	f := agents.New(ctx, gateways)
	defer f.Wait()
	var calls sync.WaitGroup
	defer calls.Wait()
	nodes := probes.New(ctx, probes.Config{Changed: func() { ask(gatewaysKey) }})
	defer nodes.Wait()
	defer cancel()
	w := &worker{
		configured: c.cfg.Settings, namespace: c.cfg.Namespace, managedBy: c.cfg.ManagedBy, client: c.manager.GetClient(), live: c.manager.GetAPIReader(),
		agents: f, probes: nodes, events: c.manager.GetEventRecorder(leaseName), log: c.cfg.Log, requeue: ask,
		lanes: newLanes(ctx, ask, calls.Go, c.cfg.Log),
	}
	cloudWork.of.Store(w.lanes)
	defer cloudWork.of.Store(nil)
	if c.cfg.Cloud != nil {
		w.cloud = fenced{c.cfg.Cloud, c.fence}
	}
	w.init()
	unnamed := true
	one, err := controller.NewUnmanaged(leaseName, controller.Options{
		Reconciler: &loop{worker: w, controller: c}, MaxConcurrentReconciles: 1, SkipNameValidation: &unnamed,
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry),
		Logger:      c.manager.GetLogger(),
	})
	if err != nil {
		return err
	}
	if err := c.watch(one); err != nil {
		return err
	}
	ask(syncKey)
	return one.Start(ctx)
}

// watch enqueues a Service after each of its events, and gatewaysKey after events of anything else.
func (c *Controller) watch(one controller.Controller) error {
	of := c.manager.GetCache()
	itself := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, s *corev1.Service) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: nameOf(s)}}
	})
	return errors.Join(
		one.Watch(source.Kind(of, &corev1.Service{}, itself)),
		one.Watch(source.Kind(of, &discoveryv1.EndpointSlice{}, gateways[*discoveryv1.EndpointSlice]())),
		one.Watch(source.Kind(of, &corev1.Node{}, gateways[*corev1.Node]())),
		one.Watch(source.Kind(of, &v1alpha1.GatewayNode{}, gateways[*v1alpha1.GatewayNode]())),
		one.Watch(source.Channel(c.requests, &handler.EnqueueRequestForObject{})),
	)
}

// gateways enqueues gatewaysKey after any event.
func gateways[T client.Object]() handler.TypedEventHandler[T, reconcile.Request] {
	return handler.TypedEnqueueRequestsFromMapFunc(func(context.Context, T) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: gatewaysKey}}
	})
}

// enqueue hands a Service or a key to the worker.
func (c *Controller) enqueue(ctx context.Context, name types.NamespacedName) {
	about := &corev1.Service{}
	about.Namespace, about.Name = name.Namespace, name.Name
	select {
	case c.requests <- event.GenericEvent{Object: about}:
	case <-ctx.Done():
	}
}

// fence returns an error unless this replica holds the Lease. A process that was suspended may not know yet that it lost
// it.
func (c *Controller) fence(ctx context.Context) error {
	var l coordinationv1.Lease
	if err := c.manager.GetAPIReader().Get(ctx, types.NamespacedName{Namespace: c.cfg.Namespace, Name: leaseName}, &l); err != nil {
		return fmt.Errorf("read the Lease: %w", err)
	}
	holder := deref(l.Spec.HolderIdentity)
	if c.holder.CompareAndSwap(nil, &holder) {
		return nil // first call, right after the Lease was won
	}
	if was := *c.holder.Load(); was != holder {
		return fmt.Errorf("the Lease belongs to %s and no longer to %s", holder, was)
	}
	return nil
}

// fenced is a Cloud that refuses writes of a replica without the Lease. Its successor may just have given a Service the
// port that this replica considers unused, moved a floating IP, or allowed a VIP that this replica does not know.
type fenced struct {
	Cloud

	fence func(context.Context) error
}

// CreatePort implements Cloud, as the other methods do.
func (f fenced) CreatePort(ctx context.Context, r openstack.PortRequest) (openstack.Port, error) {
	if err := f.fence(ctx); err != nil {
		return openstack.Port{}, fmt.Errorf("create port: %w", err)
	}
	return f.Cloud.CreatePort(ctx, r)
}

// DeletePort deletes a port.
func (f fenced) DeletePort(ctx context.Context, id string) error {
	if err := f.fence(ctx); err != nil {
		return fmt.Errorf("delete port %s: %w", id, err)
	}
	return f.Cloud.DeletePort(ctx, id)
}

// CreateFloatingIP creates a floating IP.
func (f fenced) CreateFloatingIP(ctx context.Context, network, port string, fixed netip.Addr) (openstack.FloatingIP, error) {
	if err := f.fence(ctx); err != nil {
		return openstack.FloatingIP{}, fmt.Errorf("create floating IP: %w", err)
	}
	return f.Cloud.CreateFloatingIP(ctx, network, port, fixed)
}

// ReserveFloatingIP creates a floating IP without a port.
func (f fenced) ReserveFloatingIP(ctx context.Context, network, purpose string) (openstack.FloatingIP, error) {
	if err := f.fence(ctx); err != nil {
		return openstack.FloatingIP{}, fmt.Errorf("reserve floating IP: %w", err)
	}
	return f.Cloud.ReserveFloatingIP(ctx, network, purpose)
}

// AssociateFloatingIP associates a floating IP with a port.
func (f fenced) AssociateFloatingIP(ctx context.Context, id, port string, fixed netip.Addr) error {
	if err := f.fence(ctx); err != nil {
		return fmt.Errorf("associate floating IP %s: %w", id, err)
	}
	return f.Cloud.AssociateFloatingIP(ctx, id, port, fixed)
}

// RetainFloatingIP makes a floating IP the user's own.
func (f fenced) RetainFloatingIP(ctx context.Context, id, namespace string) error {
	if err := f.fence(ctx); err != nil {
		return fmt.Errorf("retain floating IP %s: %w", id, err)
	}
	return f.Cloud.RetainFloatingIP(ctx, id, namespace)
}

// DeleteFloatingIP deletes a floating IP.
func (f fenced) DeleteFloatingIP(ctx context.Context, id string) error {
	if err := f.fence(ctx); err != nil {
		return fmt.Errorf("delete floating IP %s: %w", id, err)
	}
	return f.Cloud.DeleteFloatingIP(ctx, id)
}

// SetAddressPairs allows VIPs at a port.
func (f fenced) SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error {
	if err := f.fence(ctx); err != nil {
		return fmt.Errorf("set address pairs of port %s: %w", port, err)
	}
	return f.Cloud.SetAddressPairs(ctx, port, had, want)
}

// syncKey makes the worker call Sync.
var syncKey = types.NamespacedName{Name: "sync"}

// loop is the reconcile loop of the worker.
type loop struct {
	*worker
	controller *Controller
}

// Reconcile handles one key.
func (l *loop) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	switch r.NamespacedName {
	case syncKey:
		return l.sync(ctx)
	case resultsKey:
		_ = l.Collect() // lanes have logged the error, and retry
	}
	switch {
	case !l.controller.synced.Load():
		return reconcile.Result{}, nil // the initial sync comes first and covers everything
	case l.rebuildNeeded:
		if err := l.rebuild(ctx); err != nil {
			return reconcile.Result{}, err
		}
	}
	var err error
	again := reconcile.Result{}
	switch r.NamespacedName {
	case gatewaysKey:
		err = l.Refresh(ctx)
		again.RequeueAfter = l.recheckAfter
	case cleanKey:
		err = l.Clean(ctx)
	case resultsKey:
	default:
		err = l.Handle(ctx, r.NamespacedName)
	}
	switch {
	case errors.Is(err, errWaiting): // a lane wakes it; until then only its condition can change
		if since, ok := l.waitingSince[r.NamespacedName]; ok && l.now().Sub(since) < waitingNotice {
			again.RequeueAfter = waitingNotice
		}
		return again, nil
	case err != nil && again.RequeueAfter > 0 && ctx.Err() == nil: // the timeout of a silent gateway must not wait for the retry of another error
		l.log.Error("gateways", "err", err)
		return again, nil
	case apierrors.IsConflict(err): // the cache does not have the latest write yet
		return reconcile.Result{RequeueAfter: firstRetry}, nil
	case err != nil:
		return reconcile.Result{}, err
	}
	return again, nil
}

func (l *loop) sync(ctx context.Context) (reconcile.Result, error) {
	if err := l.controller.fence(ctx); err != nil {
		return reconcile.Result{}, err
	}
	err := l.Sync(ctx)
	if l.cloud != nil {
		l.lanes.start(laneQuota, resultsKey, func(ctx context.Context) (func(), error) { return nil, readQuota(ctx, l.cloud) })
	}
	if l.restored {
		l.controller.synced.Store(true)
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: l.controller.cfg.Resync}, nil
}
