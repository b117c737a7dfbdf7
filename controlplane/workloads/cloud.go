package workloads

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// Cloud lists the servers of one project.
type Cloud interface {
	// Servers returns all servers of the project that there are. It is called by one goroutine at a time, and again
	// after an error, with which nothing is known anew.
	Servers(ctx context.Context) ([]Server, error)
}

// Server is a virtual machine of a cloud.
type Server struct {
	ID, Name string
	Created  time.Time
	// Running says whether it takes new connections, as far as the cloud knows.
	Running bool
	// Addrs are where others reach it, of each family one at most; none while it has none.
	Addrs []netip.Addr
	// Labels are its metadata and its tags, those of the form KEY=VALUE, with a slash where they have a colon.
	Labels map[string]string
}

// follower asks one cloud again and again, and remembers what it said last.
type follower struct {
	settings CloudSettings
	cloud    Cloud
	changed  func()

	mu    sync.Mutex
	read  bool // it has answered once
	err   error
	lasts []Server
	good  map[string]machine // what each server was when it last made sense, by id
}

// run asks until ctx ends.
func (f *follower) run(ctx context.Context) {
	tick := time.NewTicker(f.settings.Interval.Duration)
	defer tick.Stop()
	for {
		servers, err := f.cloud.Servers(ctx)
		if ctx.Err() != nil {
			return
		}
		f.mu.Lock()
		if f.err = err; err == nil {
			f.read, f.lasts = true, servers
		}
		f.mu.Unlock()
		f.changed()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// machines returns those that the cloud listed last, and what is wrong with some. One whose labels make no sense any
// more serves what it served before. ok is false while the cloud has never answered.
func (f *follower) machines() (all []machine, wrong []problem, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.good
	f.good = map[string]machine{}
	for _, s := range f.lasts {
		m, asks, err := ofServer(s, f.settings)
		if !asks {
			continue
		}
		if err != nil {
			wrong = append(wrong, problem{m, err.Error()})
			was, known := before[s.ID]
			if !known {
				continue
			}
			was.addrs, was.ready = m.addrs, m.ready
			m = was
		}
		f.good[s.ID] = m
		all = append(all, m)
	}
	return all, wrong, f.read
}

// CloudState is how a cloud looks.
type CloudState struct {
	Name    string
	Servers int   // that stand behind Services
	Err     error // why it was not read when it was last asked; what it said before counts on
}

func (f *follower) state() CloudState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return CloudState{Name: f.settings.Name, Servers: len(f.good), Err: f.err}
}
