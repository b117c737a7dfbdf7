package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab/traffic"
)

const (
	// open is the number of connections per return path when a gateway dies.
	open = 1000
	// old is how long they are open by then, at least: a gateway can only continue connections that its peer has sent it.
	old = 250 * time.Millisecond
)

// ways are the return paths, each with a VIP.
var ways = []struct {
	name string
	way  desired.Return
	vip  netip.Addr
}{{"return: routed", desired.Routed, keptVIP}, {"return: snat", desired.SNAT, snatVIP}}

// vips returns the VIPs of ways, with servers by number.
func vips(numbers ...int) (all []desired.VIP) {
	for _, w := range ways {
		all = append(all, desired.VIP{Addr: w.vip, Announce: desired.ByBGP, Return: w.way, Frontends: frontend(numbers...)})
	}
	return all
}

// death opens connections of each return path and kind through the preferred gateway of a group. Then two servers are
// added, one drains, and the gateway dies, agent and cable. It returns the connections that do not continue through the
// other gateway.
func (g *group) death(ctx context.Context) (all []traffic.Broken, err error) {
	if err := g.reconfigureAll(ctx, vips(0, 1, 2, 3, 4, 5, 6, 7)); err != nil {
		return nil, err
	}
	if err := errors.Join(g.awaitRoute(ctx, 1), g.awaitBestRoute(ctx, 0)); err != nil {
		return nil, err
	}
	c, err := traffic.NewConnections(ctx, g.Client, g.servers, served)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	for _, w := range ways {
		if err := c.Open(ctx, w.name, netip.AddrPortFrom(w.vip, served), open); err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
	}
	opened := time.Now()
	after := vips(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
	for i := range after {
		after[i].Frontends[0].Backends[0].Draining = true
	}
	if err := g.reconfigureAll(ctx, after); err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(time.Until(opened.Add(old))):
	}
	// The traffic must pass it now, and must not have moved before.
	if err := g.awaitBestRoute(ctx, 0); err != nil {
		return nil, err
	}
	if err := errors.Join(g.Cut(0), g.agents[0].Kill()); err != nil {
		return nil, err
	}
	all = c.Broken(time.Now())
	return all, g.awaitBestRoute(ctx, 1)
}

// deathRows returns the broken connections.
func deathRows(seen map[desired.Balancer]*whole) (rows []metric.Metric) {
	for _, b := range balancers {
		for _, w := range ways {
			s := seen[b.kind]
			rows = append(rows, metric.Metric{
				Name:  fmt.Sprintf("%s: established TCP connections broken by their gateway's death, of %d, %s", b.name, s.opened, w.name),
				Value: float64(s.broken[w.name]), Unit: "connections", Bar: new(0.0), Better: metric.Lower,
			})
		}
	}
	return rows
}
