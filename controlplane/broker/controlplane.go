// Package broker is the controller of one member: it tells the broker what the member exports, and
// gives the member what all members export. It is one process with a cache of its own cluster and one of
// the broker; of several replicas, the one that holds the Lease works.
//
// When the broker goes away, everything stays as it is here and there, and trying goes on. When the
// controller dies, what it wrote stays, another replica takes the Lease, and finds nothing to write if
// nothing changed.
package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	brokerclient "github.com/isthmus-net/isthmus/controlplane/broker/internal/client"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/export"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/imports"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

const (
	// leaseName is the Lease that the working replica holds.
	leaseName = "isthmus-controller"
	// workers is how many Services each reconciler works on at a time.
	workers = 8
	// reconcileTimeout bounds one look at one Service, so that a broker that swallows packets does not
	// hold a worker for long.
	reconcileTimeout = 30 * time.Second
	// firstRetry and lastRetry bound how long a Service waits after an error: soon after the first one,
	// and often enough that all is well again shortly after an outage.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 15 * time.Second
	// syncTimeout is how long a cache may need to become complete: for as long as its broker is away.
	syncTimeout = 100 * 365 * 24 * time.Hour
)

// Config says which cluster this is and where its broker is.
type Config struct {
	// Local is the API server of the member itself.
	Local *rest.Config
	// Namespace is where Isthmus is installed in the member: of its Member object and of the Lease.
	Namespace string
	// Broker is the API server of the broker, with this member's credentials.
	Broker *rest.Config
	// BrokerNamespace is where the broker keeps everything. A member's own namespace of that name is
	// neither exported nor imported, because the broker may live in a member.
	BrokerNamespace string
	// Settings overrule what the member's registration says.
	Settings Settings
	// Evidence says whether another member's endpoints answer. Without one the nodes of this member do, by their
	// reports, and the controller probes.
	Evidence liveness.Evidence
	// AskNames, if not nil, asks the cluster's DNS, as pods do, and returns nil when it answers for clusterset.local.
	// The Member then says whether it does.
	AskNames func(context.Context) error
	Log      *slog.Logger
}

// Validate reports everything that is missing.
func (c Config) Validate() error {
	var errs []error
	for field, missing := range map[string]bool{
		"Local": c.Local == nil, "Namespace": c.Namespace == "", "Broker": c.Broker == nil,
		"BrokerNamespace": c.BrokerNamespace == "", "Log": c.Log == nil,
	} {
		if missing {
			errs = append(errs, fmt.Errorf("control plane config: %s is missing", field))
		}
	}
	return errors.Join(append(errs, c.Settings.Validate())...)
}

// ControlPlane is the controller of one member.
type ControlPlane struct {
	cluster clusterset.ClusterID
	cfg     Config
	chosen  chosen
	manager ctrl.Manager
	broker  *brokerclient.Broker
	probe   *brokerclient.Probe
	members *liveness.Tracker

	importer *imports.Reconciler
}

// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,verbs=get;create;update,namespace=isthmus-system
// +kubebuilder:rbac:groups="",resources=events,verbs=create;patch,namespace=isthmus-system

// New prepares a controller. It reads the member's registration, so it needs the member's API server; the
// broker may be away. Its errors are for a person to mend.
func New(ctx context.Context, cfg Config) (*ControlPlane, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Local, cfg.Broker = unthrottled(cfg.Local), unthrottled(cfg.Broker)
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	member, err := readMember(ctx, cfg, scheme)
	if err != nil {
		return nil, err
	}
	cfg.Log = cfg.Log.With("cluster", string(member.id))
	// What controller-runtime has to say is of interest only while debugging, its errors apart.
	logger := logr.FromSlogHandler(parting{cfg.Log.Handler()}).V(-int(slog.LevelDebug))
	mgr, err := ctrl.NewManager(cfg.Local, ctrl.Options{
		Scheme:                        scheme,
		Logger:                        logger,
		Cache:                         trimmed(cfg.Namespace),
		Metrics:                       server.Options{BindAddress: "0"}, // served by whoever runs the process
		LeaderElection:                true,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       cfg.Namespace,
		LeaderElectionReleaseOnCancel: true, // Run returns right after, and the process with it
	})
	if err != nil {
		return nil, fmt.Errorf("prepare the controller for %s: %w", cfg.Local.Host, err)
	}
	c := &ControlPlane{cluster: member.id, cfg: cfg, chosen: cfg.Settings.choose(member.spec), manager: mgr}
	return c, c.wire(ctx, member)
}

// unthrottled returns a copy of c that leaves it to the API server to spread the load (priority and
// fairness), unless c sets a rate: client-go's default of 5 requests a second would delay every change.
func unthrottled(c *rest.Config) *rest.Config {
	c = rest.AddUserAgent(rest.CopyConfig(c), leaseName)
	if c.QPS == 0 {
		c.QPS = -1
	}
	return c
}

