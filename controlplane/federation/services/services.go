// Package services maintains the federated Services of a federation. Owners annotate Services of any members with a common
// name. For each name, every member gets a Service without a selector, EndpointSlices that lead to all member Services, and,
// if the Federation enables it, a ServiceImport with a ClusterSetIP over the same slices.
//
// For example, clusters a and b each annotate a Service web with the global name shop. In a, b and c a client then reaches
// pods of both clusters through the ClusterIP of isthmus-system/shop.
//
// The [Reconciler] computes its writes from the members' objects alone, so two leaders reach the same result. Its objects
// carry [v1alpha1.ManagedBy]. An object of the same name without that mark belongs to a user; it is never changed, and
// events report it.
//
// When an owner removes the annotation, or a member leaves the Federation, its slices go at once. When a member Service
// vanishes otherwise, package withdrawal decides: a few are accepted after a second, while a multitude looks like an
// accident and stays. Endpoints are not held back: the slices follow them at once. Kubernetes gives a Service that selects pods
// at least one EndpointSlice, if only an empty one. When the Service has none, its endpoints are unknown, not gone. For example,
// a cache of EndpointSlices is read again before that of Services. Then the slices stay as they are.
package services

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"text/template"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/hosts"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// Config describes the federated Services.
type Config struct {
	// Federation is the spec of the Federation in this supervisor.
	Federation v1alpha1.FederationSpec
	// Resolve returns the addresses of a load balancer that has only a host name, and their TTL. Nil queries the name
	// servers of /etc/resolv.conf.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error)
	// Namespace is the namespace of Isthmus in every member.
	Namespace string
	// Probe tells whether any of a few endpoints of a cluster answers. Nil tries TCP handshakes.
	Probe Probe
	// Changed, if not nil, is called after endpoints or ports of a federated Service changed in a member that this process leads.
	Changed func(clusterset.ClusterID, clusterset.ServiceName)
	// Guard configures the withdrawal guard. Its callbacks are not used.
	Guard withdrawal.Config[clusterset.ServiceName]
	Log   *slog.Logger
}

// Reconciler is a [reconcile.Reconciler]. Make it with New.
type Reconciler struct {
	system   string
	hostname *template.Template // nil without one
	hosts    *hosts.Hosts
	log      *slog.Logger
	guard    *withdrawal.Guard[clusterset.ServiceName]
	enqueue  atomic.Pointer[reconcile.Enqueue] // set by Run
	vips     vips
	grants   grants.Rules
	isthmus  string // the namespace of Isthmus in every member
	probe    Probe
	changed  func(clusterset.ClusterID, clusterset.ServiceName) // may be nil
	// reached has the ids of clusters whose endpoints a probe has reached once. A probe that never reaches a cluster, such as behind a
	// NetworkPolicy or in a network that does not route between clusters, proves nothing when it does not reach it either.
	reached  sync.Map
	external map[clusterset.ClusterID][]netip.Prefix // the external networks of members

	wanted   sync.Map // clusterset.ServiceName: names that a Service of any member has asked for
	seen     seen
	endings  reconcile.Endings
	warned   sync.Map // taken: users' Services with an event; the name of the event prevents one from another process
	rejected sync.Map // taken to a string: federated Services that a cluster refuses, and why

	rejectedVIPs sync.Map // taken to a string: federated Services whose ClusterSetIP a cluster refuses, and why
}

var (
	_ reconcile.Reconciler = (*Reconciler)(nil)
	_ reconcile.Runner     = (*Reconciler)(nil)
	_ reconcile.Guarded    = (*Reconciler)(nil)
	_ reconcile.Witness    = (*Reconciler)(nil)
)

