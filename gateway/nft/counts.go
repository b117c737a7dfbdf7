package nft

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// countOpened counts a connection by the event of its first packet after the handshake, or of UDP when it has lasted. Later
// events of TCP have another state. Imported connections do not check windows.
func (b *Balancer) countOpened(e *entry) {
	if k, ok := b.serviceOf(e); ok && e.open && e.status&statusAssured != 0 && (e.original.protocol == unix.IPPROTO_UDP || e.checksWindows) {
		b.tally.Open(k)
	}
}

// serviceOf returns the Service of a connection, if it was translated on its way to a backend.
func (b *Balancer) serviceOf(e *entry) (flows.CountKey, bool) {
	f, ok := e.flow()
	is := b.state.Load()
	if !ok || is == nil {
		return flows.CountKey{}, false
	}
	frontend := is.frontend(f.Protocol, f.VIP)
	if frontend == nil {
		return flows.CountKey{}, false
	}
	return flows.CountKey{Service: frontend.Service, Protocol: frontend.Protocol}, true
}

// countForwarded counts what was forwarded of a connection since the last list, whose counts are in before, and notes it in now. A
// connection that a peer keeps is that peer's to count.
func (b *Balancer) countForwarded(e *entry, of flows.CountKey, before, now map[uint32]flows.Traffic) {
	if e.forwarded == (flows.Traffic{}) || e.isKept() {
		return
	}
	now[e.id] = e.forwarded
	b.tally.Forward(of, e.forwarded.Since(before[e.id]))
}

// Counts returns the connections of each Service, and their traffic: opened ones are those whose events Export received, and active ones
// those that the kernel tracks and that were used here. The kernel remembers the traffic of a connection for as long as it tracks it: ten
// seconds after a reset, two minutes after both sides have closed.
func (b *Balancer) Counts() (map[flows.CountKey]flows.Counts, error) {
	var vips []*desired.VIP
	if is := b.state.Load(); is != nil {
		vips = slices.Collect(maps.Values(is.vips))
	}
	return b.tally.Counts(vips, func(each func(flows.CountKey)) error {
		now := map[uint32]flows.Traffic{}
		err := b.list(func(e entry) {
			k, ok := b.serviceOf(&e)
			if !ok {
				return
			}
			b.countForwarded(&e, k, b.counted, now)
			if e.open && e.isLocal() && e.status&statusSeenReply != 0 {
				each(k)
			}
		})
		if err == nil {
			b.counted = now
		}
		return err
	})
}
