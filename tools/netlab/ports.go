package netlab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
)

// FreePorts returns n addresses on loopback without a listener, for UDP and TCP, for programs that need explicit ports.
// The kernel never assigns these ports by itself. If another program takes one first, the program fails to start.
func FreePorts(n int) (free []netip.AddrPort, err error) {
	const from, to = 20000, 30000 // below net.ipv4.ip_local_port_range
	var held []interface{ Close() error }
	defer func() {
		for _, h := range held {
			err = errors.Join(err, h.Close())
		}
	}()
	for range 100 + n {
		if len(free) == n {
			return free, nil
		}
		port := from + rand.IntN(to-from)
		tcp, err := net.ListenTCP("tcp", &net.TCPAddr{Port: port})
		if err != nil {
			continue
		}
		held = append(held, tcp)
		udp, err := net.ListenUDP("udp", &net.UDPAddr{Port: port})
		if err != nil {
			continue
		}
		held = append(held, udp)
		free = append(free, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port)))
	}
	return nil, fmt.Errorf("no port from %d to %d seems free", from, to)
}
