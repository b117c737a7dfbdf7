// Package workloads maintains Services of machines outside of the cluster: of cloud servers, whose metadata or tags ask for
// it, of a cloud's load balancers, whose tags do, and of machines that an ExternalWorkload describes.
//
// For example, a server with the metadata federation.isthmus.dev:machine=web becomes an endpoint of the Service web. The
// Service has no selector; it is created with its first machine and deleted with the last. It carries
// [v1alpha1.MarkVirtualMachines], and with the usual annotations it is a member of a federated Service. A machine that does
// not run is an endpoint that is not ready. The ports of a load balancer are those of its listeners.
//
// Policies may apply to machines, too, if the settings ask for it: those of Antrea by ExternalNodes, and NetworkPolicies of Kubernetes by
// the security groups of a cloud's servers (package rules).
//
// The package fails static. The last answer of a silent cloud stays in effect, and after a restart the existing endpoints of
// a cloud stay until it answers. A user's Service is never changed; an event reports that its name is wanted.
package workloads

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// retry is the pause after a failure.
const retry = 2 * time.Second

// name identifies this part of the controller in events and in the managed fields of objects.
const name = "isthmus-machines"

// Config describes the sources of machines and the cluster of their Services.
type Config struct {
	// Local is the cluster's API server.
	Local *rest.Config
	// Settings have been completed by Complete.
	Settings Settings
	// Clouds has the cloud of each entry of the settings, by name.
	Clouds map[string]Cloud
	Log    *slog.Logger
}

// Controller maintains the Services of machines. Make it with New.
type Controller struct {
	cfg    Config
	client client.WithWatch
	wake   signal.Signal

	pollers      []*poller
	enforcements []*enforcement
	cluster      string // identifies the cluster to clouds; empty until it is read

	cache  *objectcache.Cache
	logged map[string]bool    // problems that were logged
	warned map[types.UID]bool // users' Services with an event that their name is wanted
	faulty map[string]string  // faults of policies with an event, by cloud and policy

	mu    sync.Mutex
	state State
}

// New prepares a Controller. It sends nothing.
func New(cfg Config) (*Controller, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(
		corev1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), eventsv1.AddToScheme(scheme), networkingv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme),
	); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	cfg.Local = rest.AddUserAgent(rest.CopyConfig(cfg.Local), name)
	if cfg.Local.QPS == 0 {
		cfg.Local.QPS = -1
	}
	v := &Controller{cfg: cfg, wake: signal.New()}
	var err error
	if v.client, err = client.NewWithWatch(cfg.Local, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	for _, c := range cfg.Settings.Clouds {
		if of := cfg.Clouds[c.Name]; of.Servers == nil || c.LoadBalancers && of.LoadBalancers == nil || c.SecurityGroups != "" && of.Enforcer == nil {
			return nil, fmt.Errorf("cloud %s of the settings is missing", c.Name)
		}
	}
	return v, nil
}

// Run works until ctx ends. Only one process of a cluster should run it at a time. The objects that it wrote stay.
func (c *Controller) Run(ctx context.Context) error {
	c.pollers, c.enforcements, c.logged, c.warned, c.faulty = nil, nil, nil, map[types.UID]bool{}, nil
	for _, settings := range c.cfg.Settings.Clouds {
		of := c.cfg.Clouds[settings.Name]
		c.poll(source{cloud: settings.Name}, settings, of.Servers)
		if settings.LoadBalancers {
			c.poll(source{cloud: settings.Name, loadBalancers: true}, settings, of.LoadBalancers)
		}
		if settings.SecurityGroups != "" {
			c.enforcements = append(c.enforcements, &enforcement{
				settings: settings, enforcer: of.Enforcer, wake: signal.New(), changed: c.changed, log: c.cfg.Log,
			})
		}
	}
	var err error
	c.cache, err = objectcache.NewCache(c.client.Scheme(), c.kinds(), func(int, client.Object, client.Object, bool) { c.changed() }, c.changed)
	if err != nil {
		return err
	}
	defer c.publish(State{})
	var running sync.WaitGroup
	for _, k := range c.cache.Informers() {
		running.Go(func() { c.follow(ctx, k) })
	}
	for _, f := range c.pollers {
		running.Go(func() { f.run(ctx) })
	}
	for _, e := range c.enforcements {
		running.Go(func() { e.run(ctx) })
	}
	c.work(ctx)
	running.Wait()
	return nil
}

// kinds are the kinds that are read, those of policies only if they apply to machines.
func (c *Controller) kinds() []objectcache.Kind {
	services := labels.SelectorFromSet(labels.Set{isthmus.LabelManagedBy: v1alpha1.ManagedByMachines})
	slices := labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: v1alpha1.ManagedByMachines})
	kinds := []objectcache.Kind{
		{Source: objectcache.Source{Object: &corev1.Service{}, Selector: services}},
		{Source: objectcache.Source{Object: &discoveryv1.EndpointSlice{}, Selector: slices}},
		{Source: objectcache.Source{Object: &v1alpha1.ExternalWorkload{}, Optional: true}},
	}
	if len(c.enforcements) > 0 {
		kinds = append(kinds, objectcache.Kind{Source: objectcache.Source{Object: &networkingv1.NetworkPolicy{}}})
	}
	if c.cfg.Settings.ExternalNodes {
		kinds = append(kinds, objectcache.Kind{Source: objectcache.Source{Object: newExternalNode(), Selector: services, Optional: true}})
	}
	return kinds
}

// poll adds a poller. Each source has its own, so that one that hangs does not delay another.
func (c *Controller) poll(from source, settings CloudSettings, lister Lister) {
	c.pollers = append(c.pollers, &poller{source: from, settings: settings, lister: lister, changed: c.changed, log: c.cfg.Log})
}

// lastError is the last result of an action that is repeated, so that an error that lasts is logged once.
type lastError struct{ text string }

// differs reports whether err is an error with another text than the last result, and keeps it.
func (l *lastError) differs(err error) bool {
	text := ""
	if err != nil {
		text = err.Error()
	}
	differs := text != "" && text != l.text
	l.text = text
	return differs
}

// work reconciles everything whenever something changed.
func (c *Controller) work(ctx context.Context) {
	var told lastError
	for {
		var again <-chan time.Time
		err := c.reconcile(ctx)
		if err != nil {
			again = time.After(retry)
		}
		if told.differs(err) && ctx.Err() == nil {
			c.cfg.Log.Error("Services of machines cannot be reconciled; retrying", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-c.wake.C():
		case <-again:
		}
	}
}

// changed makes work reconcile everything again.
func (c *Controller) changed() {
	c.wake.Notify()
}

// follow fills an informer until ctx ends.
func (c *Controller) follow(ctx context.Context, k *objectcache.ObjectInformer) {
	follow := k.Follower(c.client)
	logged := ""
	for ctx.Err() == nil {
		if err := follow(ctx); err != nil && err.Error() != logged {
			logged = err.Error()
			c.cfg.Log.Warn("this cluster cannot be read; its last known objects stay in effect", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// State is the state of machines as this process sees it. It is empty in a process that does not work on them.
type State struct {
	Clouds   []CloudState
	Problems []string // of machines that are not offered as requested, and of their policies, sorted, each with its remedy
}

// State returns the current state. It may be called at any time, from any goroutine.
func (c *Controller) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// publish sets the result of State.
func (c *Controller) publish(s State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state = s
}
