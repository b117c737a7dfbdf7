package workloads

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Cloud lists the resources of one project.
type Cloud struct {
	Servers Lister
	// LoadBalancers is used only if the settings ask for load balancers.
	LoadBalancers Lister
	// Enforcer is used only if the settings say something of security groups.
	Enforcer Enforcer
}

// Lister lists the servers, or the load balancers, of one project.
type Lister interface {
	// List returns all that can ask for a Service. It is not called concurrently. After an error the last result stays in
	// effect, and it is called again.
	List(ctx context.Context) ([]Resource, error)
}

// Resource is a server or a load balancer of a cloud.
type Resource struct {
	ID, Name string
	Created  time.Time
	// Running reports whether the cloud expects it to accept new connections.
	Running bool
	// Addrs are the addresses at which others reach it, at most one of each family.
	Addrs []netip.Addr
	// Labels are its metadata, and its tags of the form KEY=VALUE, with slashes in place of colons.
	Labels map[string]string
	// Listeners are the ports of a load balancer. A server names its ports by a label.
	Listeners []Listener
}

// Listener is a port of a load balancer.
type Listener struct {
	Name     string // any text
	Port     int
	Protocol string // of its packets, such as TCP
}

// source is where machines come from: the servers of a cloud, or its load balancers. ExternalWorkloads have the zero source.
type source struct {
	cloud         string
	loadBalancers bool
}

// String names the source within the keys of slices. The name of a cloud has no blank, so the names differ.
func (s source) String() string {
	if s.loadBalancers {
		return s.cloud + " " + s.noun()
	}
	return s.cloud
}

// noun names what comes from the source.
func (s source) noun() string {
	switch {
	case s.loadBalancers:
		return "load balancer"
	case s.cloud != "":
		return "server"
	default:
		return "externalworkload"
	}
}

// The labels of an EndpointSlice or ExternalNode that name its source. Those of ExternalWorkloads have neither, and those of servers have
// only the first.
const (
	labelCloud         = "federation.isthmus.dev/cloud"
	labelLoadBalancers = "federation.isthmus.dev/load-balancers"
)

// mark sets the labels of a slice or of an ExternalNode.
func (s source) mark(labels map[string]string) {
	if s.cloud != "" {
		labels[labelCloud] = s.cloud
	}
	if s.loadBalancers {
		labels[labelLoadBalancers] = "true"
	}
}

// sourceOf returns the source of the endpoints in a slice, or of the machine of an ExternalNode.
func sourceOf(o metav1.Object) source {
	return source{cloud: o.GetLabels()[labelCloud], loadBalancers: o.GetLabels()[labelLoadBalancers] != ""}
}

// poller lists the resources of one source periodically, and keeps the last result.
type poller struct {
	source   source
	settings CloudSettings
	lister   Lister
	changed  func()
	log      *slog.Logger

	mu    sync.Mutex
	read  bool // the cloud has answered once
	err   error
	last  []Resource
	valid map[string]machine // the last valid machine of each resource, by id
	known map[string]bool    // the resources of the last list, by id, without those whose labels were never valid
}

// run lists resources until ctx ends.
func (f *poller) run(ctx context.Context) {
	tick := time.NewTicker(f.settings.Interval.Duration)
	defer tick.Stop()
	var told lastError
	for {
		resources, err := f.lister.List(ctx)
		if ctx.Err() != nil {
			return
		}
		f.mu.Lock()
		if f.err = err; err == nil {
			f.read, f.last = true, resources
		}
		f.mu.Unlock()
		f.changed()
		if told.differs(err) {
			f.log.Warn("a cloud cannot be read; its last list stays in effect", "cloud", f.source.cloud, "kind", f.source.noun(), "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// machines returns the machines in the last list, and the problems of some. A resource whose labels became invalid keeps the
// Service that it had. ok is false until the cloud has answered.
func (f *poller) machines() (all []machine, wrong []problem, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.valid
	f.valid, f.known = map[string]machine{}, map[string]bool{}
	for _, r := range f.last {
		m, asks, err := ofResource(r, f.source, f.settings)
		if !asks {
			f.known[r.ID] = true
			continue
		}
		if err != nil {
			wrong = append(wrong, problem{m, err.Error()})
			was, known := before[r.ID]
			if !known {
				continue
			}
			was.addrs, was.ready = m.addrs, m.ready
			m = was
		}
		f.valid[r.ID], f.known[r.ID] = m, true
		all = append(all, m)
	}
	return all, wrong, f.read
}

// CloudState is the state of a cloud.
type CloudState struct {
	Name                   string
	Servers, LoadBalancers int   // that serve Services
	Err                    error // of the last requests; the results before them stay in effect
}

// states returns the states of the clouds of pollers, of which those of one cloud follow each other.
func states(pollers []*poller, enforcements []*enforcement) (all []CloudState) {
	for _, f := range pollers {
		if len(all) == 0 || all[len(all)-1].Name != f.source.cloud {
			all = append(all, CloudState{Name: f.source.cloud})
		}
		f.addTo(&all[len(all)-1])
	}
	for _, e := range enforcements {
		_, err := e.result()
		i := slices.IndexFunc(all, func(s CloudState) bool { return s.Name == e.settings.Name })
		all[i].Err = errors.Join(all[i].Err, err)
	}
	return all
}

// addTo adds the state of a source to that of its cloud.
func (f *poller) addTo(s *CloudState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.source.loadBalancers {
		s.LoadBalancers = len(f.valid)
	} else {
		s.Servers = len(f.valid)
	}
	s.Err = errors.Join(s.Err, f.err)
}
