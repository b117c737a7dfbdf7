package datapath

import (
	"context"
	"maps"
	"sync/atomic"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Fake is a Datapath without a kernel, for tests of whoever drives one. It passes the same contract
// test. The zero value is not ready; NewFake makes one.
type Fake struct {
	state  lb.State
	writes atomic.Uint64

	// FailAfter, when not nil, makes Apply stop with Err after that many writes.
	FailAfter *int
	// Err is what a failing Apply returns.
	Err error
	// Room is what the maps have room for.
	Room lb.Limits
	// Seen is the evidence about each member. It must not change once somebody reads it.
	Seen map[clusterset.ClusterID]Evidence
	// Counted is what clients of each Service met.
	Counted map[clusterset.ServiceName]Counters
	// Tell are events for Observe, and Rate is what it was last asked for, 0 while nobody observes.
	Tell chan Event
	Rate atomic.Uint32
	// Stale is how often CloseStale was called.
	Stale atomic.Int64
}

// NewFake returns a Fake whose maps hold what have holds.
func NewFake(have lb.State) *Fake { return &Fake{state: have.Clone(), Tell: make(chan Event)} }

// Load returns a copy of what the maps hold.
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

// Differences returns how many entries are not as want says.
func (f *Fake) Differences(ctx context.Context, want *lb.Audit) (int, error) {
	want.State(f.state)
	return want.Differences(), ctx.Err()
}

// Meddle does to the maps what somebody else would.
func (f *Fake) Meddle(do func(lb.State)) { do(f.state) }

// Observe waits until ctx ends and tells what Tell is sent meanwhile.
func (f *Fake) Observe(ctx context.Context, rate uint32, tell func(Event)) error {
	f.Rate.Store(rate)
	defer f.Rate.Store(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-f.Tell:
			tell(e)
		}
	}
}

// Limits returns Room.
func (f *Fake) Limits() lb.Limits { return f.Room }

// Writes returns how many map entries Apply has written or deleted.
func (f *Fake) Writes() uint64 { return f.writes.Load() }

// Refusals returns that nobody was refused.
func (f *Fake) Refusals() (map[Refusal]uint64, error) { return map[Refusal]uint64{}, nil }

// Counters returns Counted.
func (f *Fake) Counters() (map[clusterset.ServiceName]Counters, error) { return f.Counted, nil }

// EvictedUDPVIPs returns that none had to make room.
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

// Hooks says that all programs are attached.
func (f *Fake) Hooks() []HookStatus {
	var hooks []HookStatus
	for _, h := range bpf.Hooks() {
		hooks = append(hooks, HookStatus{Name: h.Name, Attached: true})
	}
	return hooks
}

// Close does nothing.
func (f *Fake) Close() error { return nil }

// Clusters returns Seen.
func (f *Fake) Clusters() (map[clusterset.ClusterID]Evidence, error) { return maps.Clone(f.Seen), nil }

// CloseStale counts that it was asked.
func (f *Fake) CloseStale(context.Context) (int, error) {
	f.Stale.Add(1)
	return 0, nil
}

// Follow waits until ctx ends.
func (f *Fake) Follow(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Missing says that nothing is missing.
func (f *Fake) Missing() []string { return nil }

// Findings says that nothing is in the way.
func (f *Fake) Findings() ([]Finding, error) { return nil, nil }
