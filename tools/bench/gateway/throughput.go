package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/gateway/nft"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

const (
	// phase is how long one lane is measured without a break, and turns how often per round. Two adjacent phases differ
	// by ten percent where nothing differs; the median of 100 is right within one or two percent.
	phase = 50 * time.Millisecond
	turns = 50
	// served is the port of the VIPs and of the server.
	served = 80
)

// lane is a gateway between the client and the server, and its VIP.
type lane struct {
	name    string
	gateway *netlab.Namespace
	vip     netip.AddrPort
	balance func(ctx context.Context, l *lane) (undo func() error, err error)
	ends    [2]end
}

// end is one end of a lane's cable, at the client or the server.
type end struct {
	ns     *netlab.Namespace
	device string
}

// serverOf is the address of the server for the gateways of lanes.
var serverOf = netip.MustParseAddr("10.96.0.1")

// throughput holds the results of all phases, by lane and kind of traffic.
type throughput map[string]map[string][]pace

// throughputs measures the balancers against hand-written rules, in turns.
func throughputs(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	if err := install(ctx, progress, "nftables"); err != nil {
		return nil, err
	}
	seen, err := lanes(ctx, rounds, progress)
	if err != nil {
		return nil, err
	}
	return balancerRows(seen), nil
}

// lanes measures in rounds. Each round creates all lanes again and starts with another one: identical rules reach one
// percent more on the first lane.
func lanes(ctx context.Context, rounds int, progress io.Writer) (throughput, error) {
	seen := throughput{}
	for r := range rounds {
		all := []*lane{{name: byHand, balance: rulesByHand}, {name: withNFT, balance: balanceNFT}, {name: withEBPF, balance: balanceEBPF}, {name: withXDP, balance: balanceXDP}}
		first := r % len(all)
		if err := seen.round(ctx, slices.Concat(all[first:], all[:first])); err != nil {
			return nil, err
		}
		fmt.Fprintf(progress, "round %d/%d of the balancers\n", r+1, rounds)
	}
	return seen, nil
}

// round creates all lanes, measures each in many turns, and removes them.
func (t throughput) round(ctx context.Context, all []*lane) (err error) {
	var undo []func() error
	defer func() {
		for _, u := range slices.Backward(undo) {
			err = errors.Join(err, u())
		}
	}()
	client, err := netlab.NewNamespace()
	if err != nil {
		return err
	}
	undo = append(undo, client.Close)
	server, err := netlab.NewNamespace()
	if err != nil {
		return err
	}
	undo = append(undo, server.Close)
	if err := server.Own(serverOf); err != nil {
		return err
	}
	stop, err := serve(server, serverOf)
	if err != nil {
		return err
	}
	undo = append(undo, stop)
	for i, l := range all {
		if err := l.connect(i, client, server); err != nil {
			return err
		}
		undo = append(undo, l.gateway.Close)
		end, err := l.balance(ctx, l)
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, err)
		}
		undo = append(undo, end)
	}
	for turn := range turns {
		for i := range all {
			l := all[(i+turn)%len(all)] // another lane is first in each turn
			for _, k := range kinds {
				var n pace
				if err := client.Do(func() (err error) { n, err = k.run(l.vip); return err }); err != nil {
					return fmt.Errorf("%s, %s: %w", l.name, k.name, err)
				}
				if t[l.name] == nil {
					t[l.name] = map[string][]pace{}
				}
				t[l.name][k.name] = append(t[l.name][k.name], n)
			}
		}
	}
	return nil
}

// connect creates lane number i, with a cable to the client and one to the server.
func (l *lane) connect(i int, client, server *netlab.Namespace) (err error) {
	if l.gateway, err = netlab.NewNamespace(); err != nil {
		return err
	}
	at := func(net, host byte) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, net, byte(i), host}), 24)
	}
	l.ends = [2]end{{client, netlab.DeviceName(at(98, 2))}, {server, netlab.DeviceName(at(97, 2))}}
	l.vip = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}), served)
	to := netip.PrefixFrom(serverOf, 32)
	return errors.Join(
		client.Connect(l.gateway, at(98, 2), at(98, 1)), l.gateway.Connect(server, at(97, 1), at(97, 2)),
		client.RouteTo(netip.PrefixFrom(l.vip.Addr(), 32), at(98, 1).Addr()), l.gateway.RouteTo(to, at(97, 2).Addr()),
		server.RouteTo(at(98, 0), at(97, 1).Addr()),
	)
}

func (l *lane) state(balancer desired.Balancer) *desired.State {
	s := &desired.State{Cluster: "bench", Group: "bench", Balancer: balancer}
	v := desired.VIP{Addr: l.vip.Addr(), Announce: desired.ByBGP, Return: desired.Routed}
	for _, proto := range []string{"TCP", "UDP"} {
		v.Frontends = append(v.Frontends, desired.Frontend{
			Service: "bench/echo", Protocol: proto, Port: served, Backends: []desired.Backend{{Addr: serverOf, Port: served, Weight: 1}},
		})
	}
	s.VIPs = append(s.VIPs, v)
	return s
}

