package bystanders

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// answerPort is where every pod answers.
const answerPort = 8080

// protected are addresses of other owners: east's API server and another Service of it, a node, a machine elsewhere. They
// answer on ports 80 and 443, whatever a tenant or a member writes.
var protected = []netip.Addr{
	netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("172.16.101.1"), netip.MustParseAddr("8.8.8.8"),
	netip.MustParseAddr("fd00:96::1"),
}

// makeLocal makes the addresses of pods and of the protected machines local to the test's network namespace and serves them.
// Any port of a pod answers: a member may lie about its own pods, and a client that is refused there is no bystander.
func (w *testbed) makeLocal() {
	w.t.Helper()
	lo, err := netlink.LinkByName("lo")
	w.noError(err)
	var own []netip.Prefix
	for id := range numbers {
		own = append(own, pods(id)...)
	}
	var redirected [2][]string // by family
	for _, p := range own {
		redirected[p.Addr().BitLen()/128] = append(redirected[p.Addr().BitLen()/128], p.String())
	}
	for _, a := range protected {
		own = append(own, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, p := range own {
		dst, err := netlink.ParseIPNet(p.String())
		w.noError(err)
		w.noError(netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST}))
	}
	cmd := exec.CommandContext(w.t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`table inet bystanders {
		chain output {
			type nat hook output priority -100
			ip daddr { %[1]s } meta l4proto tcp redirect to :%[3]d
			ip6 daddr { %[2]s } meta l4proto tcp redirect to :%[3]d
		}
	}`, strings.Join(redirected[0], ", "), strings.Join(redirected[1], ", "), answerPort))
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("nft: %v: %s", err, out)
	}
	for _, port := range []int{answerPort, 80, 443} {
		l, err := new(net.ListenConfig).Listen(w.t.Context(), "tcp", fmt.Sprintf(":%d", port))
		w.noError(err)
		netlab.Answer(w.t, l, func(net.Conn) {})
	}
}

// connector connects to bystanders and protected addresses all the time.
type connector struct {
	mu      sync.Mutex
	targets []netip.AddrPort
	rounds  int // how often all targets have been tried
	fault   error
}

// connect starts the client.
func (w *testbed) connect() {
	w.t.Helper()
	w.client = &connector{}
	for _, b := range w.bystanders {
		for _, vip := range b.vips {
			if !b.elder {
				w.client.targets = append(w.client.targets, netip.AddrPortFrom(vip, 80))
			}
		}
	}
	for _, a := range protected {
		w.client.targets = append(w.client.targets, netip.AddrPortFrom(a, 80), netip.AddrPortFrom(a, 443))
	}
	w.background("client", w.client.run)
}

func (c *connector) run(ctx context.Context) error {
	for ctx.Err() == nil {
		for _, to := range c.targets {
			if !pause(ctx, 3*time.Millisecond) { // a connection occupies a tracker entry for minutes
				return nil
			}
			if err := dial(ctx, to); err != nil && ctx.Err() == nil {
				c.mu.Lock()
				if c.fault == nil {
					c.fault = err
				}
				c.mu.Unlock()
			}
		}
		c.mu.Lock()
		c.rounds++
		c.mu.Unlock()
	}
	return nil
}

// dial connects to an address. A local address either answers at once or refuses.
func dial(ctx context.Context, to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", to.String())
	if err != nil {
		return err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		err = tcp.SetLinger(0)
	}
	return errors.Join(err, conn.Close())
}

// reset forgets the past.
func (c *connector) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rounds, c.fault = 0, nil
}

// tried waits until every target was tried since reset, and returns the first failure.
func (c *connector) tried(ctx context.Context) error {
	return await.Poll(ctx, patience, func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.fault != nil || c.rounds >= 2 { // the first round may have begun before
			return nil
		}
		return errors.New("the client has not tried every target")
	})
}

// failure returns the first failed connection since reset.
func (c *connector) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fault
}
