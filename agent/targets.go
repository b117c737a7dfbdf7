package agent

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// targets returns up to limit addresses of ready TCP backends of a member, to be probed. It begins at a random Service.
func (a *Agent) targets(c clusterset.ClusterID, limit int) []netip.AddrPort {
	a.syncing.Lock()
	snap := a.input.Snapshot
	a.syncing.Unlock()
	var found []netip.AddrPort
	if snap == nil || len(snap.Services) == 0 {
		return nil
	}
	first := rand.IntN(len(snap.Services))
	for i := range snap.Services {
		for _, s := range snap.Services[(first+i)%len(snap.Services)].Slices {
			port := slices.IndexFunc(s.Ports, func(p clusterset.EndpointPort) bool { return p.Protocol == clusterset.TCP && p.Port != 0 })
			if s.Cluster != c || port < 0 {
				continue
			}
			for _, e := range s.Endpoints {
				if len(found) == limit {
					return found
				}
				if !e.Ready || len(e.Addrs) == 0 {
					continue
				}
				if to := netip.AddrPortFrom(e.Addrs[0], s.Ports[port].Port); !slices.Contains(found, to) {
					found = append(found, to)
				}
			}
		}
	}
	return found
}
