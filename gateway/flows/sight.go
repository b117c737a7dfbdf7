package flows

import (
	"slices"
	"strings"
)

// Sight is what there is to see of an Exchange. What it counts begins with the process, or with the gateway's coming.
type Sight struct {
	// Mates are the other gateways of the group, by name.
	Mates []MateSight `json:"mates"`
	// Refused counts requests that were refused here: of strangers, or that could not be read or kept.
	Refused uint64 `json:"refused"`
	// Early counts flows that others told of and whose VIP or backend this gateway does not have yet.
	Early int `json:"early"`
}

// MateSight is what there is to see of another gateway.
type MateSight struct {
	Gateway  string `json:"gateway"`
	URL      string `json:"url"`
	Sent     uint64 `json:"sent"`            // flows that it took
	Received uint64 `json:"received"`        // flows that it told of
	Behind   int    `json:"behind"`          // flows that wait to be sent
	LeftOut  uint64 `json:"leftOut"`         // flows that found no room to wait; they are told again in time
	Failed   uint64 `json:"failed"`          // requests that it did not take
	Fault    string `json:"fault,omitempty"` // why it did not take the last one
}

// Sight returns what there is to see now.
func (x *Exchange) Sight() Sight {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := Sight{Mates: []MateSight{}, Refused: x.refused, Early: len(x.early)}
	for _, m := range x.mates {
		m.mu.Lock()
		seen := m.seen
		seen.Behind = len(m.queue)
		m.mu.Unlock()
		s.Mates = append(s.Mates, seen)
	}
	slices.SortFunc(s.Mates, func(a, b MateSight) int { return strings.Compare(a.Gateway+a.URL, b.Gateway+b.URL) })
	return s
}

// note takes note of a request with n flows.
func (m *mate) note(n int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.seen.Failed++
		m.seen.Fault = err.Error()
		return
	}
	m.seen.Sent += uint64(n)
	m.seen.Fault = ""
}

// heard takes note of n flows that it told of.
func (m *mate) heard(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen.Received += uint64(n)
}
