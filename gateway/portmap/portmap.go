// Package portmap allocates L4 ports of shared addresses. Several Services share the addresses of one L2 port, as long as
// no two of them use the same protocol and port number there.
package portmap

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// L4 is a protocol and port of a Service. TCP 53 and UDP 53 are two.
type L4 struct {
	Protocol string // as in a Service: TCP, UDP or SCTP
	Port     uint16
}

func (l L4) String() string { return fmt.Sprintf("%d/%s", l.Port, l.Protocol) }

// Claim is the demand of a Service, with the L2 port that it records.
type Claim struct {
	// Service is its UID.
	Service string
	// Created orders Services by age.
	Created time.Time
	L4      []L4
	// Port is the L2 port in the Service's annotation, "" for none.
	Port string
}

// ErrCollision means that another Service uses one of the L4 ports.
var ErrCollision = errors.New("another Service uses it")

// Allocations records which Service uses which L4 ports of which L2 port. The zero value is empty. It is for one
// goroutine.
type Allocations struct {
	holders map[string]map[L4]string // by L2 port and L4 port: the Service that uses it
	claims  map[string]Claim         // by Service: its claim to an L2 port
}

// Restore rebuilds the allocations from the Services' annotations. It also returns the claims that collide with another
// Service, which need a new L2 port. Of two colliding Services the older one keeps its port, so every restart comes to
// the same result.
func Restore(claims []Claim) (m *Allocations, collided []Claim) {
	claims = slices.Clone(claims)
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Service, b.Service))
	})
	m = new(Allocations)
	for _, c := range claims {
		if c.Port == "" || m.Take(c) != nil {
			collided = append(collided, c)
		}
	}
	return m, collided
}

// Take allocates the L4 ports of a claim at its L2 port and releases the previous ones of the Service. If another Service
// uses one of them, the error is ErrCollision with its name, and nothing changes.
func (m *Allocations) Take(c Claim) error {
	for _, l := range c.L4 {
		if by, ok := m.holders[c.Port][l]; ok && by != c.Service {
			return fmt.Errorf("%s at port %s: %w: %s", l, c.Port, ErrCollision, by)
		}
	}
	m.Release(c.Service)
	if m.holders == nil {
		m.holders, m.claims = map[string]map[L4]string{}, map[string]Claim{}
	}
	at := m.holders[c.Port]
	if at == nil {
		at = map[L4]string{}
		m.holders[c.Port] = at
	}
	for _, l := range c.L4 {
		at[l] = c.Service
	}
	m.claims[c.Service] = c
	return nil
}

// Release frees everything that a Service uses.
func (m *Allocations) Release(service string) {
	c, ok := m.claims[service]
	if !ok {
		return
	}
	delete(m.claims, service)
	for _, l := range c.L4 {
		delete(m.holders[c.Port], l)
	}
	if len(m.holders[c.Port]) == 0 {
		delete(m.holders, c.Port)
	}
}

// Choose returns the candidate L2 port at which all L4 ports of a claim are free: the current one if possible, else the
// first by id, so that every controller chooses the same. It reports false when there is none.
func (m *Allocations) Choose(c Claim, candidates []string) (port string, ok bool) {
	sorted := slices.Sorted(slices.Values(candidates))
	if has, ok := m.claims[c.Service]; ok && slices.Contains(sorted, has.Port) {
		sorted = slices.Insert(sorted, 0, has.Port)
	}
	for _, port := range sorted {
		if m.fits(c, port) {
			return port, true
		}
	}
	return "", false
}

func (m *Allocations) fits(c Claim, port string) bool {
	return !slices.ContainsFunc(c.L4, func(l L4) bool {
		by, taken := m.holders[port][l]
		return taken && by != c.Service
	})
}

// Port returns the L2 port of a Service, "" for none.
func (m *Allocations) Port(service string) string { return m.claims[service].Port }

// Used reports whether any Service uses an L2 port.
func (m *Allocations) Used(port string) bool { return len(m.holders[port]) > 0 }

// Compare orders by number, then by protocol.
func (l L4) Compare(o L4) int {
	return cmp.Or(cmp.Compare(l.Port, o.Port), strings.Compare(l.Protocol, o.Protocol))
}
