package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
)

// Addresses of a group. The servers are one machine behind the router, which has all of their addresses.
var (
	clients    = netip.MustParsePrefix("10.98.0.0/24") // those of package edge
	trunk      = [2]netip.Prefix{netip.MustParsePrefix("10.96.0.1/30"), netip.MustParsePrefix("10.96.0.2/30")}
	serverNet  = netip.MustParsePrefix("10.96.1.0/24")
	keptVIP    = netip.MustParseAddr("203.0.113.10") // servers see the client's address
	snatVIP    = netip.MustParseAddr("203.0.113.11") // servers see the VIP
	fillerVIPs = netip.MustParseAddr("198.18.0.0")   // and the following addresses
	fillerPods = netip.MustParseAddr("100.64.0.0")   // their pods, which nobody asks
	sparePods  = netip.MustParseAddr("100.127.0.0")  // those that changes bring
)

const (
	agentPort = 9479
	// wayBack is the router's table for packets from servers to clients.
	wayBack     = 100
	serverCount = 10
)

// programs are the compiled programs of a group, with certificates.
type programs struct {
	dir   string
	certs certs.Folder
}

func gatewayName(i int) string { return fmt.Sprintf("gateway-%d", i+1) }

// newPrograms compiles the gateway into dir, and creates certificates there.
func newPrograms(ctx context.Context, dir string) (*programs, error) {
	if err := build(ctx, "github.com/isthmus-net/isthmus/cmd/isthmus-gateway", filepath.Join(dir, "isthmus-gateway")); err != nil {
		return nil, err
	}
	p := &programs{dir: dir, certs: certs.Folder{Path: filepath.Join(dir, "certs")}}
	order := certs.Order{Identities: []string{certs.Controller}, Life: 24 * time.Hour}
	for i := range edge.Gateways {
		order.Identities = append(order.Identities, gatewayName(i))
	}
	_, err := p.certs.Update(order, time.Now())
	return p, err
}

// shape is what a group is like.
type shape struct {
	gateways int
	equal    bool // all serve at once; else the first one that can
}

// pair is a gateway and its stand-by.
var pair = shape{gateways: 2}

// group is an edge with complete gateways, as on machines of their own. This process is their controller. The router
// sends packets from servers to clients through the gateways with keptVIP.
type group struct {
	*edge.Lab
	*programs
	shape
	balancer   desired.Balancer
	router     *frr.Router
	servers    *netlab.Namespace
	agents     []*gateways.Process
	folders    []string // files of the agents
	controller []*gateways.Client
	sent       []*desired.Request // the last request of each gateway
	generation uint64
	undo       []func() error
}

