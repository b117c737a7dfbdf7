package netlab

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
)

// TestFreePorts verifies that the ports differ, can be used over UDP and TCP, and are never assigned by the kernel.
func TestFreePorts(t *testing.T) {
	ports, err := FreePorts(50)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Fatal(err)
	}
	var first, last uint16
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		t.Fatal(err)
	}
	seen := map[netip.AddrPort]bool{}
	for _, p := range ports {
		if seen[p] || p.Port() >= first && p.Port() <= last {
			t.Errorf("port %d is there twice, or of %d to %d", p.Port(), first, last)
		}
		seen[p] = true
		tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(p))
		if err != nil {
			t.Fatal(err)
		}
		defer tcp.Close()
		udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(p))
		if err != nil {
			t.Fatal(err)
		}
		defer udp.Close()
	}
	if len(seen) != 50 {
		t.Errorf("%d ports, want 50", len(seen))
	}
}
