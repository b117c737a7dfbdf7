package flows

import (
	"slices"
	"strings"
)

// Stats describe an Exchange. Counters start with the process, or when the peer is added.
type Stats struct {
	// Peers are the other gateways of the group, by name.
	Peers []PeerStats `json:"peers"`
	// Refused counts requests refused here: from clients outside the group, or with flows that could not be read or
	// imported.
	Refused uint64 `json:"refused"`
	// Pending counts flows of peers that wait for their VIP or backend on this gateway.
	Pending int `json:"pending"`
}

// PeerStats describe the exchange with one peer.
type PeerStats struct {
	Gateway  string `json:"gateway"`
	URL      string `json:"url"`
	Sent     uint64 `json:"sent"`            // flows that the peer accepted
	Received uint64 `json:"received"`        // flows that the peer sent
	Queued   int    `json:"queued"`          // flows that wait to be sent
	Dropped  uint64 `json:"dropped"`         // flows dropped because the queue was full; the next full export sends them
	Failed   uint64 `json:"failed"`          // requests that the peer did not accept
	Fault    string `json:"fault,omitempty"` // error of the last request
}

// Stats returns the current statistics.
func (x *Exchange) Stats() Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := Stats{Peers: []PeerStats{}, Refused: x.refused, Pending: len(x.pending)}
	for _, p := range x.peers {
		p.mu.Lock()
		seen := p.stats
		seen.Queued = p.queued()
		p.mu.Unlock()
		s.Peers = append(s.Peers, seen)
	}
	slices.SortFunc(s.Peers, func(a, b PeerStats) int { return strings.Compare(a.Gateway+a.URL, b.Gateway+b.URL) })
	return s
}

// countRefused counts a request, or a stream that ends early.
func (x *Exchange) countRefused() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.refused++
}

// countSent counts n flows that the peer has accepted, or an attempt that failed.
func (p *peer) countSent(n int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.stats.Failed++
		p.stats.Fault = err.Error()
		return
	}
	p.stats.Sent += uint64(n)
	p.stats.Fault = ""
}

// countReceived counts n flows that the peer sent.
func (p *peer) countReceived(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stats.Received += uint64(n)
}
