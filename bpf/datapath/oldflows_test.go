package datapath

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/oldflowstest"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// A connection through the packet path continues when this build replaces one whose flows have no windows. It continues
// after another start too, which no longer needs the older build's map.
func TestConnectionsOfOlderBuild(t *testing.T) {
	n := newPacketNode(t)
	s := n.state()
	s.Backends[1] = lb.Backend{Address: lb.Address{AddrPort: netip.AddrPortFrom(n.server.addr, 8081), Protocol: clusterset.TCP}, Cluster: 1}
	n.echo(t, 8081)
	var c net.Conn
	for _, round := range []string{"older build", "upgrade", "restart"} {
		t.Run(round, func(t *testing.T) {
			b, err := currentBuild(true)
			if err != nil {
				t.Fatal(err)
			}
			d := openPackets(t, n.cfg, b)
			have, err := d.Load(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Apply(t.Context(), lbtest.Diff(have, s)); err != nil {
				t.Fatal(err)
			}
			await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1", "pod.2"}) })
			await(t, "the new programs", func() bool { return runsProgram(t, n.cfg, d, n.client) && runsProgram(t, n.cfg, d, n.server) })
			if c == nil {
				if err := n.client.ns.Do(func() (err error) { c, err = net.DialTimeout("tcp4", "243.0.0.5:80", 2*time.Second); return err }); err != nil {
					t.Fatal(err)
				}
			}
			text := "hello, " + round
			if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
				t.Fatal(err)
			}
			heard := make([]byte, len(text))
			if _, err := fmt.Fprint(c, text); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, heard); err != nil || string(heard) != text {
				t.Fatalf("heard %q: %v", heard, err)
			}
			if round == "older build" {
				if err := oldflowstest.Demote(d.pins.maps()); err != nil {
					t.Fatal(err)
				}
				return
			}
			_, err = os.Stat(d.pins.mapPath(bpf.MapConns))
			if want := round == "upgrade"; (err == nil) != want {
				t.Errorf("the older build's map is pinned: %t, want %t", err == nil, want)
			}
		})
	}
	if c != nil {
		_ = c.Close()
	}
}

// echo serves a port of the server's pod with an echo.
func (n packetNode) echo(t *testing.T, port int) {
	t.Helper()
	var l net.Listener
	if err := n.server.ns.Do(func() (err error) { l, err = net.Listen("tcp4", fmt.Sprint(":", port)); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
}
