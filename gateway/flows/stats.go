package flows

import (
	"slices"
	"strings"
)

// Sight is what there is to see of an Exchange. What it counts begins with the process, or with the gateway's coming.
type Stats struct {
	// Mates are the other gateways of the group, by name.
	Peers []PeerStats `json:"peers"`
	// Refused counts requests that were refused here: of strangers, or that could not be read or kept.
	Refused uint64 `json:"refused"`
	// Early counts flows that others told of and whose VIP or backend this gateway does not have yet.
	Pending int `json:"pending"`
}

// MateSight is what there is to see of another gateway.
type PeerStats struct {
	Gateway  string `json:"gateway"`
	URL      string `json:"url"`
	Sent     uint64 `json:"sent"`            // flows that it took
	Received uint64 `json:"received"`        // flows that it told of
	Queued   int    `json:"queued"`          // flows that wait to be sent
	Dropped  uint64 `json:"dropped"`         // flows that found no room to wait; they are told again in time
	Failed   uint64 `json:"failed"`          // requests that it did not take
	Fault    string `json:"fault,omitempty"` // why it did not take the last one
}

// Sight returns what there is to see now.
func (x *Exchange) Stats() Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := Stats{Peers: []PeerStats{}, Refused: x.refused, Pending: len(x.pending)}
	for _, m := range x.peers {
		m.mu.Lock()
		seen := m.stats
		seen.Queued = len(m.queue)
		m.mu.Unlock()
		s.Peers = append(s.Peers, seen)
	}
	slices.SortFunc(s.Peers, func(a, b PeerStats) int { return strings.Compare(a.Gateway+a.URL, b.Gateway+b.URL) })
	return s
}

// note takes note of a request with n flows.
func (m *peer) countSent(n int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.stats.Failed++
		m.stats.Fault = err.Error()
		return
	}
	m.stats.Sent += uint64(n)
	m.stats.Fault = ""
}

// heard takes note of n flows that it told of.
func (m *peer) countReceived(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stats.Received += uint64(n)
}
