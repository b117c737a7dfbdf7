// Package member connects a supervisor to the members of its federation. A [Member] keeps its caches when the API server is
// silent and when its credentials change. It discards the answers of another cluster that responds at the member's address.
package member

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// probeTimeout limits how long a member may take to prove its identity.
const probeTimeout = 4 * time.Second

// Config describes a connection.
type Config struct {
	Scheme    *runtime.Scheme
	Namespace string        // of the Secrets; for messages
	Interval  time.Duration // between two probes of the member
	// Answered is called after each probe that reached the member.
	Answered func(*Member)
	// Changed is called when a member's State changed.
	Changed func(*Member)
	Log     *slog.Logger
}

// State is the state of a member after its last probe.
type State struct {
	Probed     bool   // the member was probed once; the other fields are empty before
	Problem    string // why the member is not reachable, and the remedy; "" while it is
	UID        string // of the member's cluster
	Supervisor bool
	Settings   Settings // of a supervisor
}

// Member is the connection to one member. It is connected while Run runs.
type Member struct {
	cfg       Config
	id        clusterset.ClusterID
	transport *transport
	config    *rest.Config
	client    client.WithWatch
	leases    coordinationv1client.CoordinationV1Interface

	mu     sync.Mutex
	spec   federationv1alpha1.MemberCluster
	target *Target
	uid    string // the expected uid, "" for any
	state  State
	woken  chan struct{} // closed and replaced when requests may succeed again
}

// New returns a member that is not connected. uid is that of the cluster that was last seen under the member's id, "" if
// there was none; a uid in the spec takes precedence.
func New(cfg Config, spec federationv1alpha1.MemberCluster, uid string) (*Member, error) {
	m := &Member{cfg: cfg, id: clusterset.ClusterID(spec.ClusterID), spec: spec, uid: uid, woken: make(chan struct{})}
	m.transport = &transport{verify: m.verify}
	// Requests carry the member's id, so errors name it. Only the transport knows the address.
	m.config = &rest.Config{Host: "https://" + spec.ClusterID, Transport: m.transport, QPS: -1, UserAgent: "isthmus-federation"}
	httpClient, err := rest.HTTPClientFor(m.config)
	if err != nil {
		return nil, err
	}
	server, err := discovery.NewDiscoveryClientForConfigAndClient(m.config, httpClient)
	if err != nil {
		return nil, fmt.Errorf("member %s: %w", spec.ClusterID, err)
	}
	m.client, err = client.NewWithWatch(m.config, client.Options{Scheme: cfg.Scheme, HTTPClient: httpClient, Mapper: newMapper(server)})
	if err != nil {
		return nil, fmt.Errorf("member %s: %w", spec.ClusterID, err)
	}
	m.leases, err = coordinationv1client.NewForConfigAndClient(m.config, httpClient)
	return m, err
}

// ID is part of reconcile.Member.
func (m *Member) ID() clusterset.ClusterID { return m.id }

// Reachable is part of reconcile.Member.
func (m *Member) Reachable() bool {
	s := m.State()
	return s.Probed && s.Problem == ""
}

// Supervisor is part of reconcile.Member.
func (m *Member) Supervisor() bool { return m.State().Supervisor }

// State returns the state after the last probe.
func (m *Member) State() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

// Client returns a client of the member's API server, which stays valid when the address or the credentials change.
func (m *Member) Client() client.WithWatch { return m.client }

// Leases returns a client of the member's Leases, which stays valid likewise.
func (m *Member) Leases() coordinationv1client.CoordinationV1Interface { return m.leases }

// Config returns the configuration of these clients.
func (m *Member) Config() *rest.Config { return m.config }

// Set sets the member's entry in the Federation and its credentials, nil for none. The caches stay.
func (m *Member) Set(spec federationv1alpha1.MemberCluster, target *Target) {
	m.mu.Lock()
	defer m.mu.Unlock()
	same := target == nil && m.target == nil || target != nil && m.target != nil && *target == *m.target
	if same && reflect.DeepEqual(spec, m.spec) && m.state.Probed {
		return
	}
	if spec.ClusterUID != "" {
		m.uid = spec.ClusterUID
	}
	m.spec, m.target = spec, target
	switch {
	case target == nil:
		m.transport.unset()
	case same:
		m.transport.doubt()
	default:
		if err := m.transport.set(*target); err != nil {
			m.cfg.Log.Error("a member's credentials cannot be used", "member", spec.ClusterID, "err", err)
			m.transport.unset()
		}
	}
	m.wake()
}

