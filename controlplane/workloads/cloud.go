package workloads

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// Cloud lists the servers of one project.
type Cloud interface {
	// Servers returns all servers of the project. It is not called concurrently. After an error the last result stays in
	// effect, and it is called again.
	Servers(ctx context.Context) ([]Server, error)
}

// Server is a virtual machine of a cloud.
type Server struct {
	ID, Name string
	Created  time.Time
	// Running reports whether the cloud expects it to accept new connections.
	Running bool
	// Addrs are the addresses at which others reach it, at most one of each family.
	Addrs []netip.Addr
	// Labels are its metadata, and its tags of the form KEY=VALUE, with slashes in place of colons.
	Labels map[string]string
}

// cloudPoller lists the servers of one cloud periodically, and keeps the last result.
type cloudPoller struct {
	settings CloudSettings
	cloud    Cloud
	changed  func()

	mu    sync.Mutex
	read  bool // the cloud has answered once
	err   error
	last  []Server
	valid map[string]machine // the last valid machine of each server, by id
}

// run lists servers until ctx ends.
func (f *cloudPoller) run(ctx context.Context) {
	tick := time.NewTicker(f.settings.Interval.Duration)
	defer tick.Stop()
	for {
		servers, err := f.cloud.Servers(ctx)
		if ctx.Err() != nil {
			return
		}
		f.mu.Lock()
		if f.err = err; err == nil {
			f.read, f.last = true, servers
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

// machines returns the machines of the servers in the last list, and the problems of some. A server whose labels became
// invalid keeps the Service that it had. ok is false until the cloud has answered.
func (f *cloudPoller) machines() (all []machine, wrong []problem, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.valid
	f.valid = map[string]machine{}
	for _, s := range f.last {
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
		f.valid[s.ID] = m
		all = append(all, m)
	}
	return all, wrong, f.read
}

// CloudState is the state of a cloud.
type CloudState struct {
	Name    string
	Servers int   // that serve Services
	Err     error // of the last request; the result before it stays in effect
}

func (f *cloudPoller) state() CloudState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return CloudState{Name: f.settings.Name, Servers: len(f.valid), Err: f.err}
}
