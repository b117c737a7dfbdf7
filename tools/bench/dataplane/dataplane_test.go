package dataplane

import (
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// TestRun runs one small round: every path reaches the backend and every row has a value. The values only mean something on a
// quiet machine.
func TestRun(t *testing.T) {
	netlab.Privileged(t)
	small := sizes{
		one: services.Set{Services: 1, Endpoints: 3}, many: services.Set{Services: 20, Endpoints: 3},
		phase: time.Millisecond, turns: 3,
	}
	rows, err := run(t.Context(), small, 1, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, r := range rows {
		if seen[r.Name] {
			t.Errorf("two rows are named %q", r.Name)
		}
		seen[r.Name] = true
		if r.Value <= 0 && r.Better == metric.Lower || r.Unit == "ratio" && r.Value > 100 {
			t.Errorf("%s: %v %s makes no sense", r.Name, r.Value, r.Unit)
		}
	}
	for _, want := range []string{
		"socket path: CPU per short TCP connection / direct",
		"kube-proxy at 10,000 services: UDP with 32 in flight, replies / direct",
		"socket path: share of kube-proxy's added CPU removed",
		"packet fast path: share of kube-proxy's added CPU removed",
		"packet fast path at 10,000 services: CPU per short TCP connection / redirected, no load balancer",
		"packet fast path at 10,000 services: UDP with 32 in flight, replies / redirected, no load balancer",
		"BPF, socket path: connect4, per run",
		"BPF, socket path, many: recvmsg4, per run",
		"BPF, packet slow path: from_client, per run",
		"BPF, packet slow path: from_client, per run with short connections",
		"BPF, empty program: connect4, per run",
		"BPF, empty program: classifier, per run",
		"BPF, socket path: connect4 / reference, socket path with socket storage",
		"BPF, socket path: connect4 / reference, socket path",
		"BPF, packet slow path: to_client / reference, packet slow path",
		"BPF, packet fast path: from_network / reference, packet fast path",
		"BPF, packet fast path: from_network, per run",
		"one endpoint moves at 20 x 3, snapshot to maps, p99",
		"kernel: memory of all maps at 20 x 3",
		"isthmus-agent: memory at 20 x 3, at rest",
	} {
		if !seen[want] {
			t.Errorf("no row %q", want)
		}
	}
}

// taken returns pairs with the given microseconds of CPU, on the path and on the direct path.
func taken(us ...[2]int) []pair {
	var found []pair
	for _, u := range us {
		found = append(found, pair{sample{cpu: time.Duration(u[0]) * time.Microsecond}, sample{cpu: time.Duration(u[1]) * time.Microsecond}})
	}
	return found
}

// The ratio is taken pair by pair: a burst that slows down both paths does not count twice.
func TestMedianRatio(t *testing.T) {
	found := taken([2]int{110, 100}, [2]int{1100, 1000}, [2]int{330, 100}, [2]int{100, 100})
	if got := medianRatio(found, cpu); got != 1.1 {
		t.Errorf("median ratio %v, want 1.1", got)
	}
	if got, want := *quartiles(found, cpu), [2]float64{1.1, 3.3}; got != want {
		t.Errorf("quartiles %v, want %v", got, want)
	}
}

func TestShare(t *testing.T) {
	if got := share(taken([2]int{101, 100}), taken([2]int{220, 200}), cpu); math.Abs(got-0.9) > 1e-9 {
		t.Errorf("share %v, want 0.9: it adds a tenth of the peer's cost", got)
	}
}

// Each turn reverses the order of the paths, and skips those that this kind of traffic cannot take.
func TestTakeTurns(t *testing.T) {
	b := &testbed{sizes: sizes{turns: 1}}
	var order []string
	err := b.takeTurns(kind{name: rrUDPUnconnected, turnFactor: 3}, []path{{name: "a"}, {name: "b"}, {name: "c", connected: true}}, func(turn int, via path) error {
		order = append(order, fmt.Sprint(turn, via.name))
		return nil
	})
	if want := []string{"0a", "0b", "1b", "1a", "2a", "2b"}; err != nil || !slices.Equal(order, want) {
		t.Errorf("%v, %v, want %v", order, err, want)
	}
}

func TestSample(t *testing.T) {
	if got, want := newSample(30, []time.Duration{9, 1, 5}), (sample{cpu: 10, p50: 5, mean: 5}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

// A program is compared with its reference round by round, or with the empty program if it only passes traffic on.
func TestCostRows(t *testing.T) {
	c := costs{known: runCosts{
		{emptyProgram, "classifier"}: {10, 10, 10}, {referenceSlow, "from_client"}: {90, 90, 90}, {referenceSlow, "to_client"}: {90, 90, 90},
		{referenceFast, "from_client"}: {180, 180, 180}, {referenceFast, "from_network"}: {180, 180, 180},
		{packetSlow, "to_client"}: {135, 900, 120}, {packetSlow, "to_network"}: {12, 12, 12}, {socketOne, "connect4"}: {1, 1, 1},
		{socketOne, "recvmsg4"}: {20, 20, 20}, {emptyProgram, "recvmsg4"}: {5, 5, 5},
	}, short: runCosts{
		{referenceSocket, "connect4"}: {100, 100, 100}, {referenceStorage, "connect4"}: {473, 946, 473}, {socketOne, "connect4"}: {200, 1892, 400},
		{referenceSlow, "to_client"}: {95, 95, 95}, {packetSlow, "to_client"}: {300, 300, 300},
	}}
	want := map[string]struct{ value, limit float64 }{
		"BPF, socket path: connect4, per run":                                                   {400, 100},
		"BPF, socket path: recvmsg4, per run":                                                   {20, 5},
		"BPF, socket path: connect4 / reference, socket path":                                   {4, 1},
		"BPF, socket path: connect4 / reference, socket path with socket storage":               {400.0 / 473, 1},
		"BPF, packet slow path: to_client, per run":                                             {135, 90},
		"BPF, packet slow path: to_client, per run with short connections":                      {300, 95},
		"BPF, packet slow path: to_client / reference, packet slow path":                        {1.5, 1},
		"BPF, packet slow path: to_network, per run":                                            {12, 10},
		"BPF, this machine / the machine that set the bars in ns: reference packet translation":           {1.5, 0},
		"BPF, this machine / the machine that set the bars in ns: reference connect4 with socket storage": {1, 0},
	}
	for _, r := range costRows(c) {
		w, ok := want[r.Name]
		if !ok {
			continue
		}
		delete(want, r.Name)
		limit := 0.0
		if r.Limit != nil {
			limit = *r.Limit
		}
		if r.Value != w.value || limit != w.limit {
			t.Errorf("%s: %v, limit %v; want %v", r.Name, r.Value, limit, w)
		}
	}
	for name := range want {
		t.Errorf("no row %q", name)
	}
}
