package ebpf

import (
	"errors"
	"fmt"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// servicesOf returns the Services of a state by frontend id, as flows and refusals have it.
func (b *Balancer) servicesOf(s *desired.State) map[uint32]flows.CountKey {
	services := map[uint32]flows.CountKey{}
	for i := range s.VIPs {
		v := &s.VIPs[i]
		for j := range v.Frontends {
			f := &v.Frontends[j]
			services[b.have.frontends[keyOf(v, f)].Id] = flows.CountKey{Service: f.Service, Protocol: f.Protocol}
		}
	}
	return services
}

// countOpened counts a flow that the program announced, unless only its backend has spoken here.
func (b *Balancer) countOpened(o *bpf.GatewayOpened) {
	b.mu.Lock()
	of, ok := b.services[o.Conn.Service]
	b.mu.Unlock()
	if ok && bpf.ConnState(o.Conn.State) == bpf.ConnOpen {
		b.tally.Open(of)
	}
}

// forwarded returns what the programs have forwarded of a frontend, since its map exists.
func (b *Balancer) forwarded(id uint32) (sum flows.Traffic, err error) {
	var each []bpf.GatewayTraffic
	if err := b.k.maps[bpf.MapGatewayTraffic].Lookup(id, &each); err != nil {
		return sum, fmt.Errorf("read the traffic of frontend %d: %w", id, err)
	}
	for _, t := range each {
		sum = sum.Plus(flows.Traffic{
			ToBackends: flows.Sum{Packets: t.ToBackends.Packets, Bytes: t.ToBackends.Bytes},
			ToClients:  flows.Sum{Packets: t.ToClients.Packets, Bytes: t.ToClients.Bytes},
		})
	}
	return sum, nil
}

// counted is what was counted of a frontend, which belongs to a Service.
type counted struct {
	of  flows.CountKey
	sum flows.Traffic
}

// beginToCount reads the present sums of frontends that are new or have another Service than before. Their traffic counts from there,
// because another frontend may have had the id. The caller holds mu.
func (b *Balancer) beginToCount() error {
	for id := range b.counted {
		if _, ok := b.services[id]; !ok {
			delete(b.counted, id)
		}
	}
	for id, of := range b.services {
		if c, ok := b.counted[id]; ok && c.of == of {
			continue
		}
		sum, err := b.forwarded(id)
		if err != nil {
			return err
		}
		b.counted[id] = counted{of, sum}
	}
	return nil
}

// countForwarded counts what was forwarded of each frontend since the last call. The caller holds mu.
func (b *Balancer) countForwarded() error {
	for id, c := range b.counted {
		sum, err := b.forwarded(id)
		if err != nil {
			return err
		}
		b.tally.Forward(c.of, sum.Since(c.sum))
		b.counted[id] = counted{c.of, sum}
	}
	return nil
}

// Counts returns the flows of each Service, and their traffic. Opened flows are those that the program announces to Export, and active
// ones are counted in the maps.
func (b *Balancer) Counts() (map[flows.CountKey]flows.Counts, error) {
	b.mu.Lock()
	services := b.services
	if err := b.countForwarded(); err != nil {
		b.mu.Unlock()
		return nil, err
	}
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
				each(services[c.Service])
			}
			return nil
		}
		return errors.Join(b.eachActive(bpf.MapFlows, count), b.eachActive(bpf.MapUDPFlows, count))
	})
}
