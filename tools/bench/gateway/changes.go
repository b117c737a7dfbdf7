package gateway

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

const (
	// many is the number of VIPs during changes, each with serverCount backends.
	many = 1000
	// changeCount is the number of changes per round.
	changeCount = 60
	// alive is the gateway that is changed.
	alive = 1
)

// manyVIPs returns the VIPs of a gateway during changes.
func manyVIPs() []desired.VIP {
	var numbers []int
	for n := range serverCount {
		numbers = append(numbers, n)
	}
	all := vips(numbers...)
	for a := fillerVIPs; len(all) < many; a = a.Next() {
		all = append(all, desired.VIP{Addr: a, Announce: desired.ByBGP, Return: desired.SNAT, Frontends: frontend(numbers...)})
	}
	slices.SortFunc(all, func(a, b desired.VIP) int { return a.Addr.Compare(b.Addr) })
	return all
}

// changes applies many VIPs to the surviving gateway, and then changes a backend of one VIP again and again. It returns
// the times from a state to the gateway's answer, sorted.
func (g *group) changes(ctx context.Context) (took []time.Duration, err error) {
	all := manyVIPs()
	if _, err := g.reconfigure(ctx, alive, all); err != nil {
		return nil, err
	}
	for n := range changeCount {
		f := &all[n*len(all)/changeCount].Frontends[0]
		f.Backends = slices.Clone(f.Backends)
		f.Backends[serverCount-1].Addr = serverAddr(serverCount) // the spare server
		d, err := g.reconfigure(ctx, alive, all)
		if err != nil {
			return nil, fmt.Errorf("change %d: %w", n, err)
		}
		took = append(took, d)
	}
	slices.Sort(took)
	return took, nil
}

// changeRows returns the times of changes, and the memory of an agent with many VIPs.
func changeRows(seen map[desired.Balancer]*whole) (rows []metric.Metric) {
	const bar = 50
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	for _, b := range balancers {
		took := slices.Sorted(slices.Values(seen[b.kind].changes))
		name := fmt.Sprintf("%s: one change among %d VIPs with %d backends each, applied over HTTPS with mutual TLS", b.name, many, serverCount)
		rows = append(rows,
			metric.Metric{
				Name: name, Value: ms(took[len(took)/2]), Unit: "ms", Bar: new(float64(bar)), Better: metric.Lower,
				Quartiles: &[2]float64{ms(took[len(took)/4]), ms(took[len(took)*3/4])},
			},
			metric.Metric{Name: "the same, 99th percentile", Value: ms(took[len(took)*99/100]), Unit: "ms", Better: metric.Lower},
			metric.Metric{Name: "the same, memory of the agent afterwards", Value: metric.Median(seen[b.kind].memory), Unit: "MiB", Better: metric.Lower},
		)
	}
	return rows
}
