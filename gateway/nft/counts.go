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

// Counts returns the connections of each Service: opened ones are those whose events Export received, and active ones those
// that the kernel tracks and that were used here.
func (b *Balancer) Counts() (map[flows.CountKey]flows.Counts, error) {
	var vips []*desired.VIP
	if is := b.state.Load(); is != nil {
		vips = slices.Collect(maps.Values(is.vips))
	}
	return b.tally.Counts(vips, func(each func(flows.CountKey)) error {
		return b.list(func(e entry) {
			if k, ok := b.serviceOf(&e); ok && e.open && e.isLocal() && e.status&statusSeenReply != 0 {
				each(k)
			}
		})
	})
}
