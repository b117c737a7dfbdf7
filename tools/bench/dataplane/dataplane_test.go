package dataplane

import (
	"os"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// One small round, to see that every road leads to the backend and every row comes out; what the rows say is
// for a quiet machine.
func TestRun(t *testing.T) {
	netlab.Privileged(t)
	small := sizes{
		one: services.Set{Services: 1, Endpoints: 3}, many: services.Set{Services: 20, Endpoints: 3},
		phase: 5 * time.Millisecond, turns: 2,
	}
	rows, err := run(t.Context(), small, 1, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, r := range rows {
		if seen[r.Name] {
			t.Errorf("two rows %q", r.Name)
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
		"BPF, socket path: connect4, a run",
		"BPF, socket path, many: recvmsg4, a run",
		"BPF, packet slow path: from_client, a run",
		"BPF, empty program: connect4, a run",
		"BPF, empty program: classifier, a run",
		"BPF, socket path: connect4 / reference, socket path with socket storage",
		"BPF, socket path: connect4 / reference, socket path",
		"BPF, packet slow path: to_client / reference, packet slow path",
		"BPF, packet fast path: from_network / reference, packet fast path",
		"BPF, packet fast path: from_network, a run",
		"one endpoint moves at 20 x 3, snapshot to maps, p99",
		"kernel: memory of all maps at 20 x 3",
		"isthmus-agent: memory at 20 x 3, at rest",
	} {
		if !seen[want] {
			t.Errorf("no row %q", want)
		}
	}
}

func TestMedian(t *testing.T) {
	for want, values := range map[float64][]float64{1: {1}, 2: {3, 1, 2}, 2.5: {4, 1, 3, 2}} {
		if got := metric.Median(values); got != want {
			t.Errorf("metric.Median(%v) = %v, want %v", values, got, want)
		}
	}
}

func at(us ...int) []sample {
	s := make([]sample, len(us))
	for i := range us {
		s[i].cpu = time.Duration(us[i]) * time.Microsecond
	}
	return s
}

// The ratio is taken round by round: a round that is slow on both roads does not count twice.
func TestMedianRatio(t *testing.T) {
	if got := medianRatio(at(110, 1100, 330), at(100, 1000, 100), cpu); got != 1.1 {
		t.Errorf("median ratio %v, want 1.1", got)
	}
}

func TestMedianShare(t *testing.T) {
	// It adds nothing, a tenth and all of what the peer adds.
	if got := medianShare(at(100, 101, 120), at(110, 110, 120), at(100, 100, 100), cpu); got != 0.9 {
		t.Errorf("median share %v, want 0.9", got)
	}
}

// A program is compared with its reference round by round, and with an empty one where it leaves alone what it meets.
func TestCostRows(t *testing.T) {
	c := costs{
		{leastSocket, "connect4"}: {100, 100, 100}, {leastStorage, "connect4"}: {473, 946, 473}, {floor, "classifier"}: {10, 10, 10},
		{leastSlow, "from_client"}: {90, 90, 90}, {leastSlow, "to_client"}: {90, 90, 90},
		{leastFast, "from_client"}: {180, 180, 180}, {leastFast, "from_network"}: {180, 180, 180},
		{socketOne, "connect4"}: {200, 1892, 400}, {packetSlow, "to_client"}: {135, 900, 120}, {packetSlow, "to_network"}: {12, 12, 12},
	}
	want := map[string]struct{ value, limit float64 }{
		"BPF, socket path: connect4, a run":                                                     {400, 100},
		"BPF, socket path: connect4 / reference, socket path":                                   {4, 1},
		"BPF, socket path: connect4 / reference, socket path with socket storage":               {400.0 / 473, 1},
		"BPF, packet slow path: to_client, a run":                                               {135, 90},
		"BPF, packet slow path: to_client / reference, packet slow path":                        {1.5, 1},
		"BPF, packet slow path: to_network, a run":                                              {12, 10},
		"BPF, this machine / that of the bars in ns: the least of a packet":                     {1.5, 0},
		"BPF, this machine / that of the bars in ns: the least of connect4 with socket storage": {1, 0},
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
