// Package agent makes a gateway do what its controller wants, and nothing else: a state comes in over HTTPS, or from disk when
// the gateway starts, and goes to the parts, which balance and announce. What is wrong goes back, by part and field.
package agent

import (
	"context"
	"net/netip"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Part makes one part of the machine as a state says. One goroutine at a time calls it.
type Part interface {
	// Name is desired.PartBalancer, PartBGP or PartVRRP.
	Name() string
	// Apply makes the machine as s says, all or nothing: on an error, which may be desired.Faults, all is as it was.
	// A state without VIPs, BGP or VRRP is a valid one: then this part is to do nothing. Applying the same state twice
	// changes nothing. A part that starts finds what an earlier process left, and takes it over.
	Apply(ctx context.Context, s *desired.State) error
	// Drift tells what is not as it was applied last, without changing anything; the agent then calls Apply again.
	Drift(ctx context.Context) ([]desired.Fault, error)
	// Close ends it. Without drain traffic is left where it is, as a restart needs; with drain neighbours are told
	// first that this gateway is not to be used any more. The balancer goes on in the kernel either way.
	Close(ctx context.Context, drain bool) error
}

// Announcer is a Part that tells neighbours of VIPs.
type Announcer interface {
	Part
	// Announced returns the VIPs that neighbours are told about now. Any goroutine may call it.
	Announced() []netip.Addr
}