// newGroup starts a group whose gateways have no state yet.
func newGroup(ctx context.Context, p *programs, balancer desired.Balancer, like shape) (_ *group, err error) {
	g := &group{
		programs: p, shape: like, balancer: balancer,
		agents: make([]*gateways.Process, like.gateways), folders: make([]string, like.gateways), controller: make([]*gateways.Client, like.gateways),
		sent: make([]*desired.Request, like.gateways),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	if g.Lab, err = edge.NewWith(like.gateways); err != nil {
		return nil, err
	}
	g.undo = append(g.undo, g.Close)
	if err := g.joinServers(); err != nil {
		return nil, err
	}
	cfg := frr.Config{ASN: routerASN, RouterID: edge.Router[0], Followers: []frr.Follower{{To: clients, VIP: keptVIP, Table: wayBack}}}
	if like.equal {
		cfg.Paths = like.gateways
	}
	for i := range g.Gateways {
		cfg.Peers = append(cfg.Peers, frr.Peer{Addr: edge.Gateways[i][0], ASN: gatewayASN, BFDMillis: millis})
	}
	if g.router, err = frr.Start(ctx, g.Router, cfg); err != nil {
		return nil, err
	}
	g.undo = append(g.undo, g.router.Close)
	for i := range g.agents {
		if err := errors.Join(g.prepare(i), g.start(ctx, i)); err != nil {
			return nil, err
		}
	}
	return g, nil
}

func (g *group) close() error {
	var errs []error
	for _, undo := range slices.Backward(g.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// joinServers connects the servers behind the router.
func (g *group) joinServers() (err error) {
	if g.servers, err = netlab.NewNamespace(); err != nil {
		return err
	}
	g.undo = append(g.undo, g.servers.Close)
	err = errors.Join(g.Router.Connect(g.servers, trunk[0], trunk[1]), g.Router.RouteTo(serverNet, trunk[1].Addr()), g.servers.Route(trunk[0].Addr()))
	for n := range serverCount {
		err = errors.Join(err, g.servers.Own(serverAddr(n)))
	}
	back := netlink.NewRule()
	back.IifName, back.Table = netlab.DeviceName(trunk[0]), wayBack
	return errors.Join(err, g.Router.Do(func() error {
		// By addresses and ports, so that both directions of a connection may take different ways.
		return errors.Join(netlink.RuleAdd(back), os.WriteFile("/proc/sys/net/ipv4/fib_multipath_hash_policy", []byte("1"), 0))
	}))
}

// serverAddr returns the address of a server, from 0 on.
func serverAddr(n int) netip.Addr {
	a := serverNet.Addr().As4()
	a[3] = byte(n + 1)
	return netip.AddrFrom4(a)
}

// prepare creates what a gateway's agent and its controller need.
func (g *group) prepare(i int) (err error) {
	if g.folders[i], err = os.MkdirTemp(g.dir, gatewayName(i)+"-"); err != nil {
		return err
	}
	if g.balancer == desired.EBPF {
		if err := os.Mkdir(g.bpffs(i), 0o700); err != nil {
			return err
		}
		unmount, err := netlab.MountBPFFS(g.bpffs(i))
		if err != nil {
			return err
		}
		g.undo = append(g.undo, func() error { return errors.Join(ebpf.Remove(g.bpffs(i)), unmount()) })
	}
	own, err := certs.Open(g.certs.Files(certs.Controller), slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	g.controller[i] = gateways.NewClient(g.Router, own, gatewayName(i), g.endpoint(i), timeout)
	g.undo = append(g.undo, func() error {
		g.controller[i].Close()
		if g.agents[i] == nil {
			return nil
		}
		return g.agents[i].Kill()
	})
	return nil
}

func (g *group) bpffs(i int) string { return filepath.Join(g.folders[i], "bpf") }

func (g *group) program() string { return filepath.Join(g.dir, "isthmus-gateway") }

// start starts or restarts a gateway's agent, and returns when it answers.
func (g *group) start(ctx context.Context, i int) (err error) {
	files, folder := g.certs.Files(gatewayName(i)), g.folders[i]
	args := []string{
		"run", "--cluster", "bench", "--balancer", string(g.balancer), "--listen", g.endpoint(i),
		"--ca", files.CA, "--cert", files.Cert, "--key", files.Key, "--state-dir", folder, "--run-dir", folder,
	}
	if g.balancer == desired.EBPF {
		args = append(args, "--bpffs", g.bpffs(i), "--flows", strconv.Itoa(gateways.Connections))
	}
	if g.agents[i], err = gateways.Start(ctx, g.Gateways[i], filepath.Join(folder, "log"), g.program(), args...); err != nil {
		return err
	}
	return await(ctx, func() (string, error) {
		if !g.agents[i].Runs() {
			return "", fmt.Errorf("%s has ended:\n%s", gatewayName(i), g.agents[i].Log())
		}
		return missing(g.controller[i].Ask(ctx, http.MethodGet, "/v1/state", nil, new(desired.Status))), nil
	})
}

func (*group) endpoint(i int) string {
	return netip.AddrPortFrom(edge.Gateways[i][0], agentPort).String()
}

// reconfigure applies VIPs to a gateway, and returns the time from the state to the answer.
func (g *group) reconfigure(ctx context.Context, i int, vips []desired.VIP) (time.Duration, error) {
	return g.apply(ctx, i, vips, false)
}

// apply is reconfigure for a gateway that may be cordoned.
func (g *group) apply(ctx context.Context, i int, vips []desired.VIP, cordoned bool) (time.Duration, error) {
	g.generation++
	s := desired.State{Cluster: "bench", Group: "bench", Balancer: g.balancer, VIPs: vips, BGP: speaker(i), Cordoned: cordoned}
	if g.equal {
		s.BGP.MED = nil
	}
	var others []string
	for o := range g.agents {
		if o != i {
			others = append(others, gatewayName(o))
			s.Peers = append(s.Peers, desired.PeerGateway{URL: "https://" + g.endpoint(o), Name: gatewayName(o), Address: edge.Gateways[o][0]})
		}
	}
	s.Slots = desired.Slots(gatewayName(i), others)
	begin := time.Now()
	request := g.sent[i].Next(g.generation, s) // as the controller does
	g.sent[i] = &request
	var answer desired.Status
	if err := g.controller[i].Ask(ctx, http.MethodPost, "/v1/reconfigure", request.JSON(), &answer); err != nil {
		return 0, err
	}
	took := time.Since(begin)
	if len(answer.Refused) > 0 {
		return 0, fmt.Errorf("%s refuses %d Services: %v", gatewayName(i), len(answer.Refused), answer.Refused[0])
	}
	return took, nil
}

// reconfigureAll applies VIPs to all gateways.
func (g *group) reconfigureAll(ctx context.Context, vips []desired.VIP) error {
	for i := range g.agents {
		if _, err := g.reconfigure(ctx, i, vips); err != nil {
			return err
		}
	}
	return nil
}

// awaitBestRoute waits until the router sends all packets to VIPs through a gateway, and not by a stale route.
func (g *group) awaitBestRoute(ctx context.Context, gateway int) error {
	if err := g.hasRoutes(ctx, gateway, "the router does not lead %s through %s", func(r frr.Route) bool { return r.Best }); err != nil {
		return err
	}
	return await(ctx, func() (text string, err error) { // the kernel applies a route a moment after FRR reports it
		err = g.Router.Do(func() error {
			for _, w := range ways {
				routes, err := netlink.RouteGet(w.vip.AsSlice())
				if err != nil || len(routes) != 1 || !routes[0].Gw.Equal(edge.Gateways[gateway][0].AsSlice()) {
					text = fmt.Sprintf("the router's kernel does not lead %s through %s: %v, %v", w.vip, gatewayName(gateway), routes, err)
				}
			}
			return nil
		})
		return text, err
	})
}

// awaitRoute waits until the router has a route through a gateway.
func (g *group) awaitRoute(ctx context.Context, gateway int) error {
	return g.hasRoutes(ctx, gateway, "the router has no route to %s through %s", func(frr.Route) bool { return true })
}

func (g *group) hasRoutes(ctx context.Context, gateway int, otherwise string, is func(frr.Route) bool) error {
	return await(ctx, func() (string, error) {
		for _, w := range ways {
			routes, err := g.router.Routes(ctx, w.vip)
			if err != nil {
				return "", err
			}
			if !slices.ContainsFunc(routes, func(r frr.Route) bool { return is(r) && !r.Stale && r.From == edge.Gateways[gateway][0] }) {
				return fmt.Sprintf(otherwise, w.vip, gatewayName(gateway)), nil
			}
		}
		return "", nil
	})
}

// frontend returns a TCP frontend with servers by number.
func frontend(numbers ...int) []desired.Frontend {
	f := desired.Frontend{Service: "bench/web", Protocol: "TCP", Port: served}
	for _, n := range numbers {
		f.Backends = append(f.Backends, desired.Backend{Addr: serverAddr(n), Port: served, Weight: 1})
	}
	return []desired.Frontend{f}
}
