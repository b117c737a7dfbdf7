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
	"github.com/isthmus-net/isthmus/tools/netlab"
)

const (
	// phase is how long one lane is measured without a break, turns how often in each round. Two phases side by side differ by a
	// tenth where nothing does: the median of 100 is right within a hundredth or two.
	phase = 50 * time.Millisecond
	turns = 50
	// served is the port of VIPs and of the server.
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

// end is that of a lane's cable at the client or the server.
type end struct {
	ns     *netlab.Namespace
	device string
}

// serverOf is the server as a lane's gateway knows it.
var serverOf = netip.MustParseAddr("10.96.0.1")

// throughput is what the client can do through each lane: what every phase brought, by lane and kind of traffic.
type throughput map[string]map[string][]pace

// throughputs measures the balancers against rules that a person would write, in turns.
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

// lanes measures in rounds. Each makes all lanes anew and another one first: rules that are the same bring a hundredth more on
// the first lane than on the others.
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

// round measures each of all lanes, which it makes and removes, in many turns.
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
	stop, err := serve(server)
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
			l := all[(i+turn)%len(all)] // nobody is always first
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

// connect makes the lane of a number, with a cable to the client and one to the server.
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

// balanceXDP has the gateway's drivers send. The client's and the server's take frames from them, and give them only what has
// its checksum, as what comes over a wire.
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
		b, err := ebpf.Open(ebpf.Config{BPFFS: dir, XDP: xdp, Log: slog.New(slog.DiscardHandler)})
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

// The lanes.
const (
	byHand   = "nft DNAT by hand"
	withNFT  = "nftables balancer"
	withEBPF = "eBPF balancer"
	withXDP  = "eBPF balancer with XDP on veth" // which is not what XDP is for
)

// contender is a balancer of ours.
type contender struct {
	name string
	kind desired.Balancer
	bar  float64 // what it is to reach of what rules by hand do, 0 when that is left open
}

// balancers are ours.
var balancers = []contender{{withEBPF, desired.EBPF, 1.1}, {withNFT, desired.NFTables, 0.95}}

// balancerRows are what our balancers reach of what rules by hand do.
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
				Name: fmt.Sprintf("%s: %s a second of CPU, against nft DNAT by hand", l.name, k.name), Value: metric.Median(ratios), Unit: "ratio",
				Bar: bar, Better: metric.Higher, Quartiles: &[2]float64{ratios[len(ratios)/4], ratios[len(ratios)*3/4]},
			}, metric.Metric{
				Name: "the same, of a CPU that client, gateway and server share", Value: metric.Median(paces), Unit: "1/s", Better: metric.Higher,
			})
		}
		reset, of := seen.resets(l.name)
		peer, _ := seen.resets(byHand)
		rows = append(rows, metric.Metric{
			Name: fmt.Sprintf("%s: connections reset of %d; peer: by hand", l.name, of), Value: float64(reset), Unit: "connections", Better: metric.Lower, Peer: new(float64(peer)),
		})
	}
	return rows
}

// resets is how many connections of a lane were reset, and how many were made.
func (t throughput) resets(lane string) (reset, of int) {
	for _, all := range t[lane] {
		for _, p := range all {
			reset += p.reset
			of += p.done + p.reset
		}
	}
	return reset, of
}
