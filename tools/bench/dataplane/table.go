package dataplane

import (
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

func cpu(s sample) float64  { return metric.Microseconds(s.cpu) }
func p50(s sample) float64  { return metric.Microseconds(s.p50) }
func rate(s sample) float64 { return float64(time.Second) / float64(s.mean) }

// ratio is a row that compares a path with the direct one.
type ratio struct {
	name, kind, path string
	of               func(sample) float64
	bar              *float64
	better           string
}

// ratios lists all rows that compare a path with the direct one.
var ratios = slices.Concat(
	ratiosOf("socket path", socketOne, bars{cpu: new(1.03), p50: new(1.02), udp: new(0.95)}),
	[]ratio{{"socket path: UDP request-response p50, unconnected", rrUDPUnconnected, socketOne, p50, nil, metric.Lower}},
	ratiosOf("socket path at 10,000 services", socketMany, bars{}),
	ratiosOf("packet fast path at 10,000 services", packetFast, bars{cpu: new(1.03), p50: new(1.02), udp: new(1.03)}),
	ratiosOf("packet slow path at 10,000 services", packetSlow, bars{cpu: new(1.09), p50: new(1.06), udp: new(0.95)}),
	ratiosOf("hand-written nftables", nftByHand, bars{}),
	ratiosOf("kube-proxy at 10,000 services", kubeProxy, bars{}),
	ratiosOf(redirected, redirected, bars{}),
)

// fastLimits are the ratios of redirection alone to the direct path, on the machine that set the bars of the fast path. The
// ratio of bar and limit, which is the load balancer's own share, applies to any machine.
var fastLimits = map[string]float64{shortTCP: 0.948, windowUDP: 1.07}

// bars are the ratios that a path should reach.
type bars struct{ cpu, p50, udp *float64 }

// ratiosOf returns the rows that every path has.
func ratiosOf(title, path string, b bars) []ratio {
	return []ratio{
		{title + ": CPU per short TCP connection", shortTCP, path, cpu, b.cpu, metric.Lower},
		{title + ": TCP request-response p50", rrTCP, path, p50, b.p50, metric.Lower},
		{title + ": UDP request-response p50, connected", rrUDP, path, p50, nil, metric.Lower},
		{title + ": UDP with 32 in flight, replies", windowUDP, path, rate, b.udp, metric.Higher},
	}
}

// shares lists the rows about the part of kube-proxy's added CPU that a path saves, with their bars.
var shares = []struct {
	name, path string
	bar        float64
}{
	{"socket path: share of kube-proxy's added CPU removed", socketMany, 0.85},
	{"packet fast path: share of kube-proxy's added CPU removed", packetFast, 0.85},
	{"packet slow path: share of kube-proxy's added CPU removed", packetSlow, 0.55},
}

// referencePaths maps each path of Isthmus to its reference.
var referencePaths = map[string]string{socketOne: referenceSocket, socketMany: referenceSocket, packetSlow: referenceSlow, packetFast: referenceFast}

// trafficRows turns pairs into rows.
func trafficRows(all pairs) []metric.Metric {
	var rows []metric.Metric
	for _, r := range ratios {
		found := all[r.kind]
		row := metric.Metric{
			Name: r.name + " / direct", Value: medianRatio(found[r.path], r.of), Quartiles: quartiles(found[r.path], r.of), Unit: "ratio",
			Bar: r.bar, Better: r.better, Limit: new(1.0),
		}
		if l, ok := referencePaths[r.path]; ok && found[l] != nil {
			row.Limit = new(medianRatio(found[l], r.of))
		}
		if limit, ok := fastLimits[r.kind]; ok && r.path == packetFast {
			here := medianRatio(found[redirected], r.of)
			row.Why = fmt.Sprintf("redirection alone is at %.3f here and at %.3f on the machine that set the bar, so the equivalent bar here is %.3f", here, limit, *r.bar/limit*here)
		}
		if r.path != kubeProxy {
			row.Peer = new(medianRatio(found[kubeProxy], r.of))
		}
		rows = append(rows, row)
	}
	for _, s := range shares {
		found := all[shortTCP]
		rows = append(rows, metric.Metric{
			Name: s.name, Value: share(found[s.path], found[kubeProxy], cpu), Unit: "ratio",
			Bar: &s.bar, Better: metric.Higher, Limit: new(1.0),
		})
	}
	for _, r := range ratios {
		if limit, ok := fastLimits[r.kind]; ok && r.path == packetFast {
			rows = append(rows, metric.Metric{
				Name:  r.name + " / " + redirected,
				Value: medianRatio(all[r.kind][packetFast], r.of) / medianRatio(all[r.kind][redirected], r.of),
				Unit:  "ratio", Bar: new(*r.bar / limit), Better: r.better, Limit: new(1.0),
			})
		}
	}
	found := all[rrTCP]
	rows = append(rows, metric.Metric{
		Name:  "socket path: TCP request-response p50 at 10,000 services / at 1",
		Value: medianRatio(found[socketMany], p50) / medianRatio(found[socketOne], p50),
		Unit:  "ratio", Bar: new(1.02), Better: metric.Lower, Limit: new(1.0),
	})
	for _, row := range []struct {
		name, kind, unit string
		of               func(sample) float64
		better           string
	}{
		{"direct: CPU per short TCP connection", shortTCP, "us", cpu, metric.Lower},
		{"direct: TCP request-response p50", rrTCP, "us", p50, metric.Lower},
		{"direct: UDP request-response p50, unconnected", rrUDPUnconnected, "us", p50, metric.Lower},
		{"direct: UDP with 32 in flight, replies", windowUDP, "1/s", rate, metric.Higher},
	} {
		rows = append(rows, metric.Metric{
			Name: row.name, Value: medianDirect(all[row.kind][socketOne], row.of), Unit: row.unit, Better: row.better,
		})
	}
	return rows
}

// ratiosTo returns the ratio of each pair.
func ratiosTo(found []pair, of func(sample) float64) []float64 {
	ratios := make([]float64, len(found))
	for i, p := range found {
		ratios[i] = of(p.path) / of(p.direct)
	}
	return ratios
}

// medianRatio returns the median of the pairs' ratios.
func medianRatio(found []pair, of func(sample) float64) float64 {
	return metric.Median(ratiosTo(found, of))
}

// quartiles returns the first and the third quartile of the pairs' ratios.
func quartiles(found []pair, of func(sample) float64) *[2]float64 {
	ratios := ratiosTo(found, of)
	slices.Sort(ratios)
	return &[2]float64{ratios[len(ratios)/4], ratios[len(ratios)*3/4]}
}

// share returns the part of a peer's added cost that a path saves: 1 if the path adds nothing to the direct one.
func share(path, peer []pair, of func(sample) float64) float64 {
	return 1 - (medianRatio(path, of)-1)/(medianRatio(peer, of)-1)
}

// medianDirect returns the median of the direct path's samples in pairs.
func medianDirect(found []pair, of func(sample) float64) float64 {
	return metric.MedianOf(found, func(p pair) float64 { return of(p.direct) })
}
