package ebpf

import (
	"errors"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// servicesOf returns the Services of a state by frontend id, as flows and refusals have it.
func (b *Balancer) servicesOf(s *desired.State) map[uint32]string {
	services := map[uint32]string{}
	for i := range s.VIPs {
		v := &s.VIPs[i]
		for j := range v.Frontends {
			f := &v.Frontends[j]
			services[b.have.frontends[keyOf(v, f)].Id] = f.Service
		}
	}
	return services
}

// countOpened counts a flow that the program announced, unless only its backend has spoken here.
func (b *Balancer) countOpened(o *bpf.GatewayOpened) {
	b.mu.Lock()
	service := b.services[o.Conn.Service]
	b.mu.Unlock()
	if service != "" && bpf.ConnState(o.Conn.State) == bpf.ConnOpen {
		b.tally.Open(flows.CountKey{Service: service, Protocol: protocolName(o.Key.Proto)})
	}
}

// Counts returns the flows of each Service. It costs no packet anything: opened flows are those that the program announces
// to Export, and active ones are counted in the maps.
func (b *Balancer) Counts() (map[flows.CountKey]flows.Counts, error) {
	b.mu.Lock()
	services := b.services
	var vips []*desired.VIP
	if b.applied != nil {
		for i := range b.applied.VIPs {
			vips = append(vips, &b.applied.VIPs[i])
		}
	}
	b.mu.Unlock()
	return b.tally.Counts(vips, func(each func(flows.CountKey)) error {
		count := func(key *bpf.GatewayConnKey, c *bpf.GatewayConn) error {
			if key.Reply == 0 && c.Window&bpf.GatewaySecond == 0 { // a flow has one such entry
				each(flows.CountKey{Service: services[c.Service], Protocol: protocolName(key.Proto)})
			}
			return nil
		}
		return errors.Join(b.eachActive(bpf.MapFlows, count), b.eachActive(bpf.MapUDPFlows, count))
	})
}
