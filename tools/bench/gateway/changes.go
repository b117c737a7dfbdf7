package gateway

import (
	"context"
	"errors"
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
	// most is the number of VIPs of a first state, each with serverCount backends.
	most = 5000
)

// manyVIPs returns so many VIPs of as many Services, which have no pod in common.
func manyVIPs(count int) []desired.VIP {
	var numbers []int
	for n := range serverCount {
		numbers = append(numbers, n)
	}
	all, pod := vips(numbers...), fillerPods
	for a := fillerVIPs; len(all) < count; a = a.Next() {
		own := frontend(numbers...)
		own[0].Service = fmt.Sprint("bench/web-", len(all)) // a Service that is refused costs only itself
		for i := range own[0].Backends {
			own[0].Backends[i].Addr, pod = pod, pod.Next()
		}
		all = append(all, desired.VIP{Addr: a, Announce: desired.ByBGP, Return: desired.SNAT, Frontends: own})
	}
	slices.SortFunc(all, func(a, b desired.VIP) int { return a.Addr.Compare(b.Addr) })
	return all
}

// changes applies many VIPs to the surviving gateway, and then changes a backend of one VIP again and again. It returns
// the times from a state to the gateway's answer, sorted.
func (g *group) changes(ctx context.Context) (took []time.Duration, err error) {
	all := manyVIPs(many)
	if _, err := g.reconfigure(ctx, alive, all); err != nil {
		return nil, err
	}
	for n, spare := 0, sparePods; n < changeCount; n, spare = n+1, spare.Next() {
		all = slices.Clone(all) // the last state does not change
		v := &all[n*len(all)/changeCount]
		v.Frontends = slices.Clone(v.Frontends)
		v.Frontends[0].Backends = slices.Clone(v.Frontends[0].Backends)
		v.Frontends[0].Backends[serverCount-1].Addr = spare
		d, err := g.reconfigure(ctx, alive, all)
		if err != nil {
			return nil, fmt.Errorf("change %d: %w", n, err)
		}
		took = append(took, d)
	}
	slices.Sort(took)
	return took, nil
}

// firstLoad starts gateways, and gives one its first state with most VIPs. It returns the time from the state to the gateway's answer, and
// the memory of the agent afterwards, in MiB.
func firstLoad(ctx context.Context, p *programs, balancer desired.Balancer) (took time.Duration, memory float64, err error) {
	g, err := newGroup(ctx, p, balancer, pair)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	if took, err = g.reconfigure(ctx, alive, manyVIPs(most)); err != nil {
		return 0, 0, err
	}
	resident, err := g.agents[alive].Memory()
	return took, float64(resident) / (1 << 20), err
}

// changeRows returns the times of changes, and the memory of an agent with many VIPs.
func changeRows(seen map[desired.Balancer]*whole) (rows []metric.Metric) {
	const bar = 50
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	for _, b := range balancers {
		took := slices.Sorted(slices.Values(seen[b.kind].changes))
		name := fmt.Sprintf("%s: one change among %d VIPs with %d pods of their own each, applied over HTTPS with mutual TLS", b.name, many, serverCount)
		rows = append(rows,
			metric.Metric{
				Name: name, Value: ms(took[len(took)/2]), Unit: "ms", Bar: new(float64(bar)), Better: metric.Lower,
				Quartiles: &[2]float64{ms(took[len(took)/4]), ms(took[len(took)*3/4])},
			},
			metric.Metric{Name: "the same, 99th percentile", Value: ms(took[len(took)*99/100]), Unit: "ms", Better: metric.Lower},
			metric.Metric{Name: "the same, memory of the agent afterwards", Value: metric.Median(seen[b.kind].memory), Unit: "MiB", Better: metric.Lower},
			metric.Metric{
				Name:  fmt.Sprintf("%s: first state with %d VIPs with %d pods of their own each, applied over HTTPS with mutual TLS", b.name, most, serverCount),
				Value: metric.Median(seen[b.kind].loads), Unit: "s", Better: metric.Lower,
			},
			metric.Metric{Name: "the same, memory of the agent afterwards", Value: metric.Median(seen[b.kind].loaded), Unit: "MiB", Better: metric.Lower},
		)
	}
	return rows
}