// trimmed are caches without what nobody reads, and without what is ours: that is mirrored.
func trimmed(install string) cache.Options {
	foreign, err := labels.Parse(discoveryv1.LabelManagedBy + "!=" + v1alpha1.ManagedBy)
	if err != nil {
		panic(err) // it does not depend on anything
	}
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&v1alpha1.Member{}: {Namespaces: map[string]cache.Config{install: {}}},
			&discoveryv1.EndpointSlice{}: {Label: foreign, Transform: func(obj any) (any, error) {
				if es, ok := obj.(*discoveryv1.EndpointSlice); ok {
					mcs.Trim(es)
				}
				return obj, nil
			}},
			&corev1.Service{}: {Transform: func(obj any) (any, error) {
				if svc, ok := obj.(*corev1.Service); ok {
					svc.ManagedFields, svc.Annotations, svc.Spec.Selector, svc.Status = nil, nil, nil, corev1.ServiceStatus{}
				}
				return obj, nil
			}},
			&corev1.Namespace{}: {Transform: func(obj any) (any, error) {
				if ns, ok := obj.(*corev1.Namespace); ok {
					ns.ManagedFields, ns.Annotations, ns.Labels = nil, nil, nil
				}
				return obj, nil
			}},
		},
	}
}

// wire adds the broker and the reconcilers to the manager.
func (c *ControlPlane) wire(ctx context.Context, member member) error {
	recorder := c.manager.GetEventRecorder(leaseName)
	own := &registration{
		self:   types.NamespacedName{Namespace: c.cfg.Namespace, Name: string(member.id)},
		client: c.manager.GetClient(), events: recorder, log: c.cfg.Log,
		decisions: make(chan withdrawal.Decision, 64), named: make(chan bool), released: withdrawal.Releases{},
	}
	evidence := c.cfg.Evidence
	if evidence == nil {
		evidence = &liveness.Reports{
			Client: c.manager.GetAPIReader(), Namespace: c.cfg.Namespace, Log: c.cfg.Log,
			Probe: &liveness.Probe{Endpoints: c.endpoints, Deadline: c.chosen.times.Probe},
		}
	}
	c.members = liveness.NewTracker(liveness.Config{
		Self: member.id, Times: c.chosen.times, Mode: c.chosen.mode, Log: c.cfg.Log,
		Evidence: evidence, Present: func(id clusterset.ClusterID) bool { return c.importer.Uses(id) },
		Changed: func(id clusterset.ClusterID) { c.broker.Reconsider(id) },
	})
	var err error
	c.broker, err = brokerclient.New(ctx, brokerclient.Config{
		REST: c.cfg.Broker, Namespace: c.cfg.BrokerNamespace, Self: member.id, BrokerTime: c.chosen.brokerTime,
		Renewed: c.members.Renewed, Gone: c.members.Gone,
		Left: func(id clusterset.ClusterID, left bool) {
			if left {
				c.members.Forget(id)
			}
		},
		Hold:    withdrawal.DefaultTimes().Scale(c.chosen.scale),
		Decided: own.decided, Log: c.cfg.Log,
	})
	if err != nil {
		return err
	}
	own.broker = c.broker
	c.probe = brokerclient.NewProbe(c.broker)
	local, err := client.NewWithWatch(c.cfg.Local, client.Options{HTTPClient: c.manager.GetHTTPClient(), Scheme: c.manager.GetScheme(), Mapper: c.manager.GetRESTMapper()})
	if err != nil {
		return fmt.Errorf("prepare a client of %s: %w", c.cfg.Local.Host, err)
	}
	c.importer, err = imports.New(imports.Config{
		Cluster: member.id, Client: local, Broker: c.broker, Members: c.members,
		Policy: c.chosen.export.Policy, Shared: c.shared, Log: c.cfg.Log,
	})
	if err != nil {
		return err
	}
	exports := &export.Reconciler{
		Cluster: member.id, Client: c.manager.GetClient(), Broker: c.broker, Imports: c.importer, Pool: member.pool, Settings: c.chosen.export,
		Shared: c.shared, Events: recorder, Log: c.cfg.Log,
	}
	if c.cfg.AskNames != nil {
		watch := &nameWatch{ask: c.cfg.AskNames, interval: c.chosen.scale.Of(nameInterval), tell: own.named, log: c.cfg.Log}
		if err := c.manager.Add(watch); err != nil {
			return err
		}
	}
	return errors.Join(
		c.manager.Add(c.broker),
		c.manager.Add(c.probe),
		c.manager.Add(c.members),
		c.manager.Add(c.importer),
		c.manager.Add(&liveness.Heart{Self: member.id, Client: c.broker.Client(), Namespace: c.cfg.BrokerNamespace, Times: c.chosen.times, Log: c.cfg.Log}),
		own.setup(c.manager, options()),
		exports.Setup(ctx, c.manager, options()),
		c.importer.Setup(c.manager, options()),
	)
}

