package datapath

import (
	"context"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// servedBy is a state with one VIP, 243.0.0.5:80/TCP, and one backend of cluster b at port 8080 of addr.
func servedBy(addr netip.Addr) lb.State {
	s := refusing()
	vip := lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.5:80"), Protocol: clusterset.TCP}
	s.Frontends[vip] = lb.Frontend{ID: 1, Count: 1}
	s.Slots[lb.Slot{Frontend: 1}] = 1
	s.Clusters[1] = "b"
	s.Backends[1] = lb.Backend{Address: lb.Address{AddrPort: netip.AddrPortFrom(addr, 8080), Protocol: clusterset.TCP}, Cluster: 1}
	return s
}

// findingNames returns the names of the current findings.
func findingNames(t *testing.T, d *Datapath) []string {
	t.Helper()
	found, err := d.examine()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range found {
		if f.Message == "" || f.Fix == "" || strings.Contains(f.Message+f.Fix, "\n") {
			t.Errorf("%s does not say what is so and what to do: %+v", f.Name, f)
		}
		names = append(names, f.Name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// setSysctl changes a setting of this network namespace until the test ends.
func setSysctl(t *testing.T, file, value string) {
	t.Helper()
	path := "/proc/sys/net/" + file
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(path, before, 0) }) // the device may be gone
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// Each fault is found when it appears, and no longer once it is fixed.
func TestFindings(t *testing.T) {
	cfg := testConfig(t)
	client, backend, third := newPod(t, 1), newPod(t, 2), newPod(t, 3)
	setSysctl(t, "ipv4/ip_forward", "1")
	setSysctl(t, "ipv4/conf/all/rp_filter", "0")
	for _, p := range []pod{client, backend, third} {
		setSysctl(t, "ipv4/conf/"+p.host.Attrs().Name+"/rp_filter", "0")
	}
	b, err := currentBuild(true)
	if err != nil {
		t.Fatal(err)
	}
	d := openPackets(t, cfg, b)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), servedBy(backend.addr))); err != nil {
		t.Fatal(err)
	}
	await(t, "attached", func() bool { return len(on(d)) == 3 })
	narrow := &netlink.Route{LinkIndex: backend.host.Attrs().Index, Dst: netlink.NewIPNet(backend.addr.AsSlice()), MTU: 1400}
	out := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, MultiPath: []*netlink.NexthopInfo{
		{LinkIndex: backend.host.Attrs().Index, Gw: backend.addr.AsSlice()}, {LinkIndex: third.host.Attrs().Index, Gw: third.addr.AsSlice()},
	}}
	set := func(file, value string) func(t *testing.T) error {
		return func(t *testing.T) error { t.Helper(); setSysctl(t, file, value); return nil }
	}
	refuse := &netlink.Route{Type: unix.RTN_BLACKHOLE, Dst: netlink.NewIPNet(backend.addr.AsSlice())}
	for _, c := range []struct {
		name        string
		fault, mend func(t *testing.T) error
	}{
		{"ip_forward", set("ipv4/ip_forward", "0"), set("ipv4/ip_forward", "1")},
		{"ip_forward", set("ipv4/conf/pod.1/forwarding", "0"), set("ipv4/conf/pod.1/forwarding", "1")},
		{
			"rp_filter", func(t *testing.T) error {
				t.Helper()
				setSysctl(t, "ipv4/conf/pod.3/rp_filter", "1")
				return netlink.RouteAdd(out)
			},
			set("ipv4/conf/pod.3/rp_filter", "2"),
		},
		{"mtu", func(*testing.T) error { return netlink.RouteAdd(narrow) }, func(*testing.T) error { return netlink.RouteDel(narrow) }},
		{"route", func(*testing.T) error { return netlink.RouteAdd(refuse) }, func(*testing.T) error { return netlink.RouteDel(refuse) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			if names := findingNames(t, d); len(names) > 0 {
				t.Fatalf("%v before anything is wrong", names)
			}
			if err := c.fault(t); err != nil {
				t.Fatal(err)
			}
			if names := findingNames(t, d); !slices.Equal(names, []string{c.name}) {
				t.Errorf("found %v, want %s", names, c.name)
			}
			if err := c.mend(t); err != nil {
				t.Fatal(err)
			}
			if names := findingNames(t, d); len(names) > 0 {
				t.Errorf("%v after it was mended", names)
			}
		})
	}
}

