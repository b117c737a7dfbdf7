// Package workloads makes Services of machines outside of the cluster: of servers of clouds, which ask for it by their
// metadata or tags, and of those that an ExternalWorkload describes.
//
// In goes what clouds and the API server say, out come Services without a selector and their EndpointSlices. A Service
// is made with its first machine and removed with the last; one that is marked [v1alpha1.MarkVirtualMachines] and is
// annotated like any other is a member of a federated Service by its slices. A machine that does not run is an endpoint
// that is not ready.
//
// It fails static: what a silent cloud said last counts on, and while one has never answered, after a restart, what
// stands in the cluster of it stays. A Service of somebody's own is never touched, and is told.
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
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// retry is how long what failed waits.
const retry = 2 * time.Second

// name is that of this part of the controller, for events and for those who look who wrote something.
const name = "isthmus-machines"

// Config says where machines are, and where their Services.
type Config struct {
	// Local is the cluster's API server.
	Local *rest.Config
	// Settings are complete.
	Settings Settings
	// Clouds has the cloud of each entry of the settings, by its name.
	Clouds map[string]Cloud
	Log    *slog.Logger
}

// VMs keeps Services of machines in step with them. Make it with New.
type Controller struct {
	cfg    Config
	client client.WithWatch
	wake   chan struct{}

	clouds []*follower
	cache  *objectcache.Cache
	told   map[string]bool    // problems that were logged
	owners map[types.UID]bool // Services whose owners were told that machines ask for their names

	mu    sync.Mutex
	state State
}

// New prepares a VMs. It sends nothing.
func New(cfg Config) (*Controller, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), eventsv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	cfg.Local = rest.AddUserAgent(rest.CopyConfig(cfg.Local), name)
	if cfg.Local.QPS == 0 {
		cfg.Local.QPS = -1
	}
	v := &Controller{cfg: cfg, wake: make(chan struct{}, 1)}
	var err error
	if v.client, err = client.NewWithWatch(cfg.Local, client.Options{Scheme: scheme}); err != nil {
		return nil, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	for _, c := range cfg.Settings.Clouds {
		if cfg.Clouds[c.Name] == nil {
			return nil, fmt.Errorf("cloud %s of the settings is missing", c.Name)
		}
	}
	return v, nil
}

// Run works until ctx ends. Only one process of a cluster should at a time. What it wrote stays.
func (c *Controller) Run(ctx context.Context) error {
	c.clouds, c.told, c.owners = nil, nil, map[types.UID]bool{}
	for _, settings := range c.cfg.Settings.Clouds {
		c.clouds = append(c.clouds, &follower{settings: settings, cloud: c.cfg.Clouds[settings.Name], changed: c.changed})
	}
	services := labels.SelectorFromSet(labels.Set{isthmus.LabelManagedBy: v1alpha1.ManagedByMachines})
	slices := labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: v1alpha1.ManagedByMachines})
	var err error
	c.cache, err = objectcache.NewCache(c.client.Scheme(), []objectcache.Kind{
		{Source: objectcache.Source{Object: &corev1.Service{}, Selector: services}},
		{Source: objectcache.Source{Object: &discoveryv1.EndpointSlice{}, Selector: slices}},
		{Source: objectcache.Source{Object: &v1alpha1.ExternalWorkload{}, Optional: true}},
	}, func(int, client.Object, client.Object) { c.changed() }, c.changed)
	if err != nil {
		return err
	}
	defer c.publish(State{})
	var running sync.WaitGroup
	for _, k := range c.cache.Informers() {
		running.Go(func() { c.follow(ctx, k) })
	}
	for _, f := range c.clouds {
		running.Go(func() { f.run(ctx) })
	}
	c.work(ctx)
	running.Wait()
	return nil
}

// work brings everything in line whenever something changed.
func (c *Controller) work(ctx context.Context) {
	said := ""
	for {
		var again <-chan time.Time
		err := c.reconcile(ctx)
		text := ""
		if err != nil {
			again, text = time.After(retry), err.Error()
		}
		if text != "" && text != said && ctx.Err() == nil {
			c.cfg.Log.Error("Services of machines cannot be brought in line; trying again", "err", err)
		}
		said = text
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-again:
		}
	}
}

// changed makes work look at everything again.
func (c *Controller) changed() {
	select {
	case c.wake <- struct{}{}:
	default: // it will
	}
}

// follow keeps a kind current.
func (c *Controller) follow(ctx context.Context, k *objectcache.ObjectInformer) {
	follow := k.Follower(c.client)
	said := ""
	for ctx.Err() == nil {
		if err := follow(ctx); err != nil && err.Error() != said {
			said = err.Error()
			c.cfg.Log.Warn("this cluster cannot be read; what was read of it counts on", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// State is how machines are doing, as this process sees it; empty in one that does not work on them.
type State struct {
	Clouds   []CloudState
	Problems []string // of machines that are not offered as they ask, sorted, each with what to do
}

// State may be called at any time, from any goroutine.
func (c *Controller) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// publish makes s what State returns.
func (c *Controller) publish(s State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state = s
}
