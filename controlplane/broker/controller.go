// Package broker contains the controller of a ClusterSet member that works over a broker. It publishes what its cluster
// exports to the broker, and imports into its cluster what all members export.
//
// For example, clusters "east" and "west" share a broker, and east creates a ServiceExport for demo/hello. The
// controller in east writes an ExportRecord and copies of the EndpointSlices to the broker; the controller in west sees
// them and writes a ServiceImport and EndpointSlices into its own namespace demo.
//
// A controller is one process with two caches: of its own cluster and of the broker. Of several replicas, the one that
// holds the Lease writes. While the broker is away, everything stays as it is and the controller keeps trying. When a
// controller dies, its objects stay; another replica takes the Lease and writes only what changed meanwhile.
package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	brokerclient "github.com/isthmus-net/isthmus/controlplane/broker/internal/client"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/imports"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/nodes"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// leaseName is the Lease that the active replica holds.
const leaseName = "isthmus-controller"

// Config identifies the cluster and its broker.
type Config struct {
	// Local is the API server of the cluster itself.
	Local *rest.Config
	// Namespace is where Isthmus is installed in the cluster. It contains the cluster's Member and the Lease.
	Namespace string
	// Broker is the API server of the broker, with this member's credentials.
	Broker *rest.Config
	// BrokerNamespace contains all objects of the ClusterSet on the broker. The controller neither exports nor imports
	// a namespace of that name in its own cluster, because the broker may run in a member.
	BrokerNamespace string
	// Settings override the member's registration.
	Settings Settings
	// Evidence tells whether the endpoints of another member answer. Nil means the NodeReports of this cluster's nodes,
	// and TCP probes by the controller.
	Evidence liveness.Evidence
	// CheckDNS, if not nil, queries the cluster's DNS as a pod would, and returns nil if it answers for
	// clusterset.local. The Member reports the result.
	CheckDNS func(context.Context) error
	Log      *slog.Logger
}

// Validate reports every missing field and every invalid setting.
func (c Config) Validate() error {
	var errs []error
	for field, missing := range map[string]bool{
		"Local": c.Local == nil, "Namespace": c.Namespace == "", "Broker": c.Broker == nil,
		"BrokerNamespace": c.BrokerNamespace == "", "Log": c.Log == nil,
	} {
		if missing {
			errs = append(errs, fmt.Errorf("controller config: %s is missing", field))
		}
	}
	return errors.Join(append(errs, c.Settings.Validate())...)
}

// Controller is the controller of one member.
type Controller struct {
	cluster  clusterset.ClusterID
	cfg      Config
	settings effectiveSettings
	manager  ctrl.Manager
	broker   *brokerclient.Broker
	probe    *brokerclient.Probe
	renewer  *credential.Renewer
	members  *liveness.Tracker
	importer *imports.Reconciler
	nodes    *nodes.Nodes
}

// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,verbs=get;create;update,namespace=isthmus-system
// +kubebuilder:rbac:groups="",resources=events,verbs=create;patch,namespace=isthmus-system
// +kubebuilder:rbac:groups="",resources=secrets,resourceNames=isthmus-broker,verbs=patch,namespace=isthmus-system

// New prepares a Controller. It reads the cluster's Member, so it needs the cluster's API server; the broker may be
// away. Its errors tell an administrator what to correct.
func New(ctx context.Context, cfg Config) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Local, cfg.Broker = unthrottled(cfg.Local), unthrottled(cfg.Broker)
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	self, err := readMember(ctx, cfg, scheme)
	if err != nil {
		return nil, err
	}
	cfg.Log = cfg.Log.With("cluster", string(self.id))
	// The info messages of controller-runtime are of interest only while debugging.
	logger := logr.FromSlogHandler(stopFilter{cfg.Log.Handler()}).V(-int(slog.LevelDebug))
	mgr, err := ctrl.NewManager(cfg.Local, ctrl.Options{
		Scheme:                        scheme,
		Logger:                        logger,
		Cache:                         trimmedCaches(cfg.Namespace),
		Metrics:                       server.Options{BindAddress: "0"}, // the command serves them
		LeaderElection:                true,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       cfg.Namespace,
		LeaderElectionReleaseOnCancel: true, // Run returns right after, and the process with it
	})
	if err != nil {
		return nil, fmt.Errorf("prepare the controller for %s: %w", cfg.Local.Host, err)
	}
	c := &Controller{cluster: self.id, cfg: cfg, settings: cfg.Settings.resolve(self.spec), manager: mgr}
	return c, c.addComponents(ctx, self)
}

// unthrottled returns a copy of c without client-side rate limits, unless c sets a rate. The API server spreads the
// load itself (priority and fairness); client-go's default of 5 requests a second would delay every change.
func unthrottled(c *rest.Config) *rest.Config {
	c = rest.AddUserAgent(rest.CopyConfig(c), leaseName)
	if c.QPS == 0 {
		c.QPS = -1
	}
	return c
}

// trimmedCaches returns cache options that drop unread fields, and drop the EndpointSlices that Isthmus writes: package
// imports has its own cache of those.
func trimmedCaches(install string) cache.Options {
	foreign, err := labels.Parse(discoveryv1.LabelManagedBy + "!=" + v1alpha1.ManagedBy)
	if err != nil {
		panic(err) // the selector is constant
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

// shared reports whether a namespace is exported and imported: not that of the broker, and not a restricted one.
func (c *Controller) shared(namespace string) bool {
	return namespace != c.cfg.BrokerNamespace && !c.settings.isRestricted(namespace)
}

// Run runs the controller until ctx ends, or until it loses the Lease, which is an error. It deletes none of its objects.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.manager.Start(ctx); err != nil {
		return fmt.Errorf("run the controller: %w", err)
	}
	return nil
}
