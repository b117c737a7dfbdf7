package bgp

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
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

// mayBeRealtime reports whether the kernel gives a thread of this process a real-time priority. It refuses that in a cgroup of
// version 1 without a real-time budget.
func mayBeRealtime(t *testing.T) bool {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.SchedSetAttr(0, &unix.SchedAttr{Policy: unix.SCHED_RR, Priority: 1}, 0); err != nil {
		return !errors.Is(err, unix.EPERM)
	}
	return true // the cleanup of the test takes the priority back
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
	var log bytes.Buffer
	s := New(Config{Realtime: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
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
	if !mayBeRealtime(t) {
		if n := policies(t); n[unix.SCHED_RR] > 0 || !strings.Contains(log.String(), "cpu.rt_runtime_us") {
			t.Errorf("in a cgroup without real-time threads have policies %v, and the log has %q", n, log.String())
		}
		return
	}
	if n := policies(t); n[unix.SCHED_RR] == 0 || len(n) > 1 {
		t.Errorf("with BFD threads have policies %v", n)
	}
}