// Masquerading of connections to backends is found by its effect, whatever made the rule. Connections to other
// destinations do not count, and neither do rules that were removed.
func TestMasqueradeIsFound(t *testing.T) {
	cfg := testConfig(t)
	client, backend, other := newPod(t, 1), newPod(t, 2), newPod(t, 3)
	setSysctl(t, "ipv4/ip_forward", "1")
	for _, p := range []pod{client, backend, other} {
		if err := p.ns.Route(p.addr.Prev()); err != nil {
			t.Fatal(err)
		}
	}
	d := mustOpen(t, cfg)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), servedBy(backend.addr))); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) {
		t.Helper()
		if output, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, output)
		}
	}
	vip := netip.MustParseAddrPort("243.0.0.5:80")
	for name, c := range map[string]struct{ rule, undo []string }{
		"nftables": {
			[]string{"nft", "table ip cni { chain post { type nat hook postrouting priority srcnat; ip saddr 10.77.1.0/24 masquerade; }; }"},
			[]string{"nft", "delete table ip cni"},
		},
		"iptables": {
			[]string{"iptables", "--table", "nat", "--append", "POSTROUTING", "--source", "10.77.1.0/24", "--jump", "MASQUERADE"},
			[]string{"iptables", "--table", "nat", "--flush", "POSTROUTING"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			run(c.rule...)
			undone := false
			undo := func() {
				if !undone {
					run(c.undo...)
				}
				undone = true
			}
			t.Cleanup(undo)
			if from := client.meets(t, other, netip.AddrPortFrom(other.addr, 8080)); from != other.addr.Prev() {
				t.Errorf("another destination sees %s, want %s: no rule masquerades", from, other.addr.Prev())
			}
			if names := findingNames(t, d); len(names) > 0 {
				t.Errorf("found %v where no backend is concerned", names)
			}
			if from := client.meets(t, backend, vip); from != backend.addr.Prev() {
				t.Errorf("the backend sees %s, want %s: no rule masquerades", from, backend.addr.Prev())
			}
			found, err := d.examine()
			if err != nil || len(found) != 1 || found[0].Name != "masquerade" || !strings.Contains(found[0].Message, "cluster b") ||
				!strings.Contains(found[0].Message, backend.addr.Prev().String()) {
				t.Errorf("found %v, %v, want a masquerade that names cluster b and %s", found, err, backend.addr.Prev())
			}
			undo()
			if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil { // as if all had ended
				t.Fatal(err)
			}
			if from := client.meets(t, backend, vip); from != client.addr {
				t.Errorf("the backend sees %s, want %s", from, client.addr)
			}
			if names := findingNames(t, d); len(names) > 0 {
				t.Errorf("found %v after it was mended", names)
			}
		})
	}
}

// meets connects from p to an address that leads to port 8080 of server, and returns the source that the server sees.
func (p pod) meets(t *testing.T, server pod, to netip.AddrPort) netip.Addr {
	t.Helper()
	config := &net.ListenConfig{}
	config.SetMultipathTCP(false)
	var l net.Listener
	if err := server.ns.Do(func() (err error) {
		l, err = config.Listen(t.Context(), "tcp4", ":8080")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.ns.Do(func() error {
		c, err := new(net.Dialer).DialContext(ctx, "tcp4", to.String())
		if err != nil {
			return err
		}
		return c.Close()
	}); err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	return netip.MustParseAddrPort(in.RemoteAddr().String()).Addr().Unmap()
}

// Findings are cached for a while and returned as copies; new ones are found once the cache expires.
func TestFindingsAreCached(t *testing.T) {
	d := mustOpen(t, testConfig(t))
	ask := func() []Finding {
		t.Helper()
		found, err := d.Findings()
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := ask(); len(found) > 0 {
		t.Fatalf("found %v on a node without backends", found)
	}
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), servedBy(netip.MustParseAddr("192.0.2.1")))); err != nil {
		t.Fatal(err)
	}
	if found := ask(); len(found) > 0 {
		t.Errorf("looked again at once, and found %v", found)
	}
	d.findings.until = time.Now()
	found := ask()
	if len(found) != 1 || found[0].Name != "route" {
		t.Fatalf("found %v, want that there is no route", found)
	}
	found[0].Name = "spoiled"
	if again := ask(); again[0].Name != "route" {
		t.Error("what one caller got is another's to change")
	}
}
