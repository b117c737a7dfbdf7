package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	oncpu "github.com/isthmus-net/isthmus/tools/bench/internal/traffic"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/traffic"
)

const (
	// longPhase is a phase in which agents do what a share of their work is: they exchange connections some times in it.
	longPhase = 200 * time.Millisecond
	longTurns = 14
	// Tables of the router: what comes back from servers of VIPs that gateway 0 has alone, and what gateways forward.
	wayBackAlone, forwarded = 101, 102
)

// returns are all return paths.
var returns = []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade}

// activeVIP is a VIP that one gateway has alone, or both.
type activeVIP struct {
	way    desired.Return
	alone  bool
	vip    netip.Addr
	server netip.Addr // its only one: with routed, a backend may serve one frontend
}

// activeVIPs are those of the phase. keptVIP is the one that the way back of all shared ones follows.
func activeVIPs() (all []activeVIP) {
	at := keptVIP
	for _, alone := range []bool{false, true} {
		for _, way := range returns {
			all = append(all, activeVIP{way: way, alone: alone, vip: at, server: serverAddr(len(all))})
			at = at.Next()
		}
	}
	return all
}

// Servers without a VIP, to which the router leads packets through one gateway, or through both.
var onceForwarded, twiceForwarded = serverAddr(8), serverAddr(9)

// effort is what connections to a VIP took.
type effort struct {
	connections, lost int
	cpu               time.Duration // of client, server and the gateways' kernels
	agents            time.Duration // CPU time of the agents
	packets           uint64        // that gateways received
	why               error         // of the last one that was lost
}

func (e *effort) add(o effort) {
	e.connections, e.lost = e.connections+o.connections, e.lost+o.lost
	e.cpu, e.agents, e.packets, e.why = e.cpu+o.cpu, e.agents+o.agents, e.packets+o.packets, cmp.Or(o.why, e.why)
}

func (e *effort) String() string {
	n := max(e.connections, 1)
	return fmt.Sprintf("%s of CPU, %s of agents, %.1f packets, %d of %d lost (%v)", e.perConnection(), e.agents/time.Duration(n), float64(e.packets)/float64(n), e.lost, n, e.why)
}

func (e *effort) perConnection() time.Duration { return e.cpu / time.Duration(max(e.connections, 1)) }

// actives holds the results of one balancer.
type actives struct {
	ratios   map[desired.Return][]float64 // by return path, one a round
	handed   []float64                    // packets handed over for each connection with snat, one a round
	agents   []float64                    // CPU time of all agents for a second of connections, one a round
	all      int
	lost     int
	outages  []time.Duration // of clients whose gateway died
	opened   int
	broken   map[desired.Return]int
	perished int // connections that the dead gateway masqueraded
}

