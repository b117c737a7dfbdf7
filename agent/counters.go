package agent

import (
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// counters reads what the programs count.
type counters interface {
	Counters() (map[clusterset.ServiceName]datapath.Counters, error)
	EvictedUDPVIPs() (uint64, error)
	Clusters() (map[clusterset.ClusterID]datapath.Evidence, error)
}

// Counters returns the counters of every Service that has had clients. Clients refused without a Service, or by a
// removed one, count under the zero name. It returns nil after Close.
func (a *Agent) Counters() (map[clusterset.ServiceName]datapath.Counters, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, nil
	}
	return a.counters.Counters()
}

// EvictedUDPVIPs returns how many VIPs of unconnected UDP sockets were evicted for others; 0 after Close.
func (a *Agent) EvictedUDPVIPs() (uint64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return 0, nil
	}
	return a.counters.EvictedUDPVIPs()
}

// Clusters returns what the kernel has seen of each member's packets, nil after Close.
func (a *Agent) Clusters() (map[clusterset.ClusterID]datapath.Evidence, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, nil
	}
	return a.counters.Clusters()
}