// wake ends all pauses, so that requests are tried at once. The caller holds the lock.
func (m *Member) wake() {
	close(m.woken)
	m.woken = make(chan struct{})
}

func (m *Member) awake() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.woken
}

// verify identifies the cluster that send reaches, and returns an error unless it is the member.
func (m *Member) verify(ctx context.Context, send func(*http.Request) (*http.Response, error)) error {
	found, err := identify(ctx, send)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.uid != "" && found.uid != m.uid:
		return fmt.Errorf("%w: %s is the cluster %s, and %s was %s; if it was replaced on purpose, set spec.members[clusterID=%s].clusterUID of the Federation to the new one",
			ErrAnotherCluster, m.spec.Server, found.uid, m.spec.ClusterID, m.uid, m.spec.ClusterID)
	case found.id == "":
		return fmt.Errorf("%w: %s has no ClusterClaim %s; create it with the value %s", ErrAnotherCluster, m.spec.Server, federationv1alpha1.ClaimID, m.spec.ClusterID)
	case found.id != m.spec.ClusterID:
		return fmt.Errorf("%w: %s claims to be %s, not %s; correct spec.members of the Federation, or the claim %s there",
			ErrAnotherCluster, m.spec.Server, found.id, m.spec.ClusterID, federationv1alpha1.ClaimID)
	}
	m.uid, m.state.UID, m.state.Supervisor, m.state.Settings = found.uid, found.uid, found.supervisor, found.settings
	return nil
}

// Run probes the member and fills caches until ctx ends.
func (m *Member) Run(ctx context.Context, caches ...*objectcache.Cache) {
	var running sync.WaitGroup
	for _, c := range caches {
		for _, i := range c.Informers() {
			running.Go(func() { m.follow(ctx, i) })
		}
	}
	for ctx.Err() == nil {
		awake := m.awake()
		m.probe(ctx)
		m.pause(ctx, m.cfg.Interval, awake)
	}
	running.Wait()
	m.transport.unset()
}

func (m *Member) probe(ctx context.Context) {
	probing, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := m.transport.probe(probing)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		m.cfg.Answered(m)
	}
	m.mu.Lock()
	before, problem := m.state, ""
	if err != nil {
		problem = explain(err, m.spec, m.cfg.Namespace)
	}
	m.state.Probed, m.state.Problem = true, problem
	changed := !before.Probed || m.state != before
	if changed && err == nil {
		m.wake()
	}
	id := m.spec.ClusterID
	m.mu.Unlock()
	if !changed {
		return
	}
	if err != nil {
		m.cfg.Log.Error("a member cannot be reached; its last known objects stay in effect; retrying", "member", id, "problem", problem, "err", err)
	} else {
		m.cfg.Log.Info("a member is reachable", "member", id)
	}
	m.cfg.Changed(m)
}

// retryInterval is how long an informer waits after an error, and so how late a missing kind may be noticed after it was
// installed.
const retryInterval = 5 * time.Second

// follow fills an informer until ctx ends.
func (m *Member) follow(ctx context.Context, i *objectcache.ObjectInformer) {
	follow := i.Follower(m.client)
	logged := ""
	for ctx.Err() == nil {
		awake := m.awake()
		err := follow(ctx)
		// While the member is unreachable, the probe logs it.
		if err != nil && m.Reachable() && err.Error() != logged {
			logged = err.Error()
			m.cfg.Log.Error("a member cannot be read", "member", m.ID(), "err", err)
		}
		m.pause(ctx, retryInterval, awake)
	}
}

// pause waits for a duration, or until requests may succeed again.
func (m *Member) pause(ctx context.Context, d time.Duration, awake <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-awake:
	}
}
