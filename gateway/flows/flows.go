// Package flows exchanges connections between the gateways of a group. When a gateway dies, its peers continue its
// connections, even if the backends have changed since those began.
package flows

import (
	"fmt"
	"net/netip"
)

// Flow is a TCP connection through a gateway, or a UDP client and port pair.
type Flow struct {
	Protocol string         `json:"protocol"` // TCP or UDP
	Client   netip.AddrPort `json:"client"`
	VIP      netip.AddrPort `json:"vip"`
	Backend  netip.AddrPort `json:"backend"`
	// Source is the address that the backend sees: the client's own, perhaps with another port, or the VIP or the gateway's
	// own address with a port that stands for the client.
	Source netip.AddrPort `json:"source"`
	// HalfOpen means that the sender has seen only packets of the backend. A gateway that has seen only those of the client
	// then knows that the connection is open.
	HalfOpen bool `json:"halfOpen,omitempty"`
	// Resent means that the sender has announced the flow before, and it may have ended since the sender last saw a packet. Any
	// other flow has opened a moment ago.
	Resent bool `json:"resent,omitempty"`
	// Ended means that the sender saw the flow end, so that peers forget it. Without that its port or its client's could be taken again
	// while they know it.
	Ended bool `json:"ended,omitempty"`
	// Gateway is the peer that sent an imported flow.
	Gateway string `json:"-"`
}

// Masqueraded reports whether the backend sees the sender's own address. Only the sender can continue such a flow: its peers hand the
// client's packets over to it.
func (f Flow) Masqueraded() bool {
	return f.Source.Addr() != f.Client.Addr() && f.Source.Addr() != f.VIP.Addr()
}

// Resend returns a function that sends a flow as one that the sender has announced before.
func Resend(send func(Flow) error) func(Flow) error {
	return func(f Flow) error {
		f.Resent = true
		return send(f)
	}
}

func (f Flow) String() string {
	return fmt.Sprintf("%s %s -> %s: %s -> %s", f.Protocol, f.Client, f.VIP, f.Source, f.Backend)
}

// validate checks a flow on its own.
func (f *Flow) validate() error {
	if f.Protocol != "TCP" && f.Protocol != "UDP" {
		return fmt.Errorf("protocol is %q; it can be \"TCP\" or \"UDP\"", f.Protocol)
	}
	four := f.VIP.Addr().Is4()
	for name, a := range map[string]struct{ is4, whole bool }{
		"client":  {f.Client.Addr().Is4(), f.Client.IsValid() && f.Client.Port() > 0},
		"vip":     {four, f.VIP.IsValid() && f.VIP.Port() > 0},
		"backend": {f.Backend.Addr().Is4(), f.Backend.IsValid() && f.Backend.Port() > 0},
		"source":  {f.Source.Addr().Is4(), f.Source.IsValid() && f.Source.Port() > 0},
	} {
		if !a.whole || a.is4 != four {
			return fmt.Errorf("%s is not an address and port of the VIP's family", name)
		}
	}
	return nil
}
