package dns

import (
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func cpu(s sample) float64  { return us(s.cpu) }
func rate(s sample) float64 { return s.rate }
func p99(s sample) float64  { return us(s.p99) }

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
		{"headless of 200, cut at 1232 bytes: queries / CoreDNS", largeUDP, coreDNS, rate, new(18.0), metric.Higher},
		{"headless of 200, whole over TCP: CPU per query / CoreDNS", largeTCP, coreDNS, cpu, nil, metric.Lower},
		{"pod-like mix of 100,000 names, half NXDOMAIN, EDNS: queries / CoreDNS", mixed, coreDNS, rate, new(12.0), metric.Higher},
	} {
		of := b.samples[r.kind]
		row := metric.Metric{
			Name: r.name, Value: medianRatio(of[isthmus], of[r.to], r.of), Unit: "ratio", Bar: r.bar, Better: r.better, Peer: new(1.0),
		}
		if r.to == goEcho {
			row.Peer, row.Limit = new(medianRatio(of[coreDNS], of[r.to], r.of)), new(1.0)
		}
		if r.to == coreDNS && len(of[goEcho]) > 0 {
			row.Limit = new(medianRatio(of[goEcho], of[r.to], r.of))
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
		{"100,000 names, A: round trip with 128 under way, p99", plainMany, "us", p99, new(1000.0), metric.Lower},
		{"headless of 200, cut at 1232 bytes: queries", largeUDP, "1/s", rate, nil, metric.Higher},
		{"headless of 200, whole over TCP: CPU per query", largeTCP, "us", cpu, nil, metric.Lower},
		{"pod-like mix: queries", mixed, "1/s", rate, nil, metric.Higher},
	} {
		of := b.samples[r.kind]
		row := metric.Metric{
			Name: r.name, Value: medianOf(of[isthmus], r.of), Unit: r.unit, Bar: r.bar, Better: r.better, Peer: new(medianOf(of[coreDNS], r.of)),
		}
		if len(of[goEcho]) > 0 {
			row.Limit = new(medianOf(of[goEcho], r.of))
		}
		rows = append(rows, row)
	}
	return rows
}

// sizeRows turns the rest into rows.
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
			Name: "100,000 names: change in a snapshot to answer, p99; peer: in the API server, with its cache", Value: ms(s.changes[len(s.changes)*99/100]), Unit: "ms",
			Bar: new(20.0), Better: metric.Lower, Peer: new(ms(s.peerChanges[len(s.peerChanges)*99/100])),
		},
		{
			Name: "100,000 names: restart of isthmus-agent without API server, to the first right answer; peer: none, SERVFAIL", Value: ms(s.restarts[len(s.restarts)/2]), Unit: "ms",
			Bar: new(1000.0), Better: metric.Lower,
		},
	}
}

// medianRatio returns the median over the rounds of a/b.
func medianRatio(a, b []sample, of func(sample) float64) float64 {
	ratios := make([]float64, len(a))
	for i := range a {
		ratios[i] = of(a[i]) / of(b[i])
	}
	return metric.Median(ratios)
}

func medianOf(s []sample, of func(sample) float64) float64 {
	values := make([]float64, len(s))
	for i := range s {
		values[i] = of(s[i])
	}
	return metric.Median(values)
}
