// Package agent applies the state that the controller wants of a gateway. A state arrives over HTTPS, or is read from disk
// when the gateway starts. The agent gives it to the balancer and the announcers, and reports faults by component and field.
package agent

import (
	"context"
	"net/netip"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Component keeps one aspect of the machine as a state says: the balancer, or an announcer. The agent calls it from one
// goroutine at a time.
type Component interface {
	// Name identifies the component in faults, logs and metrics: desired.ComponentBalancer, or the Announce value of an
	// announcer.
	Name() string
	// Apply makes the machine match s, all or nothing: after an error, which may be desired.Faults, nothing has changed.
	// A state without VIPs, BGP or VRRP is valid, and turns the component off. Applying the same state twice changes
	// nothing. A component that starts takes over what an earlier process left.
	Apply(ctx context.Context, s *desired.State) error
	// Drift compares the machine with the state applied last and changes nothing. The agent then calls Apply again.
	Drift(ctx context.Context) ([]desired.Fault, error)
	// Close stops the component. Without drain, traffic stays where it is, as a restart needs. With drain, neighbours
	// first hear that this gateway leaves. The kernel keeps balancing in both cases.
	Close(ctx context.Context, drain bool) error
}

// Announcer is a Component that announces VIPs to neighbours, such as routers. It announces the VIPs of a state whose
// Announce is its Name.
type Announcer interface {
	Component
	// Announced returns the VIPs that are announced now. Any goroutine may call it.
	Announced() []netip.Addr
}

// components are those of one gateway. A VIP is balanced before the first announcer announces it, and until the last
// one has withdrawn it.
type components struct {
	balancer   Component
	announcers []Announcer
}

// balancerFirst returns all components in the order in which VIPs are added.
func (c components) balancerFirst() []Component {
	all := []Component{c.balancer}
	for _, a := range c.announcers {
		all = append(all, a)
	}
	return all
}

// balancerLast returns all components in the order in which VIPs are removed.
func (c components) balancerLast() []Component {
	all := c.balancerFirst()
	return append(all[1:], all[0])
}