// active measures gateways that serve at once: two against one of them, and the death of one of four.
func active(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	seen := map[desired.Balancer]*actives{}
	for _, b := range balancers {
		seen[b.kind] = &actives{ratios: map[desired.Return][]float64{}, broken: map[desired.Return]int{}}
	}
	if err := eachBalancer(ctx, rounds, progress, func(p *programs, kind desired.Balancer, say func(string, ...any)) error {
		if err := seen[kind].compare(ctx, p, kind, say); err != nil {
			return fmt.Errorf("two and one: %w", err)
		}
		if err := seen[kind].oneOfFour(ctx, p, kind, say); err != nil {
			return fmt.Errorf("one of four: %w", err)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return activeRows(seen), nil
}

// compare connects to VIPs of two gateways and to those of one, in turns.
func (a *actives) compare(ctx context.Context, p *programs, balancer desired.Balancer, say func(string, ...any)) (err error) {
	g, err := newGroup(ctx, p, balancer, shape{gateways: 2, equal: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	all := activeVIPs()
	if err := g.serveActive(ctx, all); err != nil {
		return err
	}
	efforts, forward, err := g.connectInTurns(all)
	if err != nil {
		return err
	}
	for i := range all {
		a.all += efforts[i].connections + efforts[i].lost
		a.lost += efforts[i].lost
		if all[i].alone {
			continue
		}
		two, one := &efforts[i], &efforts[i+len(all)/2] // the VIP of the same return path that gateway 0 has alone
		least := one.perConnection()
		if all[i].way == desired.SNAT {
			handed := float64(two.packets)/float64(two.connections) - float64(one.packets)/float64(one.connections)
			a.handed = append(a.handed, handed)
			least += time.Duration(handed * float64(forward))
		}
		a.agents = append(a.agents, two.agents.Seconds()/(longTurns*longPhase.Seconds()))
		a.ratios[all[i].way] = append(a.ratios[all[i].way], float64(least)/float64(two.perConnection()))
		say("%s: %s with two gateways, %s with one; a forward takes %s", all[i].way, two, one, forward)
	}
	return nil
}

// connectInTurns connects to all VIPs, and returns what that took of each, and the CPU time of a bare forward.
func (g *group) connectInTurns(all []activeVIP) (efforts []effort, forward time.Duration, err error) {
	efforts = make([]effort, len(all))
	var paces [2][]float64 // of datagrams with their answers, through one gateway and through two
	for turn := range longTurns {
		for i := range all {
			n := (i + turn) % len(all) // another VIP is first in each turn
			e, err := g.effort(netip.AddrPortFrom(all[n].vip, served))
			if err != nil {
				return nil, 0, fmt.Errorf("%s, %s: %w", all[n].way, all[n].vip, err)
			}
			efforts[n].add(e)
		}
		for i, to := range []netip.Addr{onceForwarded, twiceForwarded} {
			var n pace
			if err := g.Client.Do(func() (err error) { n, err = udpReplies(longPhase, netip.AddrPortFrom(to, served)); return err }); err != nil {
				return nil, 0, fmt.Errorf("forward to %s: %w", to, err)
			}
			paces[i] = append(paces[i], n.perSecond)
		}
	}
	took := func(n int) time.Duration { return time.Duration(float64(time.Second) / metric.Median(paces[n])) }
	return efforts, took(1) - took(0), nil
}

// serveActive configures the gateways, the router and the servers, and returns when both gateways serve.
func (g *group) serveActive(ctx context.Context, all []activeVIP) error {
	var vips []desired.VIP
	for _, v := range all {
		f := frontend()[0]
		f.Backends = []desired.Backend{{Addr: v.server, Port: served, Weight: 1}}
		vips = append(vips, desired.VIP{Addr: v.vip, Announce: desired.ByBGP, Return: v.way, Frontends: []desired.Frontend{f}})
	}
	servers := []netip.Addr{onceForwarded, twiceForwarded}
	for _, v := range all {
		servers = append(servers, v.server)
	}
	for _, at := range servers {
		stop, err := serve(g.servers, at)
		if err != nil {
			return err
		}
		g.undo = append(g.undo, stop)
	}
	if err := errors.Join(g.reconfigureAll(ctx, vips), g.awaitPaths(ctx, len(g.agents))); err != nil {
		return err
	}
	return errors.Join(
		g.Router.Do(func() error { return leadAlone(all) }), g.leadThroughGateways(),
	)
}

// leadAlone makes the router lead VIPs of one gateway, and what their servers send to clients, to gateway 0.
func leadAlone(all []activeVIP) error {
	via := edge.Gateways[0][0].AsSlice()
	errs := []error{netlink.RouteAdd(&netlink.Route{Dst: network(clients), Gw: via, Table: wayBackAlone})}
	for _, v := range all {
		if !v.alone {
			continue
		}
		back := netlink.NewRule()
		back.Src, back.Table, back.Priority = network(netip.PrefixFrom(v.server, 32)), wayBackAlone, 50
		errs = append(errs, netlink.RouteAdd(&netlink.Route{Dst: network(netip.PrefixFrom(v.vip, 32)), Gw: via}), netlink.RuleAdd(back))
	}
	return errors.Join(errs...)
}

// leadThroughGateways makes the router lead packets to two servers through gateway 0, and those to one of them from there to gateway 1.
func (g *group) leadThroughGateways() error {
	route := func(to, via netip.Addr, table int) error {
		return netlink.RouteAdd(&netlink.Route{Dst: network(netip.PrefixFrom(to, 32)), Gw: via.AsSlice(), Table: table})
	}
	return errors.Join(
		g.Router.Do(func() error {
			from := netlink.NewRule()
			from.IifName, from.Table, from.Priority = "br0", forwarded, 51
			errs := []error{netlink.RuleAdd(from)}
			for _, to := range []netip.Addr{onceForwarded, twiceForwarded} {
				errs = append(errs, route(to, edge.Gateways[0][0], unix.RT_TABLE_MAIN), route(to, trunk[1].Addr(), forwarded))
			}
			return errors.Join(errs...)
		}),
		g.Gateways[0].Do(func() error {
			return errors.Join(
				route(twiceForwarded, edge.Gateways[1][0], unix.RT_TABLE_MAIN),
				os.WriteFile("/proc/sys/net/ipv4/conf/all/send_redirects", []byte("0"), 0),
				os.WriteFile("/proc/sys/net/ipv4/conf/"+edge.Device+"/send_redirects", []byte("0"), 0),
			)
		}),
	)
}

func network(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// effort connects to a VIP for a phase.
func (g *group) effort(to netip.AddrPort) (e effort, err error) {
	begin, err := g.spent()
	if err != nil {
		return e, err
	}
	if err := g.Client.Do(func() error {
		if err := oncpu.Pin(); err != nil {
			return err
		}
		for start := time.Now(); time.Since(start) < longPhase; {
			if err := connectOnce(to); err != nil {
				e.lost, e.why = e.lost+1, err
				continue
			}
			e.connections++
		}
		return nil
	}); err != nil {
		return e, err
	}
	end, err := g.spent()
	e.cpu, e.agents, e.packets = end.cpu-begin.cpu, end.agents-begin.agents, end.packets-begin.packets
	return e, err
}

// spent returns the CPU time of this process and that of the agents, and the number of packets that gateways have received.
func (g *group) spent() (e effort, err error) {
	e.cpu = oncpu.CPUTime()
	for i := range g.agents {
		used, err := g.agents[i].CPUTime()
		if err != nil {
			return e, err
		}
		e.agents += used
		if err := g.Gateways[i].Do(func() error {
			link, err := netlink.LinkByName(edge.Device)
			if err == nil {
				e.packets += link.Attrs().Statistics.RxPackets
			}
			return err
		}); err != nil {
			return e, err
		}
	}
	return e, nil
}

// awaitPaths waits until the router's kernel leads packets to keptVIP, and the way back, through so many gateways.
func (g *group) awaitPaths(ctx context.Context, want int) error {
	return await(ctx, func() (text string, err error) {
		err = g.Router.Do(func() error {
			for _, to := range []struct {
				network netip.Prefix
				table   int
			}{{netip.PrefixFrom(keptVIP, 32), unix.RT_TABLE_MAIN}, {clients, wayBack}} {
				routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Dst: network(to.network), Table: to.table}, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
				if err != nil {
					return err
				}
				have := 0
				for _, r := range routes {
					if have = max(have, len(r.MultiPath)); have == 0 && r.Gw != nil {
						have = 1
					}
				}
				if have != want {
					text = fmt.Sprintf("the router leads packets to %s through %d gateways, want %d: %v", to.network, have, want, routes)
				}
			}
			return nil
		})
		return text, err
	})
}

const (
	// openOfFour is the number of connections per return path when one of four gateways dies: 8,100 in six rounds.
	openOfFour = 450
	// probesOfFour is the number of clients per return path that ask by UDP, each from its own port.
	probesOfFour = 8
	// noticed is the shortest silence that is an outage, and no busy machine.
	noticed = 100 * time.Millisecond
)

// fourVIPs are VIPs with servers of their own.
func fourVIPs() (all []desired.VIP) {
	for i, way := range returns {
		vip := desired.VIP{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i)}), Announce: desired.ByBGP, Return: way}
		for _, at := range []struct {
			protocol string
			port     uint16
		}{{"TCP", served}, {"UDP", questions}} {
			f := desired.Frontend{Service: "bench/web", Protocol: at.protocol, Port: at.port}
			for n := range 3 {
				f.Backends = append(f.Backends, desired.Backend{Addr: serverAddr(3*i + n), Port: at.port, Weight: 1})
			}
			vip.Frontends = append(vip.Frontends, f)
		}
		all = append(all, vip)
	}
	return all
}

// oneOfFour cuts the cable of one of four gateways that serve at once, under open connections and clients that ask.
func (a *actives) oneOfFour(ctx context.Context, p *programs, balancer desired.Balancer, say func(string, ...any)) (err error) {
	g, err := newGroup(ctx, p, balancer, shape{gateways: 4, equal: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	stop, err := g.answering(ctx)
	if err != nil {
		return err
	}
	g.undo = append(g.undo, stop)
	vips := fourVIPs()
	if err := errors.Join(g.reconfigureAll(ctx, vips), g.awaitPaths(ctx, len(g.agents))); err != nil {
		return err
	}
	c, stopAsking, err := g.openAndAsk(ctx, vips)
	if err != nil {
		return err
	}
	if err := pauseFor(ctx, 2*resting); err != nil {
		return err
	}
	died := time.Now()
	if err := errors.Join(g.Cut(0), g.agents[0].Kill()); err != nil {
		return err
	}
	broken := c.Broken(time.Now())
	results := stopAsking()
	a.opened += c.Count()
	for _, b := range broken {
		if b.Name == string(desired.Masquerade) && b.Source.Addr() == edge.Gateways[0][0] {
			a.perished++
			continue
		}
		if a.broken[desired.Return(b.Name)]++; a.broken[desired.Return(b.Name)] <= 3 {
			say("a connection is broken: %v", b)
		}
	}
	outages := 0
	for _, r := range results {
		if silence := r.Silence(died); silence > noticed {
			a.outages = append(a.outages, silence)
			outages++
		}
	}
	say("one of four dies: %d of %d clients by UDP notice it, %d of %d connections are broken", outages, len(results), len(broken), c.Count())
	return nil
}

// openAndAsk opens connections to each VIP, and lets clients ask by UDP until stop is called.
func (g *group) openAndAsk(ctx context.Context, vips []desired.VIP) (c *traffic.Connections, stop func() []edge.Result, err error) {
	if c, err = traffic.NewConnections(ctx, g.Client, g.servers, served); err != nil {
		return nil, nil, err
	}
	g.undo = append(g.undo, c.Close)
	var probes []*edge.Probe
	stop = sync.OnceValue(func() (results []edge.Result) {
		for _, p := range probes {
			results = append(results, p.Stop())
		}
		return results
	})
	g.undo = append(g.undo, func() error { stop(); return nil })
	for _, v := range vips {
		if err := c.Open(ctx, string(v.Return), netip.AddrPortFrom(v.Addr, served), openOfFour); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", v.Return, err)
		}
		for range probesOfFour {
			p, err := g.Probe(v.Addr)
			if err != nil {
				return nil, nil, err
			}
			probes = append(probes, p)
		}
	}
	return c, stop, nil
}

// activeRows returns the costs and losses of gateways that serve at once.
func activeRows(seen map[desired.Balancer]*actives) (rows []metric.Metric) {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	for _, b := range balancers {
		s := seen[b.kind]
		for _, way := range returns {
			name := fmt.Sprintf("%s: new connections per CPU second with two active gateways / with one, return: %s", b.name, way)
			if way == desired.SNAT {
				name += fmt.Sprintf(", less one bare forward for each of %.1f packets", metric.Median(s.handed))
			}
			rows = append(rows, metric.Metric{Name: name, Value: metric.Median(s.ratios[way]), Unit: "ratio", Bar: new(0.95), Better: metric.Higher})
		}
		rows = append(rows, metric.Metric{Name: "the same: CPU of both agents, which exchange connections up to 200 times a second", Value: metric.Median(s.agents), Unit: "CPUs", Better: metric.Lower})
		outages := slices.Sorted(slices.Values(s.outages))
		broken := 0
		for _, n := range s.broken {
			broken += n
		}
		rows = append(rows, metric.Metric{
			Name: fmt.Sprintf("%s: new connections that failed at active gateways, of %d", b.name, s.all), Value: float64(s.lost), Unit: "connections", Bar: new(0.0), Better: metric.Lower,
		}, metric.Metric{
			Name: b.name + ": one of four active gateways dies: silence at its share of clients, median", Value: ms(outages[len(outages)/2]), Unit: "ms", Bar: new(300.0), Better: metric.Lower,
		}, metric.Metric{
			Name:  fmt.Sprintf("%s: the same: established TCP connections broken, of %d, but for %d that it masqueraded", b.name, s.opened, s.perished),
			Value: float64(broken), Unit: "connections", Bar: new(0.0), Better: metric.Lower,
		})
	}
	return rows
}
