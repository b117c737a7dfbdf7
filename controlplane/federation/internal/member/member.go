// Package member has the connections of a supervisor to members. A [Member] is one: it goes on with what it has read
// when its API server is silent, when its credentials change, and when another cluster answers in its place, whose
// answers it does not believe.
package member

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/memory"
)

// probeTimeout is how long a member may take to say who it is.
const probeTimeout = 4 * time.Second

// Config says who connects.
type Config struct {
	Scheme    *runtime.Scheme
	Namespace string        // of the Secrets; for messages
	Interval  time.Duration // how often a member is asked whether it is there
	// Changed is called when a member's State changed.
	Changed func(*Member)
	Log     *slog.Logger
}

// State is how a member is.
type State struct {
	Asked      bool   // whether it was asked, so that the rest means something
	Problem    string // why it is not reachable, and what to do; "" while it is
	UID        string // of the cluster that is the member
	Supervisor bool
}

// Member is one member. It is connected while Run runs.
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
	uid    string // what is expected, "" for anything
	state  State
	woken  chan struct{} // closed and replaced when it is worth to try again
}

// NewMember returns a member that is not connected. uid is that of the cluster that was seen under its id, "" if none
// was; the spec's goes before.
func NewMember(cfg Config, spec federationv1alpha1.MemberCluster, uid string) (*Member, error) {
	m := &Member{cfg: cfg, id: clusterset.ClusterID(spec.ClusterID), spec: spec, uid: uid, woken: make(chan struct{})}
	m.transport = &transport{verify: m.verify}
	// Requests name the member, so errors do; where it is only the transport knows.
	m.config = &rest.Config{Host: "https://" + spec.ClusterID, Transport: m.transport, QPS: -1, UserAgent: "isthmus-federation"}
	httpClient, err := rest.HTTPClientFor(m.config)
	if err != nil {
		return nil, err
	}
	asked, err := discovery.NewDiscoveryClientForConfigAndClient(m.config, httpClient)
	if err != nil {
		return nil, fmt.Errorf("member %s: %w", spec.ClusterID, err)
	}
	m.client, err = client.NewWithWatch(m.config, client.Options{Scheme: cfg.Scheme, HTTPClient: httpClient, Mapper: newMapper(asked)})
	if err != nil {
		return nil, fmt.Errorf("member %s: %w", spec.ClusterID, err)
	}
	m.leases, err = coordinationv1client.NewForConfigAndClient(m.config, httpClient)
	return m, err
}

// ID is part.Member's, as the next two.
func (m *Member) ID() clusterset.ClusterID { return m.id }

// Reachable is described with ID.
func (m *Member) Reachable() bool {
	s := m.State()
	return s.Asked && s.Problem == ""
}

// Supervisor is described with ID.
func (m *Member) Supervisor() bool { return m.State().Supervisor }

// State returns how the member is.
func (m *Member) State() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

// Client is of the API server of the member, wherever that is, as Leases and Config are.
func (m *Member) Client() client.WithWatch { return m.client }

// Leases is described with Client.
func (m *Member) Leases() coordinationv1client.CoordinationV1Interface { return m.leases }

// Config is described with Client.
func (m *Member) Config() *rest.Config { return m.config }

// Set takes what the Federation says of the member, and its credentials, nil for none. What was read stays.
func (m *Member) Set(spec federationv1alpha1.MemberCluster, target *Target) {
	m.mu.Lock()
	defer m.mu.Unlock()
	same := target == nil && m.target == nil || target != nil && m.target != nil && *target == *m.target
	if same && spec == m.spec && m.state.Asked {
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

// wake makes everybody who waits for the member try now. The lock is held.
func (m *Member) wake() {
	close(m.woken)
	m.woken = make(chan struct{})
}

func (m *Member) awake() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.woken
}

// verify asks the cluster behind send who it is, and returns why it is not the member.
func (m *Member) verify(ctx context.Context, send func(*http.Request) (*http.Response, error)) error {
	who, err := identify(ctx, send)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.uid != "" && who.uid != m.uid:
		return fmt.Errorf("%w: %s is the cluster %s, and %s was %s; if it was replaced on purpose, set spec.members[clusterID=%s].clusterUID of the Federation to the new one",
			ErrAnotherCluster, m.spec.Server, who.uid, m.spec.ClusterID, m.uid, m.spec.ClusterID)
	case who.id == "":
		return fmt.Errorf("%w: %s has no ClusterClaim %s; create it with the value %s", ErrAnotherCluster, m.spec.Server, federationv1alpha1.ClaimID, m.spec.ClusterID)
	case who.id != m.spec.ClusterID:
		return fmt.Errorf("%w: %s claims to be %s, not %s; correct spec.members of the Federation, or the claim %s there",
			ErrAnotherCluster, m.spec.Server, who.id, m.spec.ClusterID, federationv1alpha1.ClaimID)
	}
	m.uid, m.state.UID, m.state.Supervisor = who.uid, who.uid, who.supervisor
	return nil
}

// Run asks the member again and again whether it is there, and keeps memories current, until ctx ends.
func (m *Member) Run(ctx context.Context, memories ...*memory.Memory) {
	var running sync.WaitGroup
	for _, mem := range memories {
		for _, k := range mem.Kinds() {
			running.Go(func() { m.follow(ctx, k) })
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
	asking, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := m.transport.ask(asking)
	if ctx.Err() != nil {
		return
	}
	m.mu.Lock()
	before, problem := m.state, ""
	if err != nil {
		problem = explain(err, m.spec, m.cfg.Namespace)
	}
	m.state.Asked, m.state.Problem = true, problem
	changed := !before.Asked || m.state != before
	if changed && err == nil {
		m.wake()
	}
	id := m.spec.ClusterID
	m.mu.Unlock()
	if !changed {
		return
	}
	if err != nil {
		m.cfg.Log.Error("a member cannot be reached; what was read of it counts on, and trying goes on", "member", id, "problem", problem, "err", err)
	} else {
		m.cfg.Log.Info("a member answers", "member", id)
	}
	m.cfg.Changed(m)
}

// again is how long to wait until a kind is read again after an error, which also is how long a kind that is missing
// may stay unnoticed when it comes.
const again = 5 * time.Second

// follow keeps a kind current until ctx ends.
func (m *Member) follow(ctx context.Context, k *memory.Kind) {
	follow := k.Follower(m.client)
	said := ""
	for ctx.Err() == nil {
		awake := m.awake()
		err := follow(ctx)
		// While the member is away, the probe says so.
		if err != nil && m.Reachable() && err.Error() != said {
			said = err.Error()
			m.cfg.Log.Error("a member cannot be read", "member", m.ID(), "err", err)
		}
		m.pause(ctx, again, awake)
	}
}

// pause waits for a while, or until the member is worth another try.
func (m *Member) pause(ctx context.Context, d time.Duration, awake <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-awake:
	}
}
