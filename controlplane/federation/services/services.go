// Package services gives every member of a federation its federated Services: for each name that people annotate
// Services of any members with, a Service without a selector, the EndpointSlices that lead to all of its member
// Services, and, where the Federation switches that on, a ServiceImport with a ClusterSetIP over the same slices.
//
// It is a [reconcile.Reconciler]: in goes what members say, out come writes into the members that this process leads. What it
// computes depends on what members say and on nothing that it remembers, so two leaders come to the same. What it
// writes carries [v1alpha1.ManagedBy]; anything else of the same name is somebody's own, is never touched, and is
// reported.
//
// What a member offers goes at once when its owner takes the annotation away or the member leaves the Federation. When
// a member Service vanishes otherwise, controlplane/internal/withdrawal decides: one of few goes after a second, a
// multitude is an accident and stays. Endpoints are no matter of doubt: their slices are followed at once.
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
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/hosts"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// Config says what federated Services are like.
type Config struct {
	// Federation is of the supervisor that this process runs in.
	Federation v1alpha1.FederationSpec
	// Resolve asks for the addresses of a load balancer that has a host name only, and for how long they are good. Nil
	// asks the name servers of /etc/resolv.conf.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error)
	// Guard says how fast what vanishes is believed to be gone. Its callbacks are not used.
	Guard withdrawal.Config[clusterset.ServiceName]
	Log   *slog.Logger
}

// Part is made by New.
type Reconciler struct {
	system   string
	hostname *template.Template // nil without one
	hosts    *hosts.Hosts
	log      *slog.Logger
	guard    *withdrawal.Guard[clusterset.ServiceName]
	again    atomic.Pointer[func(reconcile.Key)] // set by Run
	vips     vips

	wanted sync.Map // clusterset.ServiceName: names that a Service of any member was seen to ask for
	seen   sync.Map // offered: that the guard was told of
	told   sync.Map // taken: that somebody's own Service was told of; the event's name keeps other processes from telling it too
	said   sync.Map // types.UID: what was said to the owner of a Service, until it is read there

	unsuited sync.Map // taken, to a string: what a cluster cannot have, and why
}

var (
	_ reconcile.Reconciler = (*Reconciler)(nil)
	_ reconcile.Runner     = (*Reconciler)(nil)
	_ reconcile.Guarded    = (*Reconciler)(nil)
)

// New returns the Part that cfg describes. The error joins all faults and names the fields.
func New(cfg Config) (*Reconciler, error) {
	var errs []error
	p := &Reconciler{system: cfg.Federation.SystemNamespace, log: cfg.Log}
	if cfg.Resolve == nil {
		cfg.Resolve = hosts.System("/etc/resolv.conf")
	}
	p.hosts = hosts.New(cfg.Resolve, cfg.Log)
	if p.system == "" {
		p.system = v1alpha1.DefaultSystemNamespace
	}
	if text := cfg.Federation.HostnameTemplate; text != "" {
		var err error
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
				errs = append(errs, fmt.Errorf("spec.clusterSetIP.ranges[%d]: %q is no CIDR; write one such as 243.0.0.0/16", i, text))
			}
			p.vips.ranges = append(p.vips.ranges, r)
		}
		if _, err := clusterset.NewIPPool(p.vips.ranges...); err != nil && len(errs) == 0 {
			errs = append(errs, fmt.Errorf("spec.clusterSetIP.ranges: %w", err))
		}
	}
	cfg.Guard.Changed = func(_ clusterset.ClusterID, names []clusterset.ServiceName) {
		p.lookAgain(names...)
	}
	errs = append(errs, cfg.Guard.Validate())
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("federated services: %w", err)
	}
	p.guard = withdrawal.New(cfg.Guard)
	return p, nil
}

// outsideName returns the name outside of the clusters of a federated Service.
func (r *Reconciler) outsideName(name clusterset.ServiceName) (string, error) {
	var text strings.Builder
	if err := r.hostname.Execute(&text, name); err != nil {
		return "", err
	}
	if faults := validation.IsDNS1123Subdomain(text.String()); len(faults) > 0 {
		return "", fmt.Errorf("%q is no host name: %s", text.String(), strings.Join(faults, ", "))
	}
	return text.String(), nil
}

// Name is part of reconcile.Reconciler.
func (r *Reconciler) Name() string { return "services" }

// Run decides about what vanished, and resolves host names of load balancers, until ctx ends.
func (r *Reconciler) Run(ctx context.Context, again func(reconcile.Key)) error {
	r.again.Store(&again)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.guard.Run(ctx) })
	group.Go(func() error {
		return r.hosts.Run(ctx, func(name clusterset.ServiceName) { again(keyOf(name)) })
	})
	return group.Wait()
}

// lookAgain asks to look at federated Services again, in all members. Before Run nobody is there to ask.
func (r *Reconciler) lookAgain(names ...clusterset.ServiceName) {
	if again := r.again.Load(); again != nil {
		for _, name := range names {
			(*again)(keyOf(name))
		}
	}
}

// The kinds of keys.
const (
	kindService = "Service"        // a federated Service
	kindStatus  = "Service status" // a Service that was a member of a federated one, and says so still
)

func keyOf(name clusterset.ServiceName) reconcile.Key {
	return reconcile.Key{Kind: kindService, Namespace: name.Namespace, Name: name.Name}
}

// Holds is part of reconcile.Guarded.
func (r *Reconciler) Holds() []withdrawal.Hold { return r.guard.Holds() }

// Release is part of reconcile.Guarded.
func (r *Reconciler) Release(of clusterset.ClusterID) { r.guard.Release(of) }
