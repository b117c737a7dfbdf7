package l3

import (
	"bufio"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

var (
	outer = netip.MustParseAddr("203.0.113.7")
	inner = netip.MustParseAddr("10.99.0.100")
)

func address(a string) netip.Prefix { return netip.MustParsePrefix(a) }

// A floating IP is translated to its fixed address behind the gateway that may use it, and replies come from the floating IP.
// Without an allowed address pair, neither works.
func TestRouter(t *testing.T) {
	netlab.Privileged(t)
	var spaces [3]*netlab.Namespace
	for i := range spaces {
		ns, err := netlab.NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ns.Close() })
		spaces[i] = ns
	}
	client, router, gateway := spaces[0], spaces[1], spaces[2]
	if err := client.Connect(router, address("198.51.100.2/24"), address("198.51.100.1/24")); err != nil {
		t.Fatal(err)
	}
	if err := client.Route(netip.MustParseAddr("198.51.100.1")); err != nil {
		t.Fatal(err)
	}
	if err := bridged(router, gateway); err != nil {
		t.Fatal(err)
	}
	var said []string
	r := Router{
		Namespace: router, Outside: netlab.DeviceName(address("198.51.100.1/24")), Ports: map[string]string{"port-1": "p0"},
		Report: func(s string) { said = append(said, s) },
	}
	serve(t, gateway, inner)

	may := []netip.Prefix{netip.PrefixFrom(inner, 32), address("10.99.0.11/32")}
	for _, step := range []struct {
		why    string
		state  State
		answer bool
		says   string
	}{
		{"a pair", State{Leads: map[netip.Addr]netip.Addr{outer: inner}, Allowed: map[string][]netip.Prefix{"port-1": may}}, true, "203.0.113.7 leads to 10.99.0.100"},
		{"no pair", State{Refused: map[netip.Addr]netip.Addr{outer: inner}, Allowed: map[string][]netip.Prefix{"port-1": may[1:]}}, false, "leads nowhere"},
		{"translated without a pair", State{Leads: map[netip.Addr]netip.Addr{outer: inner}, Allowed: map[string][]netip.Prefix{"port-1": may[1:]}}, false, "leads to"},
	} {
		if err := r.Apply(t.Context(), step.state); err != nil {
			t.Fatalf("%s: %v", step.why, err)
		}
		if have := answers(t, client, outer); have != step.answer {
			t.Errorf("%s: answered %v, want %v", step.why, have, step.answer)
		}
		if have := said[len(said)-1]; !strings.Contains(have, step.says) {
			t.Errorf("%s: it says %q, want %q", step.why, have, step.says)
		}
	}
	if n, err := r.Dropped(t.Context()); err != nil || n == 0 {
		t.Errorf("%d packets dropped, %v; want those that came from an address without a pair", n, err)
	}
}

// serve runs a server at an address in a namespace.
func serve(t *testing.T, ns *netlab.Namespace, at netip.Addr) {
	t.Helper()
	var l net.Listener
	if err := ns.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(at, 80).String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	netlab.Answer(t, l, func(c net.Conn) { _, _ = c.Write([]byte("here\n")) })
}

// answers reports whether a server answers at an address.
func answers(t *testing.T, from *netlab.Namespace, at netip.Addr) (yes bool) {
	t.Helper()
	if err := from.Do(func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(at, 80).String(), 500*time.Millisecond)
		if err != nil {
			return nil
		}
		defer c.Close()
		line, err := bufio.NewReader(c).ReadString('\n')
		yes = err == nil && line == "here\n"
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return yes
}
