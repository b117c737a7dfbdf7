// Package election elects the leader of a member: the holder of a Lease in the member's own API server, by the rules of
// client-go. The epoch counts how often the Lease changed hands.
package election

import (
	"context"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
)

// Times are the times of an election. Lease is how long a silent leader keeps the Lease, Renew how long a leader tries to
// renew the Lease before it stops leading, and Retry the time between two attempts. Lease > Renew > 1.2 times Retry.
type Times struct{ Lease, Renew, Retry time.Duration }

// DefaultTimes are the times of Kubernetes' own controllers.
var DefaultTimes = Times{Lease: 15 * time.Second, Renew: 10 * time.Second, Retry: 2 * time.Second}

// Candidate is a process that competes for one Lease.
type Candidate struct {
	lock  *lock
	times Times
	notes *notes
}

// New returns a candidate for a Lease. No other process ever has the same identity.
func New(leases coordinationv1client.LeasesGetter, lease types.NamespacedName, identity string, times Times) *Candidate {
	noted := &notes{LeasesGetter: leases, say: func() string { return "" }}
	return &Candidate{times: times, notes: noted, lock: &lock{duration: times.Lease, Interface: &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: lease.Namespace, Name: lease.Name},
		Client:     noted,
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
	}}}
}

// Seen returns the holder of the Lease when it was last read or written, "" for none, and its epoch.
func (c *Candidate) Seen() (holder string, epoch int64) {
	c.lock.mu.Lock()
	defer c.lock.mu.Unlock()
	return c.lock.holder, c.lock.epoch
}

// Say makes the candidate write the result of say to the Lease as a note, at each renewal. It is called before Run.
func (c *Candidate) Say(say func() string) { c.notes.say = say }

// Said returns the note of the Lease's holder when the Lease was last read or written.
func (c *Candidate) Said() string {
	c.notes.mu.Lock()
	defer c.notes.mu.Unlock()
	return c.notes.said
}

// Run takes part in the election until ctx ends. Each time it wins, it calls work, whose ctx ends when the leadership may
// end; it competes again after work has returned. It gives the Lease back when ctx ends, after work has returned.
func (c *Candidate) Run(ctx context.Context, work func(context.Context, fenced.Term)) error {
	for ctx.Err() == nil {
		if err := c.once(ctx, work); err != nil {
			return err
		}
	}
	return nil
}

// once takes part until it has won and lost the leadership, or until ctx ends.
func (c *Candidate) once(ctx context.Context, work func(context.Context, fenced.Term)) error {
	won := make(chan context.Context, 1)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: c.lock, LeaseDuration: c.times.Lease, RenewDeadline: c.times.Renew, RetryPeriod: c.times.Retry,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { won <- ctx },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("elect by Lease %s: %w", c.lock.Describe(), err)
	}
	// The elector gives the Lease back as soon as its ctx ends, so the ctx of work ends first.
	electing, stop := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	ended := make(chan struct{})
	running.Go(func() {
		defer close(ended)
		elector.Run(electing)
	})
	select {
	case <-ctx.Done():
	case <-ended:
	case leading := <-won:
		leading, cancel := context.WithCancel(leading)
		defer context.AfterFunc(ctx, cancel)()
		defer cancel()
		work(leading, fenced.Term{Epoch: c.lock.term(), Held: c.lock.isHeld})
	}
	return nil
}

// lock is a resource lock that remembers its last observed record, and until when this process certainly holds it.
type lock struct {
	resourcelock.Interface

	duration time.Duration

	mu     sync.Mutex
	until  time.Time // zero while it is not held
	holder string
	epoch  int64
	floor  int // the lowest epoch of a Lease that is created after an earlier one was seen
}

// Get records the holder of the Lease. A candidate recognises a renewal by a change of the returned bytes, and counts the
// duration of the Lease from then. The bytes of client-go have whole seconds, which hide all but one renewal within a second.
func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	if err != nil {
		return nil, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder, l.epoch = record.HolderIdentity, int64(record.LeaderTransitions)
	return record, record.RenewTime.AppendFormat(raw, time.RFC3339Nano), nil
}

// Create creates the Lease. If this process has seen an earlier one, its epoch continues from there.
func (l *lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.mu.Lock()
	if l.holder != "" || l.epoch > 0 {
		l.floor = int(l.epoch) + 1
	}
	l.mu.Unlock()
	return l.write(ctx, record, l.Interface.Create)
}

// Update renews the Lease, takes it over, or gives it back.
func (l *lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Update)
}

// write records until when the Lease is held, counted from the start of the write. Other candidates count from when they see
// the write, which is later.
func (l *lock) write(ctx context.Context, record resourcelock.LeaderElectionRecord, send func(context.Context, resourcelock.LeaderElectionRecord) error) error {
	began := time.Now()
	l.mu.Lock()
	record.LeaderTransitions = max(record.LeaderTransitions, l.floor)
	if record.HolderIdentity != l.Identity() {
		l.until = time.Time{} // the Lease is being given back
	}
	l.mu.Unlock()
	if err := send(ctx, record); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder, l.epoch = record.HolderIdentity, int64(record.LeaderTransitions)
	if record.HolderIdentity == l.Identity() {
		l.until = began.Add(l.duration)
	}
	return nil
}

func (l *lock) isHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.until)
}

func (l *lock) term() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epoch
}
