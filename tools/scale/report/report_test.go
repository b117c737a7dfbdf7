package report

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

func sample() Report {
	return Report{
		Machine: "2 x CPU", Storage: "etcd in memory", Members: 9, Real: []string{"a"}, Exports: 1000, Endpoints: 20, Services: 1000, RemoteEndpoints: 180_000,
		FirstImport: FirstImport{Seconds: 12.34, Load: Load{Seconds: 12}},
		Steady:      Load{Seconds: 30},
		Churn: OfLoad(simulation.Load{
			Took: 10 * time.Second, Controller: 2 * time.Second, Machine: 12 * time.Second,
			RSS: 100 << 20, Peak: 120 << 20, Sent: 10_000, Received: 2_000_000,
			Broker:   simulation.Server{API: 5 * time.Second, Etcd: time.Second, Requests: map[string]float64{"PUT endpointslices": 500, "PUT leases": 20}},
			Importer: simulation.Server{API: time.Second, Requests: map[string]float64{"PATCH endpointslices": 490, "PUT leases": 7, "GET leases": 1}},
		}),
		Propagation: OfPropagation(simulation.Propagation{Changes: 500, Rate: 50, P50: 12 * time.Millisecond, P99: 80 * time.Millisecond, Max: time.Second}),
		Restart:     OfRestart(simulation.Restart{Synced: 2500 * time.Millisecond, Writes: 1}),
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := sample().WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"1000 services, 180000 endpoints", "p50 12.0 ms, p99 80.0 ms, max 1000.0 ms", "2.5 s, 1 writes",
		"0.50 CPU", "0.10 CPU", "0.30 CPU", "120 MiB", "200.0 kB/s", "2940.0 /min", "churn, a: PATCH endpointslices",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, &out)
		}
	}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := sample().WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var have Report
	if err := json.Unmarshal(out.Bytes(), &have); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample(), have); diff != "" {
		t.Errorf("read back (-want +have):\n%s", diff)
	}
}
