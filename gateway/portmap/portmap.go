// Package portmap is the book of which Service has which L4 ports of which L2 port: several Services share the addresses of
// one L2 port while no two of them want the same protocol and port number there.
package portmap

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// L4 is what a Service listens on. TCP 53 and UDP 53 are two.
type L4 struct {
	Protocol string // as in a Service: TCP, UDP or SCTP
	Port     uint16
}

func (l L4) String() string { return fmt.Sprintf("%d/%s", l.Port, l.Protocol) }

// Claim is what a Service wants, and what it says that it has.
type Claim struct {
	// Service is its UID.
	Service string
	// Created tells older Services from younger ones.
	Created time.Time
	L4      []L4
	// Port is the L2 port by the Service's annotation, "" for none.
	Port string
}

// ErrCollision means that another Service has one of the L4 ports.
var ErrCollision = errors.New("another Service has it")

// Map is the book. The zero value is an empty one. It is for one goroutine.
type Allocations struct {
	holders map[string]map[L4]string // by L2 port: the Service that has an L4 port there
	claims  map[string]Claim         // by Service, those that have an L2 port
}

// Restore returns the book that annotations tell, and the claims that it cannot hold, which are to be mapped anew: what
// they want is another Service's. Of two Services the older one keeps its place, so that every restart comes to the
// same end.
func Restore(claims []Claim) (m *Allocations, anew []Claim) {
	claims = slices.Clone(claims)
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Service, b.Service))
	})
	m = new(Allocations)
	for _, c := range claims {
		if c.Port == "" || m.Take(c) != nil {
			anew = append(anew, c)
		}
	}
	return m, anew
}

// Take lets a Service have its L4 ports at its L2 port, and gives back what it had before, here or elsewhere. Where one is
// another Service's the error is ErrCollision and names it, and all stays as it was.
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

// Release gives back all that a Service has.
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

// Choose returns the L2 port of candidates at which a Service can have its L4 ports: the one it has, if that is among
// them, else the first by id, so that all who know the same choose the same. It reports false when there is none.
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

// Port returns the L2 port that a Service has, "" when it has none.
func (m *Allocations) Port(service string) string { return m.claims[service].Port }

// Used reports whether any Service has a part of an L2 port.
func (m *Allocations) Used(port string) bool { return len(m.holders[port]) > 0 }

// Compare sorts by number, then by protocol.
func (l L4) Compare(o L4) int {
	return cmp.Or(cmp.Compare(l.Port, o.Port), strings.Compare(l.Protocol, o.Protocol))
}