func rulesByHand(ctx context.Context, l *lane) (func() error, error) {
	rules := fmt.Sprintf(`table ip bench {
	chain prerouting {
		type nat hook prerouting priority dstnat
		ip daddr %[1]s meta l4proto { tcp, udp } th dport %[2]d dnat ip to %[3]s:%[2]d
	}
}
`, l.vip.Addr(), served, serverOf)
	cmd := exec.CommandContext(ctx, "nsenter", "--net="+l.gateway.Path(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if output, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("nft: %w\n%s", err, output)
	}
	return func() error { return nil }, nil // the rules go with their namespace
}

func balanceNFT(ctx context.Context, l *lane) (undo func() error, err error) {
	err = l.gateway.Do(func() error {
		b, err := nft.New(slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		undo = func() error { return b.Close(ctx, false) }
		return b.Apply(ctx, l.state(desired.NFTables))
	})
	return undo, err
}

func balanceEBPF(ctx context.Context, l *lane) (undo func() error, err error) {
	return l.balanceBy(ctx, ebpf.XDPOff)
}

// balanceXDP sends from the gateway's drivers. Client and server accept their frames, and send only packets with a
// checksum, as over a wire.
func balanceXDP(ctx context.Context, l *lane) (undo func() error, err error) {
	for _, e := range l.ends {
		if err := e.ns.Do(func() error {
			return errors.Join(netlab.GRO.Set(e.device, true), netlab.TxChecksum.Set(e.device, false))
		}); err != nil {
			return nil, err
		}
	}
	return l.balanceBy(ctx, ebpf.XDPAuto)
}

func (l *lane) balanceBy(ctx context.Context, xdp ebpf.XDP) (undo func() error, err error) {
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	unmount, err := netlab.MountBPFFS(dir)
	if err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	err = l.gateway.Do(func() error {
		b, err := ebpf.Open(ebpf.Config{BPFFS: dir, XDP: xdp, Flows: gateways.Connections, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		undo = func() error {
			var none error
			if xdp != ebpf.XDPOff && b.Sent() == 0 {
				none = errors.New("nothing was sent by XDP")
			}
			return errors.Join(none, b.Close(ctx, false), ebpf.Remove(dir), unmount(), os.Remove(dir))
		}
		return b.Apply(ctx, l.state(desired.EBPF))
	})
	return undo, err
}

// Names of the lanes.
const (
	byHand   = "hand-written nftables DNAT"
	withNFT  = "nftables balancer"
	withEBPF = "eBPF balancer"
	withXDP  = "eBPF balancer with XDP on veth" // XDP is not meant for veth
)

// contender is a balancer of Isthmus.
type contender struct {
	name string
	kind desired.Balancer
	bar  float64 // the ratio to the hand-written rules that it must reach; 0: none
}

// balancers are those of Isthmus.
var balancers = []contender{{withEBPF, desired.EBPF, 1.1}, {withNFT, desired.NFTables, 0.95}}

// balancerRows returns the results of the balancers relative to the hand-written rules.
func balancerRows(seen throughput) []metric.Metric {
	var rows []metric.Metric
	for _, l := range append(slices.Clone(balancers), contender{withXDP, desired.EBPF, 0}) {
		var bar *float64
		if l.bar > 0 {
			bar = &l.bar
		}
		for _, k := range kinds {
			ratios := make([]float64, len(seen[l.name][k.name]))
			paces := make([]float64, len(ratios))
			for i, p := range seen[l.name][k.name] {
				ratios[i], paces[i] = p.perSecond/seen[byHand][k.name][i].perSecond, p.perSecond
			}
			rows = append(rows, metric.Metric{
				Name: fmt.Sprintf("%s: %s per CPU second / hand-written nftables DNAT", l.name, k.name), Value: metric.Median(ratios), Unit: "ratio",
				Bar: bar, Better: metric.Higher, Quartiles: &[2]float64{ratios[len(ratios)/4], ratios[len(ratios)*3/4]},
			}, metric.Metric{
				Name: "the same, per second of one CPU shared by client, gateway and server", Value: metric.Median(paces), Unit: "1/s", Better: metric.Higher,
			})
		}
		reset, of := seen.resets(l.name)
		peer, _ := seen.resets(byHand)
		rows = append(rows, metric.Metric{
			Name: fmt.Sprintf("%s: connections reset, of %d; peer: hand-written", l.name, of), Value: float64(reset), Unit: "connections", Better: metric.Lower, Peer: new(float64(peer)),
		})
	}
	return rows
}

// resets returns how many connections of a lane were reset, and how many were opened.
func (t throughput) resets(lane string) (reset, of int) {
	for _, all := range t[lane] {
		for _, p := range all {
			reset += p.reset
			of += p.done + p.reset
		}
	}
	return reset, of
}
