package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	brokerclient "github.com/isthmus-net/isthmus/controlplane/broker/internal/client"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/export"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/imports"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/nodes"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

const (
	// workers is how many Services each reconciler handles concurrently.
	workers = 8
	// reconcileTimeout bounds one reconcile, so that a broker that drops packets cannot block a worker for long.
	reconcileTimeout = 30 * time.Second
	// firstRetry and lastRetry bound the backoff after an error: soon after the first error, and often enough to
	// recover shortly after an outage.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 15 * time.Second
	// syncTimeout is how long a cache may take to sync: without limit, because the broker may be away that long.
	syncTimeout = 100 * 365 * 24 * time.Hour
)

// probedEndpoints is how many endpoints of a silent member a probe may try.
const probedEndpoints = 3

// addComponents creates the broker client, the liveness tracker and the reconcilers, and adds them to the manager.
func (c *Controller) addComponents(ctx context.Context, self member) error {
	recorder := c.manager.GetEventRecorder(leaseName)
	own := c.newRegistration(recorder)
	c.members = c.newTracker()
	if err := c.connectBroker(ctx, own); err != nil {
		return err
	}
	if err := c.prepareLocal(recorder, own); err != nil {
		return err
	}
	exports := &export.Reconciler{
		Cluster: c.cluster, Source: export.NewSource(c.manager.GetClient()), Broker: c.broker, Imports: c.importer, Regions: c.nodes, Pool: self.pool, Settings: c.settings.export,
		Shared: c.shared, Events: recorder, Log: c.cfg.Log,
	}
	if c.cfg.CheckDNS != nil {
		watch := &dnsWatch{check: c.cfg.CheckDNS, interval: c.settings.scale.Scale(dnsInterval), results: own.dnsResults, log: c.cfg.Log}
		if err := c.manager.Add(watch); err != nil {
			return err
		}
	}
	return errors.Join(
		c.manager.Add(c.broker),
		c.manager.Add(c.probe),
		c.manager.Add(c.renewer),
		c.manager.Add(c.members),
		c.manager.Add(c.importer),
		c.manager.Add(c.nodes),
		c.manager.Add(&liveness.Heartbeat{
			Self: c.cluster, Client: c.broker.Client(), Namespace: c.cfg.BrokerNamespace, Times: c.settings.times, Log: c.cfg.Log,
			Statements: func() map[string]string { return c.statements(exports) },
		}),
		own.setup(c.manager, options()),
		exports.Setup(ctx, c.manager, options()),
		c.importer.Setup(c.manager, options()),
	)
}

// statements returns what this member states in its Lease: about its exports, and about pod CIDRs that it has not registered.
func (c *Controller) statements(exports *export.Reconciler) map[string]string {
	all := exports.Statements()
	if self, ok := c.broker.Registry().Member(c.cluster); ok {
		maps.Copy(all, podStatements(c.nodes, self))
	}
	return all
}

// newRegistration returns the reconciler of this cluster's Member, which still lacks the broker.
func (c *Controller) newRegistration(recorder events.EventRecorder) *registration {
	return &registration{
		self:   types.NamespacedName{Namespace: c.cfg.Namespace, Name: string(c.cluster)},
		client: c.manager.GetClient(), events: recorder, log: c.cfg.Log,
		decisions: make(chan withdrawal.Decision, 64), dnsResults: make(chan bool), credentials: make(chan struct{}, 1), podCIDRs: make(chan struct{}, 1),
		released: withdrawal.Releases{},
	}
}

// newTracker returns the liveness tracker. Its callbacks run only after addComponents.
func (c *Controller) newTracker() *liveness.Tracker {
	evidence := c.cfg.Evidence
	if evidence == nil {
		evidence = &liveness.Reports{
			Client: c.manager.GetAPIReader(), Namespace: c.cfg.Namespace, Log: c.cfg.Log,
			Probe: &liveness.Probe{Endpoints: c.endpoints, Deadline: c.settings.times.Probe},
		}
	}
	return liveness.NewTracker(liveness.Config{
		Self: c.cluster, Times: c.settings.times, Mode: c.settings.mode, Log: c.cfg.Log,
		Evidence: evidence, Present: func(id clusterset.ClusterID) bool { return c.importer.Uses(id) },
		Changed: func(id clusterset.ClusterID) { c.broker.ReconcileMember(id) },
	})
}

// connectBroker creates the broker client, which reports Leases to the tracker and decisions to own.
func (c *Controller) connectBroker(ctx context.Context, own *registration) error {
	var err error
	c.renewer, err = credential.New(credential.Config{
		Self: c.cluster, Broker: c.cfg.Broker, BrokerNamespace: c.cfg.BrokerNamespace, Local: c.cfg.Local, Namespace: c.cfg.Namespace,
		ClusterSet: func(ctx context.Context) (v1alpha1.ClusterSetConfigSpec, error) {
			config := &v1alpha1.ClusterSetConfig{}
			err := c.broker.Client().Get(ctx, client.ObjectKey{Namespace: c.cfg.BrokerNamespace, Name: v1alpha1.ClusterSetConfigName}, config)
			return config.Spec, err
		},
		Changed: own.credentialChanged, Log: c.cfg.Log,
	})
	if err != nil {
		return err
	}
	c.broker, err = brokerclient.New(ctx, brokerclient.Config{
		REST: c.cfg.Broker, Namespace: c.cfg.BrokerNamespace, Self: c.cluster, BrokerTime: c.settings.brokerTime,
		Remembered: func(name clusterset.ServiceName) map[clusterset.ClusterID]time.Time {
			return c.importer.Remembered(name)
		},
		LeaseRenewed: c.members.Renewed, LeaseDeleted: c.members.LeaseDeleted,
		Left: func(id clusterset.ClusterID, left bool) {
			if left {
				c.members.Forget(id)
			}
		},
		CredentialEnded: func() string {
			if s := c.renewer.State(); s.Ended {
				return s.Err.Error()
			}
			return ""
		},
		Hold:    withdrawal.DefaultTimes().Scale(c.settings.scale),
		Decided: own.decided, Log: c.cfg.Log,
	})
	if err != nil {
		return err
	}
	own.broker, own.credential = c.broker, c.renewer.State
	c.probe = brokerclient.NewProbe(c.broker)
	return nil
}

// prepareLocal creates the import reconciler, and what follows the Nodes, with a client of their own, because the manager's cannot
// watch.
func (c *Controller) prepareLocal(recorder events.EventRecorder, own *registration) error {
	local, err := client.NewWithWatch(c.cfg.Local, client.Options{HTTPClient: c.manager.GetHTTPClient(), Scheme: c.manager.GetScheme(), Mapper: c.manager.GetRESTMapper()})
	if err != nil {
		return fmt.Errorf("prepare a client of %s: %w", c.cfg.Local.Host, err)
	}
	if c.nodes, err = nodes.New(local, own.podsChanged, c.cfg.Log); err != nil {
		return err
	}
	own.nodes = c.nodes
	c.importer, err = imports.New(imports.Config{
		Cluster: c.cluster, Client: local, Broker: c.broker, Members: c.members,
		Policy: c.settings.export.Policy, Shared: c.shared, Events: recorder, Log: c.cfg.Log,
	})
	return err
}

// endpoints returns a few endpoints of a member; none if they are unknown.
func (c *Controller) endpoints(id clusterset.ClusterID) []netip.AddrPort {
	return c.broker.Endpoints(id, probedEndpoints)
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
