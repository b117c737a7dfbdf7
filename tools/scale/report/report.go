// Package report formats the result of a run of the scale tool as JSON and as text.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// Report is the result of one run. Other programs read its JSON, so fields are only ever added.
type Report struct {
	Machine         string   `json:"machine"`
	Storage         string   `json:"storage"`
	Members         int      `json:"members"` // simulated members
	Real            []string `json:"real"`
	Exports         int      `json:"exports"`   // per member
	Endpoints       int      `json:"endpoints"` // per export
	Distinct        bool     `json:"distinct"`  // every member has its own Services
	Services        int      `json:"services"`  // imported by a
	RemoteEndpoints int      `json:"remoteEndpoints"`

	FirstImport FirstImport `json:"firstImport"`
	Steady      Load        `json:"steady"` // without changes
	Churn       Load        `json:"churn"`
	Propagation Propagation `json:"propagation"` // during churn
	Restart     Restart     `json:"restart"`
}

// FirstImport is the first import into an empty member: the times from the start of its controller until all Services were
// usable, and until all statuses were written.
type FirstImport struct {
	Seconds  float64 `json:"seconds"`
	Reported float64 `json:"reportedSeconds"`
	Load     Load    `json:"load"`
}

// Propagation contains the latencies from the exporter to a, in milliseconds.
type Propagation struct {
	Changes   int     `json:"changes"`
	PerSecond float64 `json:"perSecond"`
	Missing   int     `json:"missing"` // never arrived
	P50       float64 `json:"p50Milliseconds"`
	P99       float64 `json:"p99Milliseconds"`
	Max       float64 `json:"maxMilliseconds"`
}

// Load is the cost of a period. CPU is in processors: 0.5 is half a processor.
type Load struct {
	Seconds          float64            `json:"seconds"`
	BrokerAPIServer  float64            `json:"brokerAPIServerCPU"`
	BrokerEtcd       float64            `json:"brokerEtcdCPU"`
	ImporterServer   float64            `json:"importerAPIServerCPU"` // a's
	ImporterEtcd     float64            `json:"importerEtcdCPU"`
	Controller       float64            `json:"controllerCPU"`
	Others           float64            `json:"otherCPU"`               // all other processes on the machine, this tool included
	RSS              int64              `json:"controllerRSSBytes"`     // at the end
	Peak             int64              `json:"controllerPeakRSSBytes"` // peak
	ToBroker         int64              `json:"toBrokerBytes"`
	FromBroker       int64              `json:"fromBrokerBytes"`
	Writes           float64            `json:"writes"` // to a, Leases excluded
	BrokerRequests   map[string]float64 `json:"brokerRequests"`
	ImporterRequests map[string]float64 `json:"importerRequests"` // to a's API server
}

// Restart is a restart of the controller with nothing to write.
type Restart struct {
	Seconds float64 `json:"seconds"` // until it was ready and had reconciled every Service
	Writes  float64 `json:"writes"`
	RSS     int64   `json:"controllerRSSBytes"`
	Peak    int64   `json:"controllerPeakRSSBytes"`
}

// OfLoad converts l.
func OfLoad(l simulation.Load) Load {
	seconds := l.Took.Seconds()
	others := max(0, l.Machine-l.Broker.API-l.Broker.Etcd-l.Importer.API-l.Importer.Etcd-l.Controller)
	return Load{
		Seconds:         seconds,
		BrokerAPIServer: l.Broker.API.Seconds() / seconds, BrokerEtcd: l.Broker.Etcd.Seconds() / seconds,
		ImporterServer: l.Importer.API.Seconds() / seconds, ImporterEtcd: l.Importer.Etcd.Seconds() / seconds,
		Controller: l.Controller.Seconds() / seconds, Others: others.Seconds() / seconds,
		RSS: l.RSS, Peak: l.Peak, ToBroker: l.Sent, FromBroker: l.Received,
		Writes: simulation.Writes(l.Importer.Requests), BrokerRequests: l.Broker.Requests, ImporterRequests: l.Importer.Requests,
	}
}

