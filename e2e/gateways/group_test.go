package gateways_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
)

// Addresses by family. The servers are one machine behind the router, which has all of their addresses.
var (
	families  = [2]string{"IPv4", "IPv6"}
	clients   = [2]netip.Prefix{netip.MustParsePrefix("10.98.0.0/24"), netip.MustParsePrefix("fd98::/64")} // those of package edge
	trunk     = [2][2]netip.Prefix{pair("10.96.0.1/30", "10.96.0.2/30"), pair("fd96::1/126", "fd96::2/126")}
	serverNet = [2]netip.Prefix{netip.MustParsePrefix("10.96.1.0/24"), netip.MustParsePrefix("fd96:0:0:1::/64")}
	// A VIP that VRRP announces is one of the gateways' network.
	routedVIPs = [2]netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8::10")}
	sharedVIPs = [2]netip.Addr{netip.MustParseAddr("10.99.0.100"), netip.MustParseAddr("fd99::100")}
)

const (
	routerASN, gatewayASN = 65000, 65010
	agentPort             = 9479
	// wayBack is the router's table for packets from servers to clients.
	wayBack = 100
	servers = 8
	// flows is the capacity of an eBPF gateway: more than all connections of a cell. While the kernel makes a table of some 100,000
	// flows, it takes a CPU from everybody for a third of a second on slow machines, and the router, on the same machine, takes all
	// gateways for dead.
	flows = 32768
	// held and asked are the ports of connections that stay open, and of short ones.
	held, asked = 8080, 8081
)

// failureMillis returns the interval of BFD packets and of VRRP's advertisements, of which three may be lost. In make test, other tests may
// keep the machine from sending them in time.
func failureMillis() uint32 {
	if whole {
		return 100
	}
	return 400
}

func pair(a, b string) [2]netip.Prefix {
	return [2]netip.Prefix{netip.MustParsePrefix(a), netip.MustParsePrefix(b)}
}