// endpoints returns some of a member's endpoints, none when they are not known.
func (c *ControlPlane) endpoints(id clusterset.ClusterID) []netip.AddrPort {
	const few = 3
	return c.broker.Endpoints(id, few)
}

func options() controller.Options {
	unnamed := true
	return controller.Options{
		MaxConcurrentReconciles: workers,
		CacheSyncTimeout:        syncTimeout,
		ReconciliationTimeout:   reconcileTimeout,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry),
		// Names must be unique in a process, and tests run several members in one.
		SkipNameValidation: &unnamed,
	}
}

// shared reports whether a namespace is the same one in all members, and not the broker's.
func (c *ControlPlane) shared(namespace string) bool {
	return namespace != c.cfg.BrokerNamespace && !c.chosen.isRestricted(namespace)
}

// Run works until ctx ends, or until the Lease is lost, which is an error. It leaves everything it wrote
// where it is.
func (c *ControlPlane) Run(ctx context.Context) error {
	if err := c.manager.Start(ctx); err != nil {
		return fmt.Errorf("run the controller: %w", err)
	}
	return nil
}

// State is how a controller is doing.
type State struct {
	Cluster clusterset.ClusterID
	Leader  bool // it is the replica that works
	Broker  Broker
	Members []Member // the others, sorted by id
}

// Member is how another member looks from here.
type Member struct {
	ID    clusterset.ClusterID
	State liveness.State
	Since time.Time // when it came into that state, zero if it always was
	Held  int       // how much of what it offered vanished and is kept
}

// Broker is how a controller gets on with the broker.
type Broker struct {
	Server, Namespace string
	Seen              time.Time // the last time it answered as it should; zero if never
	Err               error     // why it does not now, and what to do; nil while it does
}

// State may be called at any time, from any goroutine.
func (c *ControlPlane) State() State {
	reach := c.probe.Reach()
	s := State{
		Cluster: c.cluster,
		Broker:  Broker{Server: c.cfg.Broker.Host, Namespace: c.cfg.BrokerNamespace, Seen: reach.Seen, Err: reach.Err},
	}
	select {
	case <-c.manager.Elected():
		s.Leader = true
	default:
	}
	held := map[clusterset.ClusterID]int{}
	for _, h := range c.broker.Holds() {
		held[h.Source] += h.Count
	}
	for _, id := range c.broker.Members() {
		if id == c.cluster {
			continue
		}
		state, since := c.members.State(id)
		s.Members = append(s.Members, Member{ID: id, State: state, Since: since, Held: held[id]})
	}
	return s
}

// member is this cluster's registration, as far as the controller needs it.
type member struct {
	id   clusterset.ClusterID
	pool *clusterset.IPPool
	spec v1alpha1.MemberSpec
}

// readMember reads the one Member in the installation namespace.
func readMember(ctx context.Context, cfg Config, scheme *runtime.Scheme) (member, error) {
	c, err := client.New(cfg.Local, client.Options{Scheme: scheme})
	if err != nil {
		return member{}, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	var members v1alpha1.MemberList
	err = c.List(ctx, &members, client.InNamespace(cfg.Namespace))
	switch {
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err):
		return member{}, fmt.Errorf("API server %s knows no Members, this cluster has not joined; run isthmusctl join", cfg.Local.Host)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return member{}, fmt.Errorf("API server %s does not let the controller read Members in namespace %s; the Helm chart gives the controller its rights: %w", cfg.Local.Host, cfg.Namespace, err)
	case err != nil:
		return member{}, fmt.Errorf("API server %s of this cluster cannot be asked for its registration; check its address and the network: %w", cfg.Local.Host, err)
	}
	switch n := len(members.Items); n {
	case 0:
		return member{}, fmt.Errorf("namespace %s has no Member, this cluster has not joined; run isthmusctl join", cfg.Namespace)
	case 1:
		return parseMember(&members.Items[0])
	default:
		var names []string
		for _, m := range members.Items {
			names = append(names, m.Name)
		}
		return member{}, fmt.Errorf("namespace %s has %d Members (%s) and needs exactly one; delete all but this cluster's own", cfg.Namespace, n, strings.Join(names, ", "))
	}
}

// parseMember checks a registration. Its error joins all faults.
func parseMember(m *v1alpha1.Member) (member, error) {
	parsed, err := mcs.Member(m)
	pool, poolErr := clusterset.NewIPPool(parsed.Blocks...)
	if err := errors.Join(err, poolErr); err != nil {
		return member{}, fmt.Errorf("member %s; run isthmusctl join again with other values: %w", m.Name, err)
	}
	return member{id: parsed.ID, pool: pool, spec: m.Spec}, nil
}