// OfPropagation converts p.
func OfPropagation(p simulation.Propagation) Propagation {
	return Propagation{Changes: p.Changes, PerSecond: p.Rate, Missing: p.Missing, P50: ms(p.P50), P99: ms(p.P99), Max: ms(p.Max)}
}

// OfRestart converts r.
func OfRestart(r simulation.Restart) Restart {
	return Restart{Seconds: r.Synced.Seconds(), Writes: r.Writes, RSS: r.RSS, Peak: r.Peak}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// WriteJSON writes r to w, indented.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes r to w as text for people.
func (r Report) WriteText(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("machine", "%s", r.Machine)
	row("storage", "%s", r.Storage)
	row("members", "%d simulated, real: %v", r.Members, r.Real)
	row("imported into a", "%d services, %d endpoints", r.Services, r.RemoteEndpoints)
	row("first import", "%.1f s, statuses %.1f s, %.0f writes", r.FirstImport.Seconds, r.FirstImport.Reported, r.FirstImport.Load.Writes)
	row("propagation", "p50 %.1f ms, p99 %.1f ms, max %.1f ms", r.Propagation.P50, r.Propagation.P99, r.Propagation.Max)
	row("", "%d changes at %.1f/s, %d missing", r.Propagation.Changes, r.Propagation.PerSecond, r.Propagation.Missing)
	row("restart to synced", "%.1f s, %.0f writes", r.Restart.Seconds, r.Restart.Writes)
	fmt.Fprintln(table)
	loads := []struct {
		name string
		Load
	}{{"first import", r.FirstImport.Load}, {"steady", r.Steady}, {"churn", r.Churn}}
	fmt.Fprint(table, "cost")
	for _, l := range loads {
		fmt.Fprintf(table, "\t%s (%.0f s)", l.name, l.Seconds)
	}
	fmt.Fprintln(table)
	for _, line := range []struct {
		name, format string
		of           func(Load) float64
	}{
		{"broker kube-apiserver", "%.2f CPU", func(l Load) float64 { return l.BrokerAPIServer }},
		{"broker etcd", "%.2f CPU", func(l Load) float64 { return l.BrokerEtcd }},
		{"a's kube-apiserver", "%.2f CPU", func(l Load) float64 { return l.ImporterServer }},
		{"a's etcd", "%.2f CPU", func(l Load) float64 { return l.ImporterEtcd }},
		{"controller", "%.2f CPU", func(l Load) float64 { return l.Controller }},
		{"others on this machine", "%.2f CPU", func(l Load) float64 { return l.Others }},
		{"controller RSS at the end", "%.0f MiB", func(l Load) float64 { return mib(l.RSS) }},
		{"controller RSS at most", "%.0f MiB", func(l Load) float64 { return mib(l.Peak) }},
		{"controller to broker", "%.1f kB/s", func(l Load) float64 { return float64(l.ToBroker) / 1e3 / l.Seconds }},
		{"broker to controller", "%.1f kB/s", func(l Load) float64 { return float64(l.FromBroker) / 1e3 / l.Seconds }},
		{"writes to a", "%.1f /min", func(l Load) float64 { return l.Writes / l.Seconds * 60 }},
	} {
		fmt.Fprint(table, line.name)
		for _, l := range loads {
			fmt.Fprintf(table, "\t"+line.format, line.of(l.Load))
		}
		fmt.Fprintln(table)
	}
	for _, l := range loads {
		for _, server := range []struct {
			name     string
			requests map[string]float64
		}{{"broker", l.BrokerRequests}, {"a", l.ImporterRequests}} {
			for _, what := range slices.Sorted(maps.Keys(server.requests)) {
				row(fmt.Sprintf("%s, %s: %s", l.name, server.name, what), "%.0f", server.requests[what])
			}
		}
	}
	return table.Flush()
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