// server returns the address of a server, from 0 on.
func server(family, n int) netip.Addr {
	b := serverNet[family].Addr().AsSlice()
	b[len(b)-1] = byte(n + 1)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// group is a group of gateways of one cell.
type group struct {
	*edge.Lab
	cell
	t          *testing.T
	servers    *netlab.Namespace
	agents     []*gateways.Process
	folders    []string
	certs      certs.Folder
	controller []*gateways.Client
	generation uint64
}

// newGroup starts the gateways of a cell, with their state, and returns when all serve that ought to.
func newGroup(t *testing.T, c cell) *group {
	t.Helper()
	g := &group{cell: c, t: t, certs: certs.Folder{Path: filepath.Join(t.TempDir(), "certs")}}
	order := certs.Order{Identities: []string{certs.Controller}, Life: 24 * time.Hour}
	for i := range c.announce.gateways {
		order.Identities = append(order.Identities, name(i))
	}
	_, err := g.certs.Update(order, time.Now())
	g.check(err)
	g.Lab, err = edge.NewWith(c.announce.gateways)
	g.check(err)
	t.Cleanup(func() { g.check(g.Close()) })
	g.joinServers()
	g.startRouter()
	for i := range g.Gateways {
		g.prepare(i)
		g.start(i)
	}
	for i := range g.Gateways {
		g.apply(i)
	}
	g.awaitServing(g.announce.serving(g.all())...)
	return g
}

func name(i int) string { return fmt.Sprint("gateway-", i+1) }

func (g *group) check(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

// all returns the numbers of all gateways.
func (g *group) all() (numbers []int) {
	for i := range g.Gateways {
		numbers = append(numbers, i)
	}
	return numbers
}

// joinServers connects the servers behind the router. Their packets to clients go by wayBack.
func (g *group) joinServers() {
	g.t.Helper()
	var err error
	g.servers, err = netlab.NewNamespace()
	g.check(err)
	g.t.Cleanup(func() { g.check(g.servers.Close()) })
	ends := trunk[g.family]
	g.check(errors.Join(g.Router.Connect(g.servers, ends[0], ends[1]), g.Router.RouteTo(serverNet[g.family], ends[1].Addr()), g.servers.Route(ends[0].Addr())))
	for n := range servers {
		g.check(g.servers.Own(server(g.family, n)))
	}
	g.check(g.Router.Do(func() error {
		back := netlink.NewRule()
		back.Family, back.IifName, back.Table = g.netlinkFamily(), netlab.DeviceName(ends[0]), wayBack
		if err := netlink.RuleAdd(back); err != nil {
			return fmt.Errorf("packets of servers: %w", err)
		}
		// By addresses and ports, so that both directions of a connection may take different ways.
		for _, path := range []string{"ipv4", "ipv6"} {
			if err := os.WriteFile("/proc/sys/net/"+path+"/fib_multipath_hash_policy", []byte("1"), 0); err != nil {
				return err
			}
		}
		return nil
	}))
}

func (g *group) netlinkFamily() int { return [2]int{netlink.FAMILY_V4, netlink.FAMILY_V6}[g.family] }

// startRouter makes the router lead packets to the VIP and back through gateways: those that announce it by BGP, or the owner of the
// VIP.
func (g *group) startRouter() {
	g.t.Helper()
	if g.announce.by == desired.ByVRRP {
		to, err := netlink.ParseIPNet(clients[g.family].String())
		g.check(err)
		g.check(g.Router.Do(func() error {
			link, err := netlink.LinkByName("br0")
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{Dst: to, Gw: g.vip().AsSlice(), LinkIndex: link.Attrs().Index, Table: wayBack})
		}))
		return
	}
	cfg := frr.Config{ASN: routerASN, RouterID: edge.Router[0]}
	if g.announce.equal {
		cfg.Paths = len(g.Gateways)
	}
	for i := range g.Gateways {
		cfg.Peers = append(cfg.Peers, frr.Peer{Addr: edge.Gateways[i][g.family], ASN: gatewayASN, BFDMillis: int(failureMillis())})
	}
	router, err := frr.Start(g.t.Context(), g.Router, cfg)
	g.check(err)
	g.t.Cleanup(func() { g.check(router.Close()) })
	g.check(g.followVIP())
}

// followVIP makes packets to clients go where those to the VIP go, at every change until the test ends. A static route through the VIP
// would do, but FRR 8.4 does not always move one of IPv6 along.
func (g *group) followVIP() error {
	to, err := netlink.ParseIPNet(clients[g.family].String())
	if err != nil {
		return err
	}
	changes := make(chan netlink.RouteUpdate, 64)
	done := make(chan struct{})
	if err := g.Router.Do(func() error { return netlink.RouteSubscribe(changes, done) }); err != nil {
		return fmt.Errorf("follow the VIP's route: %w", err)
	}
	g.t.Cleanup(func() { close(done) })
	go func() {
		for c := range changes {
			if c.Table != unix.RT_TABLE_MAIN || c.Dst == nil || !c.Dst.IP.Equal(g.vip().AsSlice()) {
				continue
			}
			routes, err := g.routes()
			if err == nil {
				back := netlink.Route{Dst: to, Table: wayBack, Type: unix.RTN_BLACKHOLE, Priority: 1}
				for _, r := range routes {
					back.Type, back.Gw, back.MultiPath = 0, r.Gw, r.MultiPath
				}
				err = g.Router.Do(func() error { return netlink.RouteReplace(&back) })
			}
			if err != nil {
				g.t.Errorf("the way back does not follow the VIP: %v", err)
			}
		}
	}()
	return nil
}

// routes returns the router's routes to the VIP: one at most, maybe through several gateways.
func (g *group) routes() (routes []netlink.Route, err error) {
	dst, err := netlink.ParseIPNet(netip.PrefixFrom(g.vip(), g.vip().BitLen()).String())
	if err != nil {
		return nil, err
	}
	err = g.Router.Do(func() (err error) {
		routes, err = netlink.RouteListFiltered(g.netlinkFamily(), &netlink.Route{Dst: dst}, netlink.RT_FILTER_DST)
		return err
	})
	return routes, err
}

// vip returns the only VIP.
func (g *group) vip() netip.Addr {
	if g.announce.by == desired.ByVRRP {
		return sharedVIPs[g.family]
	}
	return routedVIPs[g.family]
}

// prepare creates what a gateway's agent and its controller need.
func (g *group) prepare(i int) {
	g.t.Helper()
	g.folders, g.agents, g.controller = append(g.folders, g.t.TempDir()), append(g.agents, nil), append(g.controller, nil)
	if g.balancer == desired.EBPF {
		g.check(os.Mkdir(g.bpffs(i), 0o700))
		unmount, err := netlab.MountBPFFS(g.bpffs(i))
		g.check(err)
		g.t.Cleanup(func() { g.check(errors.Join(ebpf.Remove(g.bpffs(i)), unmount())) })
	}
	own, err := certs.Open(g.certs.Files(certs.Controller), slog.New(slog.DiscardHandler))
	g.check(err)
	g.controller[i] = gateways.NewClient(g.Router, own, name(i), g.endpoint(i), 10*time.Second)
	g.t.Cleanup(func() {
		g.controller[i].Close()
		if g.agents[i] != nil {
			g.check(g.agents[i].Kill())
		}
		g.check(g.Gateways[i].Do(func() error { return vrrp.Cleanup(context.Background(), filepath.Join(g.folders[i], "vrrp")) }))
	})
}

func (g *group) bpffs(i int) string { return filepath.Join(g.folders[i], "bpf") }

// start starts or restarts a gateway's agent, and returns when it answers.
func (g *group) start(i int) {
	g.t.Helper()
	files, folder := g.certs.Files(name(i)), g.folders[i]
	args := []string{
		"run", "--cluster", "e2e", "--balancer", string(g.balancer), "--listen", g.endpoint(i),
		"--ca", files.CA, "--cert", files.Cert, "--key", files.Key, "--state-dir", folder, "--run-dir", folder,
	}
	if g.balancer == desired.EBPF {
		args = append(args, "--bpffs", g.bpffs(i), "--flows", strconv.Itoa(flows))
	}
	var err error
	g.agents[i], err = gateways.Start(g.t.Context(), g.Gateways[i], filepath.Join(folder, "log"), filepath.Join(programs, "isthmus-gateway"), args...)
	g.check(err)
	await.NoError(g.t, name(i)+" answers", func() error {
		if !g.agents[i].Runs() {
			g.t.Fatalf("%s has ended:\n%s", name(i), g.agents[i].Log())
		}
		return g.controller[i].Ask(g.t.Context(), http.MethodGet, "/v1/state", nil, new(desired.Status))
	})
}

// reboot starts a gateway that died, with nothing but the files of its disk.
func (g *group) reboot(i int) {
	g.t.Helper()
	g.check(g.Gateways[i].Do(func() error {
		args := []string{"cleanup", "--run-dir", g.folders[i]}
		if g.balancer == desired.EBPF {
			args = append(args, "--bpffs", g.bpffs(i))
		}
		if said, err := exec.CommandContext(g.t.Context(), filepath.Join(programs, "isthmus-gateway"), args...).CombinedOutput(); err != nil {
			return fmt.Errorf("clean up: %w: %s", err, said)
		}
		return netlink.ConntrackTableFlush(netlink.ConntrackTable)
	}))
	g.check(g.Mend(i))
	g.start(i)
}

func (g *group) endpoint(i int) string {
	return netip.AddrPortFrom(edge.Gateways[i][g.family], agentPort).String()
}

// apply gives a gateway its state.
func (g *group) apply(i int) {
	g.t.Helper()
	g.generation++
	s := desired.State{Cluster: "e2e", Group: "e2e", Balancer: g.balancer, VIPs: []desired.VIP{{Addr: g.vip(), Announce: g.announce.by, Return: g.way}}}
	for _, port := range []uint16{held, asked} {
		f := desired.Frontend{Service: "e2e/web", Protocol: "TCP", Port: port}
		for n := range servers {
			f.Backends = append(f.Backends, desired.Backend{Addr: server(g.family, n), Port: port, Weight: 1})
		}
		s.VIPs[0].Frontends = append(s.VIPs[0].Frontends, f)
	}
	var others []string
	var addrs []netip.Addr // for VRRP
	for o := range g.Gateways {
		if o != i {
			others, addrs = append(others, name(o)), append(addrs, edge.Gateways[o][0])
			s.Peers = append(s.Peers, desired.PeerGateway{URL: "https://" + g.endpoint(o), Name: name(o), Address: edge.Gateways[o][g.family]})
		}
	}
	s.Slots = desired.Slots(name(i), others)
	if g.announce.by == desired.ByVRRP {
		s.VRRP = &desired.VRRP{
			Interface: edge.Device, Source: edge.Gateways[i][0], Peers: addrs, RouterID: 51, Priority: uint8(200 - 50*i), IntervalMillis: failureMillis(),
		}
	} else {
		s.BGP = &desired.BGP{ASN: gatewayASN, RouterID: edge.Gateways[i][0], GracefulRestart: 10, Peers: []desired.Peer{{
			Addr: edge.Router[g.family], ASN: routerASN, BFD: &desired.BFD{IntervalMillis: failureMillis(), Multiplier: 3},
		}}}
		if !g.announce.equal {
			s.BGP.MED = new(uint32(50 * i))
		}
	}
	request := desired.NewRequest(g.generation, s)
	g.check(g.controller[i].Ask(g.t.Context(), http.MethodPost, "/v1/reconfigure", request.JSON(), new(desired.Status)))
}

// awaitServing waits until packets to the VIP go through exactly these gateways.
func (g *group) awaitServing(want ...int) {
	g.t.Helper()
	await.NoError(g.t, fmt.Sprintf("gateways %v serve", want), func() error {
		have, err := g.serving()
		if err == nil && !slices.Equal(have, want) {
			err = fmt.Errorf("gateways %v do", have)
		}
		return err
	})
}

// serving returns the gateways through which the router leads packets to the VIP, sorted.
func (g *group) serving() (have []int, err error) {
	if g.announce.by == desired.ByVRRP {
		for i := range g.Gateways {
			has, err := g.Has(i, g.vip())
			if err != nil {
				return nil, err
			}
			if has {
				have = append(have, i)
			}
		}
		return have, nil
	}
	routes, err := g.routes()
	for i := range g.Gateways {
		if slices.ContainsFunc(routes, func(r netlink.Route) bool { return leadsTo(&r, edge.Gateways[i][g.family]) }) {
			have = append(have, i)
		}
	}
	return have, err
}

// leadsTo reports whether a route leads to a gateway, maybe among others.
func leadsTo(r *netlink.Route, to netip.Addr) bool {
	return r.Gw.Equal(to.AsSlice()) || slices.ContainsFunc(r.MultiPath, func(h *netlink.NexthopInfo) bool { return h.Gw.Equal(to.AsSlice()) })
}
