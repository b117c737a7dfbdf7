package datapath

import (
	"context"
	"maps"
	"sync/atomic"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Fake is a Datapath without a kernel, for tests of its callers. It passes the same contract test. Make it with NewFake.
type Fake struct {
	state  lb.State
	writes atomic.Uint64

	// FailAfter, when not nil, makes Apply stop with Err after that many writes.
	FailAfter *int
	// Err is what a failing Apply returns.
	Err error
	// Capacity is how many entries the maps have room for.
	Capacity lb.Limits
	// Evidence is what Clusters returns. It must not change once it has been read.
	Evidence map[clusterset.ClusterID]Evidence
	// ServiceCounters is what Counters returns.
	ServiceCounters map[clusterset.ServiceName]Counters
	// Events are passed on by Observe. Rate is the rate of the Observe under way, 0 without one.
	Events chan Event
	Rate   atomic.Uint32
	// CloseStaleCalls counts the calls of CloseStale.
	CloseStaleCalls atomic.Int64
}

// NewFake returns a Fake whose maps hold have.
func NewFake(have lb.State) *Fake { return &Fake{state: have.Clone(), Events: make(chan Event)} }

// Load returns a copy of the content of the maps.
func (f *Fake) Load(ctx context.Context) (lb.State, error) {
	if err := ctx.Err(); err != nil {
		return lb.State{}, err
	}
	return f.state.Clone(), nil
}

// Apply carries out p, or its first FailAfter writes.
func (f *Fake) Apply(ctx context.Context, p lb.Plan) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	n, err := p.Writes(), error(nil)
	if f.FailAfter != nil && *f.FailAfter < n {
		n, err = *f.FailAfter, f.Err
	}
	f.state.Apply(p.Prefix(n))
	f.writes.Add(uint64(n))
	return err
}

// Differences returns how many entries differ from want.
func (f *Fake) Differences(ctx context.Context, want *lb.Audit) (int, error) {
	want.State(f.state)
	return want.Differences(), ctx.Err()
}

// Corrupt changes the maps as another process would.
func (f *Fake) Corrupt(do func(lb.State)) { do(f.state) }

// Observe passes on Events until ctx ends.
func (f *Fake) Observe(ctx context.Context, rate uint32, handle func(Event)) error {
	f.Rate.Store(rate)
	defer f.Rate.Store(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-f.Events:
			handle(e)
		}
	}
}

// Limits returns Capacity.
func (f *Fake) Limits() lb.Limits { return f.Capacity }

// Writes returns how many map entries Apply has written or deleted.
func (f *Fake) Writes() uint64 { return f.writes.Load() }

// Refusals returns no refusals.
func (f *Fake) Refusals() (map[Refusal]uint64, error) { return map[Refusal]uint64{}, nil }

// Counters returns ServiceCounters.
func (f *Fake) Counters() (map[clusterset.ServiceName]Counters, error) { return f.ServiceCounters, nil }

// EvictedUDPVIPs returns 0.
func (f *Fake) EvictedUDPVIPs() (uint64, error) { return 0, nil }

// Frontend looks one frontend up.
func (f *Fake) Frontend(a lb.Address) (Entry, bool, error) {
	fe, ok := f.state.Frontends[a]
	entry := Entry{Service: f.state.Services[fe.Service]}
	for i := range fe.Count {
		be, ok := f.state.Backends[f.state.Slots[lb.Slot{Frontend: fe.ID, Index: i}]]
		if !ok {
			entry.Broken++
			continue
		}
		entry.Backends = append(entry.Backends, be.Address)
	}
	return entry, ok, nil
}

// Hooks returns that all programs are attached.
func (f *Fake) Hooks() []HookStatus {
	var hooks []HookStatus
	for _, h := range bpf.Hooks() {
		hooks = append(hooks, HookStatus{Name: h.Name, Attached: true})
	}
	return hooks
}

// Close does nothing.
func (f *Fake) Close() error { return nil }

// Clusters returns Evidence.
func (f *Fake) Clusters() (map[clusterset.ClusterID]Evidence, error) {
	return maps.Clone(f.Evidence), nil
}

// CloseStale counts the call.
func (f *Fake) CloseStale(context.Context) (int, error) {
	f.CloseStaleCalls.Add(1)
	return 0, nil
}

// Follow waits until ctx ends.
func (f *Fake) Follow(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Missing returns that no feature is missing.
func (f *Fake) Missing() []string { return nil }

// Findings returns no findings.
func (f *Fake) Findings() ([]Finding, error) { return nil, nil }
