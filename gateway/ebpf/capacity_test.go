package ebpf

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The default capacity takes a sixteenth of the memory, within limits.
func TestDefaultFlows(t *testing.T) {
	t.Parallel()
	for gib, want := range map[float64]int{0.01: 1024, 1: 39945, 4: 159783, 16: 639132, 256: 1048576} {
		if have := flowsIn(uint64(gib * (1 << 30))); have != want {
			t.Errorf("%v GiB: %d connections, want %d", gib, have, want)
		}
	}
}

// The CPUs together begin a quarter of the half-open entries that there is room for.
func TestHalfOpenMax(t *testing.T) {
	t.Parallel()
	for list, want := range map[string]uint32{"0": 1, "0-3": 4, "0-3,6": 5, "0,2-3,8-15": 11} {
		if have, err := countCPUs(list); have != want || err != nil {
			t.Errorf("%s: %d CPUs, %v, want %d", list, have, err, want)
		}
	}
	for _, list := range []string{"", "x", "3-", "3-1"} {
		if n, err := countCPUs(list); err == nil {
			t.Errorf("%q has %d CPUs", list, n)
		}
	}
	for cpus, want := range map[uint32]uint32{1: 131072, 2: 65536, 64: 2048, 65535: 8} {
		if have := halfOpenMax(131072*entriesPerFlow, cpus); have != want {
			t.Errorf("%d CPUs: %d entries each, want %d", cpus, have, want)
		}
	}
}

// The maps have the size of the flag, and the program the limit that follows from it. They keep their size when a process with another
// flag takes over, which says so.
func TestCapacity(t *testing.T) {
	netlab.Privileged(t)
	bpffs := netlab.BPFFS(t)
	for _, flows := range []int{2048, 1024} {
		var log strings.Builder
		v, err := thisVersion()
		if err != nil {
			t.Fatal(err)
		}
		b, err := openVersion(Config{BPFFS: bpffs, Devices: []string{"lo"}, Flows: flows, Log: slog.New(slog.NewTextHandler(&log, nil))}, v)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]uint32{bpf.MapFlows: 8192, bpf.MapHandshakes: 8192, bpf.MapUDPFlows: 4096} {
			if have := b.k.maps[name].MaxEntries(); have != want {
				t.Errorf("%s has room for %d entries, want %d", name, have, want)
			}
		}
		var limit uint32
		if err := v.spec.Variables[bpf.VarHalfOpenMax].Get(&limit); err != nil || limit > 8192/4 {
			t.Errorf("a CPU begins %d half-open entries, %v", limit, err)
		}
		if told := strings.Contains(log.String(), "keeps its size"); told != (flows != 2048) {
			t.Errorf("%d connections: %s", flows, log.String())
		}
		if err := b.Close(t.Context(), false); err != nil {
			t.Error(err)
		}
	}
}
