// Package portmap allocates ports of shared addresses. Several Services share the addresses of one L2 port, as long as no two
// of them use the same protocol and port number at one address, and they are of one namespace or have the same sharing key.
package portmap

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
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

// Address is an address at the gateways of a group. Other groups may have the same address for something else.
type Address struct {
	Group string
	Addr  netip.Addr
}

// Claim is the demand of a Service, with the L2 port that it records.
type Claim struct {
	// Service is its UID.
	Service string
	// Namespace is that of the Service. Services of two namespaces share an address if both have the same Sharing key.
	Namespace, Sharing string
	// Created orders Services by age. Confirmed ones, which are known to have what they claim, come first.
	Created   time.Time
	Confirmed bool
	L4        []L4
	// Port is the id of the L2 port in the Service's annotation, "" for none. Of are its addresses, and At those of them that
	// the Service uses.
	Port   string
	Of, At []Address
}

// ErrCollision means that another Service uses a port of an address, or that the address belongs to another L2 port.
var ErrCollision = errors.New("another Service uses it")

// ErrForeign means that Services of another namespace have the address, and do not share it with this one.
var ErrForeign = errors.New("another namespace has it")

// Allocations records which Service uses which ports of which address. The zero value is empty. It is for one goroutine.
type Allocations struct {
	holders map[Address]*holders
	claims  map[string]Claim // by Service: its claim to an L2 port
}

// holders are the Services at an address. It belongs to one L2 port, however its id is spelled.
type holders struct {
	port     string
	services map[string]bool // those of the L2 port
	l4       map[L4]string   // those that use the address, by port and protocol
}

// Restore rebuilds the allocations from the Services' annotations. It also returns the claims that collide with another
// Service, which need a new L2 port. Of two colliding Services the one that has the port keeps it, or else the older one, so
// every restart comes to the same result.
func Restore(claims []Claim) (m *Allocations, collided []Claim) {
	claims = slices.Clone(claims)
	slices.SortFunc(claims, func(a, b Claim) int {
		if a.Confirmed != b.Confirmed {
			if a.Confirmed {
				return -1
			}
			return 1
		}
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

// Collision returns why Take would fail, nil if it would not: ErrCollision or ErrForeign.
func (m *Allocations) Collision(c Claim) error {
	for _, a := range c.Of {
		at := m.holders[a]
		if at != nil && at.port != c.Port && (len(at.services) > 1 || !at.services[c.Service]) {
			return fmt.Errorf("%s of port %s: %w as an address of port %s", a.Addr, c.Port, ErrCollision, at.port)
		}
		if at != nil && !m.stays(c) && m.foreign(c, at) {
			return fmt.Errorf("%s: %w", a.Addr, ErrForeign)
		}
	}
	for _, a := range c.At {
		for _, l := range c.L4 {
			if by := m.holder(a, l); by != "" && by != c.Service {
				return fmt.Errorf("%s at %s: %w: %s", l, a.Addr, ErrCollision, by)
			}
		}
	}
	return nil
}

// stays reports whether a Service already has the L2 port that it claims. A Service that withdraws its sharing key moves
// neither itself nor the others: it only keeps newcomers away.
func (m *Allocations) stays(c Claim) bool { return c.Confirmed || m.claims[c.Service].Port == c.Port }

// foreign reports whether any Service at an address does not share it with the claimant.
func (m *Allocations) foreign(c Claim, at *holders) bool {
	for service := range at.services {
		o := m.claims[service]
		if o.Namespace != c.Namespace && (c.Sharing == "" || o.Sharing != c.Sharing) {
			return true
		}
	}
	return false
}

// holder returns the Service that uses a port of an address, "" for none.
func (m *Allocations) holder(a Address, l L4) string {
	if at := m.holders[a]; at != nil {
		return at.l4[l]
	}
	return ""
}

// Take allocates the ports of a claim at its addresses and releases the previous ones of the Service. After an error, that of
// Collision, nothing changes.
func (m *Allocations) Take(c Claim) error {
	if err := m.Collision(c); err != nil {
		return err
	}
	m.Release(c.Service)
	if m.holders == nil {
		m.holders, m.claims = map[Address]*holders{}, map[string]Claim{}
	}
	for _, a := range c.Of {
		if m.holders[a] == nil {
			m.holders[a] = &holders{c.Port, map[string]bool{}, map[L4]string{}}
		}
		m.holders[a].services[c.Service] = true
	}
	for _, a := range c.At {
		for _, l := range c.L4 {
			m.holders[a].l4[l] = c.Service
		}
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
	for _, a := range c.At {
		for _, l := range c.L4 {
			delete(m.holders[a].l4, l)
		}
	}
	for _, a := range c.Of {
		if delete(m.holders[a].services, service); len(m.holders[a].services) == 0 {
			delete(m.holders, a)
		}
	}
}

// Choose returns the first of the claims of a Service, one for each candidate L2 port, without a collision: that to its
// current one if possible, else the first by id, so that every controller chooses the same. It reports false when there is
// none.
func (m *Allocations) Choose(claims []Claim) (c Claim, ok bool) {
	sorted := slices.SortedFunc(slices.Values(claims), func(a, b Claim) int {
		return cmp.Or(m.order(a)-m.order(b), strings.Compare(a.Port, b.Port))
	})
	i := slices.IndexFunc(sorted, func(c Claim) bool { return m.Collision(c) == nil })
	if i < 0 {
		return Claim{}, false
	}
	return sorted[i], true
}

func (m *Allocations) order(c Claim) int {
	if has, ok := m.claims[c.Service]; ok && has.Port == c.Port {
		return 0
	}
	return 1
}

// Port returns the L2 port of a Service, "" for none.
func (m *Allocations) Port(service string) string { return m.claims[service].Port }

// Used reports whether any Service uses an L2 port.
func (m *Allocations) Used(port string) bool {
	for _, c := range m.claims {
		if c.Port == port {
			return true
		}
	}
	return false
}

// Compare orders by number, then by protocol.
func (l L4) Compare(o L4) int {
	return cmp.Or(cmp.Compare(l.Port, o.Port), strings.Compare(l.Protocol, o.Protocol))
}
