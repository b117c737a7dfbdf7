package bgp

import (
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// policies returns the number of threads of this process by scheduling policy.
func policies(t *testing.T) map[uint32]int {
	t.Helper()
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	n := map[uint32]int{}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			t.Fatal(err)
		}
		if a, err := unix.SchedGetAttr(id, 0); err == nil {
			n[a.Policy]++
		}
	}
	return n
}

// With BFD, all threads of the process get a real-time priority; without BFD, none does.
func TestRealtime(t *testing.T) {
	netlab.Privileged(t)
	t.Cleanup(func() {
		if err := schedule(unix.SCHED_NORMAL, 0); err != nil {
			t.Error(err)
		}
	})
	router := netip.MustParseAddr("192.0.2.1")
	s := New(Config{Realtime: true, Log: slog.New(slog.DiscardHandler)})
	s.enableRealtime(map[netip.Addr]neighbour{router: {asn: 65000}})
	if n := policies(t); n[unix.SCHED_RR] > 0 {
		t.Errorf("without BFD threads have policies %v", n)
	}
	s.enableRealtime(map[netip.Addr]neighbour{router: {asn: 65000, bfd: desired.BFD{IntervalMillis: 100, Multiplier: 3}}})
	var threads sync.WaitGroup
	for range 20 {
		threads.Go(func() { _, _ = os.ReadDir("/proc/self") }) // a thread that blocks in the kernel lets another one start
	}
	threads.Wait()
	if n := policies(t); n[unix.SCHED_RR] == 0 || len(n) > 1 {
		t.Errorf("with BFD threads have policies %v", n)
	}
}
