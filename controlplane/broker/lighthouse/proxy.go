package lighthouse

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	brokerclient "github.com/isthmus-net/isthmus/controlplane/broker/internal/client"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/export"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// proxy is the member of Isthmus for one cluster of Lighthouse: it exports what that cluster exports, and renews its Lease.
type proxy struct {
	id       clusterset.ClusterID
	settings broker.Exporting
	store    *store
	broker   *brokerclient.Broker
	log      *slog.Logger

	mu         sync.Mutex
	conditions map[clusterset.ServiceName][]metav1.Condition // as last reported
}

// account returns cfg as member id. The API server lets the Bridge act as the accounts of its clusters, and the broker's admission
// policies judge it like any member.
func account(cfg *rest.Config, namespace string, id clusterset.ClusterID) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + namespace + ":" + v1alpha1.MemberAccount(string(id))}
	return cfg
}

// newProxy prepares the proxy of a cluster. It sends no request.
func (b *Bridge) newProxy(ctx context.Context, m member) (*proxy, error) {
	p := &proxy{
		id: m.id, settings: b.cfg.Settings.Exporting(m.spec), store: b.store, log: b.cfg.Log.With("cluster", string(m.id)),
		conditions: map[clusterset.ServiceName][]metav1.Condition{},
	}
	p.settings.Exports.ServiceVIP = true // Lighthouse exports no pods of a Service that has an address
	var err error
	p.broker, err = brokerclient.New(ctx, brokerclient.Config{
		REST: account(b.cfg.REST, b.cfg.Namespace, m.id), Namespace: b.cfg.Namespace, Self: m.id,
		Remembered:   func(clusterset.ServiceName) map[clusterset.ClusterID]time.Time { return nil },
		LeaseRenewed: func(clusterset.ClusterID, time.Time) {},
		LeaseDeleted: func(clusterset.ClusterID) {},
		Left:         func(clusterset.ClusterID, bool) {},
		Hold:         withdrawal.DefaultTimes().Scale(timescale.Factor(b.cfg.Settings.TimeScale)),
		Decided:      func(withdrawal.Decision) {},
		Log:          p.log,
	})
	return p, err
}

// run exports until ctx ends. It withdraws nothing at its end.
func (p *proxy) run(ctx context.Context, b *Bridge) error {
	pool, err := clusterset.NewIPPool()
	if err != nil {
		return err
	}
	exports := &export.Reconciler{
		Cluster: p.id, Source: p, Broker: p.broker, Imports: nothing{}, Regions: nothing{}, Pool: pool,
		Settings: p.settings.Exports, Shared: p.settings.Shared, Events: nothing{}, Log: p.log,
	}
	follow, err := exports.Follow(p.store.source(), b.options())
	if err != nil {
		return err
	}
	heartbeat := &liveness.Heartbeat{
		Self: p.id, Client: p.broker.Client(), Namespace: b.cfg.Namespace, Times: p.settings.Times, Statements: exports.Statements, Log: p.log,
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.broker.Start(ctx) })
	group.Go(func() error { return follow.Start(ctx) })
	group.Go(func() error { return heartbeat.Start(ctx) })
	return group.Wait()
}

// Read is part of export.Source.
func (p *proxy) Read(_ context.Context, name clusterset.ServiceName) (export.Inputs, error) {
	in := inputsOf(p.id, name, p.store.aggregate(name), p.store.slices.Indexed(name), time.Now())
	p.mu.Lock()
	defer p.mu.Unlock()
	if in.Export == nil {
		delete(p.conditions, name)
	} else {
		in.Export.Status.Conditions = p.conditions[name]
	}
	return in, nil
}

// Exported is part of export.Source.
func (p *proxy) Exported(ctx context.Context) ([]clusterset.ServiceName, error) {
	if p.store.aggregates.Err() != nil || p.store.slices.Err() != nil {
		return nil, objectcache.ErrNotSynced
	}
	var names []clusterset.ServiceName
	for _, name := range p.store.known() {
		if in, err := p.Read(ctx, name); err == nil && in.Export != nil {
			names = append(names, name)
		}
	}
	return names, nil
}

// UpdateStatus is part of export.Source. The cluster's ServiceExport is out of reach, so the conditions go to the log.
func (p *proxy) UpdateStatus(_ context.Context, svcExport *v1beta1.ServiceExport) error {
	name := clusterset.ServiceName{Namespace: svcExport.Namespace, Name: svcExport.Name}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conditions[name] = svcExport.Status.Conditions
	for _, c := range svcExport.Status.Conditions {
		bad := metav1.ConditionFalse
		if c.Type == string(v1beta1.ServiceExportConditionConflict) {
			bad = metav1.ConditionTrue
		}
		if c.Status == bad {
			p.log.Warn("an export of a cluster of Lighthouse has a fault", "namespace", name.Namespace, "service", name.Name, "condition", c.Type, "reason", c.Reason, "message", c.Message)
		}
	}
	return nil
}

// nothing stands for what a cluster of Lighthouse does not have: imports of Isthmus, regions, and an API server for events.
type nothing struct{}

func (nothing) Imported(clusterset.ServiceName) (clusterset.Import, bool) {
	return clusterset.Import{}, false
}

func (nothing) RegionOf(string) string { return "" }

func (nothing) Source(func() []clusterset.ServiceName) source.Source { return nil }

func (nothing) Eventf(runtime.Object, runtime.Object, string, string, string, string, ...any) {}
