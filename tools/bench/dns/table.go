package dns

import (
	"slices"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

func cpu(s sample) float64  { return metric.Microseconds(s.cpu) }
func rate(s sample) float64 { return s.rate }
func p99(s sample) float64  { return metric.Microseconds(s.p99) }

// trafficRows turns samples into rows.
func (b *bench) trafficRows() []metric.Metric {
	var rows []metric.Metric
	for _, r := range []struct {
		name, kind, to string
		of             func(sample) float64
		bar            *float64
		better         string
	}{
		{"10,000 names, A: CPU per query / CoreDNS", plainSome, coreDNS, cpu, new(1.0 / 7), metric.Lower},
		{"10,000 names, A: queries / Go UDP echo", plainSome, goEcho, rate, new(0.80), metric.Higher},
		{"10,000 names, A: queries / CoreDNS", plainSome, coreDNS, rate, nil, metric.Higher},
		{"100,000 names, A: queries / CoreDNS", plainMany, coreDNS, rate, new(12.0), metric.Higher},
		{"headless of 200, truncated at 1232 bytes: queries / CoreDNS", largeUDP, coreDNS, rate, new(18.0), metric.Higher},
		{"headless of 200, complete over TCP: CPU per query / CoreDNS", largeTCP, coreDNS, cpu, nil, metric.Lower},
		{"pod-like mix of 100,000 names, half NXDOMAIN, EDNS: queries / CoreDNS", mixed, coreDNS, rate, new(12.0), metric.Higher},
	} {
		of := b.samples[r.kind]
		row := metric.Metric{
			Name: r.name, Value: metric.MedianRatio(of[isthmus], of[r.to], r.of), Unit: "ratio", Bar: r.bar, Better: r.better, Peer: new(1.0),
		}
		if r.to == goEcho {
			row.Peer, row.Limit = new(metric.MedianRatio(of[coreDNS], of[r.to], r.of)), new(1.0)
		}
		if r.to == coreDNS && len(of[goEcho]) > 0 {
			row.Limit = new(metric.MedianRatio(of[goEcho], of[r.to], r.of))
		}
		rows = append(rows, row)
	}
	for _, r := range []struct {
		name, kind, unit string
		of               func(sample) float64
		bar              *float64
		better           string
	}{
		{"10,000 names, A: CPU per query", plainSome, "us", cpu, nil, metric.Lower},
		{"10,000 names, A: queries", plainSome, "1/s", rate, nil, metric.Higher},
		{"100,000 names, A: queries", plainMany, "1/s", rate, nil, metric.Higher},
		{"100,000 names, A: round trip with 128 in flight, p99", plainMany, "us", p99, new(1000.0), metric.Lower},
		{"headless of 200, truncated at 1232 bytes: queries", largeUDP, "1/s", rate, nil, metric.Higher},
		{"headless of 200, complete over TCP: CPU per query", largeTCP, "us", cpu, nil, metric.Lower},
		{"pod-like mix: queries", mixed, "1/s", rate, nil, metric.Higher},
	} {
		of := b.samples[r.kind]
		row := metric.Metric{
			Name: r.name, Value: metric.MedianOf(of[isthmus], r.of), Unit: r.unit, Bar: r.bar, Better: r.better, Peer: new(metric.MedianOf(of[coreDNS], r.of)),
		}
		if len(of[goEcho]) > 0 {
			row.Limit = new(metric.MedianOf(of[goEcho], r.of))
		}
		rows = append(rows, row)
	}
	return rows
}

// sizeRows turns the other measurements into rows.
func sizeRows(s size) []metric.Metric {
	slices.Sort(s.peerChanges)
	slices.Sort(s.restarts)
	const megabyte = 1e6
	return []metric.Metric{
		{
			Name: "100,000 names: memory of a process that serves them", Value: s.memory / megabyte, Unit: "MB",
			Bar: new(25.0), Better: metric.Lower, Peer: new(s.peerMemory / megabyte),
		},
		{
			Name: "100,000 names: changed snapshot to new answer, p99; peer: from the API server, cache included", Value: metric.Milliseconds(s.changes[len(s.changes)*99/100]), Unit: "ms",
			Bar: new(20.0), Better: metric.Lower, Peer: new(metric.Milliseconds(s.peerChanges[len(s.peerChanges)*99/100])),
		},
		{
			Name: "100,000 names: restart of isthmus-agent without API server, to the first correct answer; peer: SERVFAIL only", Value: metric.Milliseconds(s.restarts[len(s.restarts)/2]), Unit: "ms",
			Bar: new(1000.0), Better: metric.Lower,
		},
	}
}