// New returns a Reconciler. The error joins all faults and names the fields.
func New(cfg Config) (*Reconciler, error) {
	var errs []error
	p := &Reconciler{system: cfg.Federation.SystemNamespace, log: cfg.Log, isthmus: cfg.Namespace, probe: cfg.Probe, changed: cfg.Changed}
	if p.probe == nil {
		p.probe = handshakes
	}
	if cfg.Resolve == nil {
		cfg.Resolve = hosts.System("/etc/resolv.conf")
	}
	p.hosts = hosts.New(cfg.Resolve, cfg.Log)
	p.grants = grants.New(cfg.Federation)
	var err error
	if p.external, err = externalNetworks(cfg.Federation.Members); err != nil {
		errs = append(errs, err)
	}
	if p.system == "" {
		p.system = v1alpha1.DefaultSystemNamespace
	}
	if text := cfg.Federation.HostnameTemplate; text != "" {
		p.hostname, err = template.New("hostnameTemplate").Option("missingkey=error").Parse(text)
		if err == nil {
			_, err = p.outsideName(clusterset.ServiceName{Namespace: "demo", Name: "web"})
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("spec.hostnameTemplate: %w; write one such as {{.Name}}.example.org", err))
		}
	}
	if cfg.Federation.ClusterSetIP.Enabled {
		for i, text := range cfg.Federation.ClusterSetIP.Ranges {
			r, err := netip.ParsePrefix(text)
			if err != nil {
				errs = append(errs, fmt.Errorf("spec.clusterSetIP.ranges[%d]: %q is not a CIDR; write one such as 243.0.0.0/16", i, text))
			}
			p.vips.ranges = append(p.vips.ranges, r)
		}
		if _, err := clusterset.NewIPPool(p.vips.ranges...); err != nil && len(errs) == 0 {
			errs = append(errs, fmt.Errorf("spec.clusterSetIP.ranges: %w", err))
		}
	}
	cfg.Guard.Changed = func(_ clusterset.ClusterID, names []clusterset.ServiceName) {
		p.requeue(names...)
	}
	errs = append(errs, cfg.Guard.Validate())
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("federated services: %w", err)
	}
	p.guard = withdrawal.New(cfg.Guard)
	return p, nil
}

// externalNetworks returns spec.externalCIDRs of members.
func externalNetworks(members []v1alpha1.MemberCluster) (map[clusterset.ClusterID][]netip.Prefix, error) {
	networks := map[clusterset.ClusterID][]netip.Prefix{}
	var errs []error
	for i, m := range members {
		for j, text := range m.ExternalCIDRs {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				errs = append(errs, fmt.Errorf("spec.members[%d].externalCIDRs[%d]: %q is not a CIDR; write one such as 192.0.2.0/24", i, j, text))
			}
			networks[clusterset.ClusterID(m.ClusterID)] = append(networks[clusterset.ClusterID(m.ClusterID)], p)
		}
	}
	return networks, errors.Join(errs...)
}

// outsideName returns the name of a federated Service outside of the clusters.
func (r *Reconciler) outsideName(name clusterset.ServiceName) (string, error) {
	var text strings.Builder
	if err := r.hostname.Execute(&text, name); err != nil {
		return "", err
	}
	if faults := validation.IsDNS1123Subdomain(text.String()); len(faults) > 0 {
		return "", fmt.Errorf("%q is not a host name: %s", text.String(), strings.Join(faults, ", "))
	}
	return text.String(), nil
}

// Joins returns the federated Service that svc asks to join, and whether it asks for one. system is the namespace of global federated
// Services.
func Joins(svc *corev1.Service, system string) (clusterset.ServiceName, bool) {
	name, ok, _ := offers.Name(svc, system)
	return name, ok
}

// Fault returns why a Service of a member that asks to join a federated one cannot, whatever its endpoints are, such as an external IP outside
// of the member's externalCIDRs. It does not look at grants.
func Fault(svc *corev1.Service, member v1alpha1.MemberCluster) error {
	networks, err := externalNetworks([]v1alpha1.MemberCluster{member})
	if err != nil {
		return err
	}
	id := clusterset.ClusterID(member.ClusterID)
	_, err = offers.New(offers.Source{Cluster: id, Service: svc, External: networks[id]})
	return err
}

// Name is part of reconcile.Reconciler.
func (r *Reconciler) Name() string { return "services" }

// Run decides on withdrawals, and resolves host names of load balancers, until ctx ends.
func (r *Reconciler) Run(ctx context.Context, enqueue reconcile.Enqueue) error {
	r.enqueue.Store(&enqueue)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.guard.Run(ctx) })
	group.Go(func() error {
		return r.hosts.Run(ctx, func(name clusterset.ServiceName) { enqueue(keyOf(name)) })
	})
	return group.Wait()
}

// requeue has federated Services reconciled again, in all members. Before Run it does nothing.
func (r *Reconciler) requeue(names ...clusterset.ServiceName) {
	if enqueue := r.enqueue.Load(); enqueue != nil {
		for _, name := range names {
			(*enqueue)(keyOf(name))
		}
	}
}

// Kinds of keys.
const (
	kindService = "Service"        // a federated Service
	kindStatus  = "Service status" // a former member Service whose status annotation remains
)

func keyOf(name clusterset.ServiceName) reconcile.Key {
	return reconcile.Key{Kind: kindService, Namespace: name.Namespace, Name: name.Name}
}

// Holds is part of reconcile.Guarded.
func (r *Reconciler) Holds() []withdrawal.Hold { return r.guard.Holds() }

// Release is part of reconcile.Guarded.
func (r *Reconciler) Release(of clusterset.ClusterID) { r.guard.Release(of) }
