// Package flows is what gateways of a group tell one another: which connections they have, so that when one dies the others
// go on with them, whatever has become of the backends since they began.
package flows

import (
	"fmt"
	"net/netip"
)

// Flow is a connection through a gateway, or what UDP has in its place.
type Flow struct {
	Protocol string         `json:"protocol"` // TCP or UDP
	Client   netip.AddrPort `json:"client"`
	VIP      netip.AddrPort `json:"vip"`
	Backend  netip.AddrPort `json:"backend"`
	// Source is what the backend takes for the client: the client itself, but perhaps with another port, or the VIP with
	// a port that stands for the client.
	Source netip.AddrPort `json:"source"`
}

func (f Flow) String() string {
	return fmt.Sprintf("%s %s -> %s: %s -> %s", f.Protocol, f.Client, f.VIP, f.Source, f.Backend)
}
