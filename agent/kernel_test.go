package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The test binary is also two other programs: an agent that can be killed, and one without privileges.
const (
	childAgent   = "ISTHMUS_TEST_AGENT"   // "<cgroup> <bpffs> <backend>"
	childLimited = "ISTHMUS_TEST_LIMITED" // "<cgroup> <bpffs>"
)

func TestMain(m *testing.M) {
	if args := os.Getenv(childAgent); args != "" {
		os.Exit(report(runAgent(strings.Fields(args))))
	}
	if args := os.Getenv(childLimited); args != "" {
		os.Exit(report(runLimited(strings.Fields(args))))
	}
	os.Exit(netlab.Main(m))
}

func report(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// runAgent serves one Service until it is killed. It prints "ready" once it serves.
func runAgent(args []string) error {
	a, err := New(context.Background(), Config{CgroupRoot: args[0], BPFFS: args[1], Topology: Topology{Ranges: ranges}}, discard)
	if err != nil {
		return err
	}
	if err := a.Sync(context.Background(), snapshot(1, args[2])); err != nil {
		return err
	}
	if _, err := io.WriteString(os.Stdout, "ready\n"); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin) // ends with the test at the latest
	return errors.Join(err, a.Close())
}

// echoServer answers every connection with one byte.
func echoServer(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	netlab.Answer(t, l, func(c net.Conn) { _, _ = c.Write([]byte("!")) })
	return l.Addr().String()
}

func testConfig(t *testing.T) Config {
	t.Helper()
	return Config{CgroupRoot: netlab.NewTestCgroup(t).Path, BPFFS: netlab.BPFFS(t), Topology: Topology{Ranges: ranges}}
}

// dialer connects to the VIP in a loop until it is stopped, and counts the connections.
type dialer struct {
	stop       context.CancelFunc
	wg         sync.WaitGroup
	ok, failed atomic.Int64
	firstErr   atomic.Pointer[error]
}

func startDialer(t *testing.T) *dialer {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	d := &dialer{stop: cancel}
	for range 2 {
		d.wg.Go(func() {
			for ctx.Err() == nil {
				if err := dialOnce(context.WithoutCancel(ctx)); err != nil {
					d.failed.Add(1)
					d.firstErr.CompareAndSwap(nil, &err)
				} else {
					d.ok.Add(1)
				}
			}
		})
	}
	t.Cleanup(func() { d.finish() })
	return d
}

func (d *dialer) finish() { d.stop(); d.wg.Wait() }

// waitFor returns after n more connections.
func (d *dialer) waitFor(t *testing.T, n int64) {
	t.Helper()
	tick, late := time.NewTicker(time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for until := d.ok.Load() + n; d.ok.Load() < until && d.failed.Load() == 0; {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%d connections in a minute, waiting for %d", d.ok.Load(), until)
		}
	}
}

func (d *dialer) check(t *testing.T) {
	t.Helper()
	d.finish()
	if n := d.failed.Load(); n > 0 {
		t.Errorf("%d of %d connections failed, the first one: %v", n, n+d.ok.Load(), *d.firstErr.Load())
	}
	t.Logf("%d connections", d.ok.Load())
}

func dialOnce(ctx context.Context) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", "243.0.0.1:80")
	if err != nil {
		return err
	}
	_, err = io.ReadAll(c)
	return errors.Join(err, c.Close())
}

// The agent restarts while clients connect: no connection fails, and nothing is written.
func TestRestartUnderTraffic(t *testing.T) {
	cfg, backend := testConfig(t), echoServer(t)
	open := func() *Agent {
		a, err := New(t.Context(), cfg, discard)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	a := open()
	mustSync(t, a, snapshot(1, backend))
	d := startDialer(t)
	for range 5 {
		d.waitFor(t, 100)
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		d.waitFor(t, 100)
		a = open()
		mustSync(t, a, snapshot(1, backend))
		if n := a.Status().Writes; n != 0 {
			t.Errorf("a restart cost %d writes", n)
		}
	}
	d.check(t)
	if err := errors.Join(a.Status().Ready(), a.Close()); err != nil {
		t.Error(err)
	}
}

// A ServiceImport that names the address of the API server, without endpoints, would refuse every connection to it. The kernel
// never gets such a frontend, and other Services are served.
func TestImportCannotTakeTheAPIServer(t *testing.T) {
	apiServer, err := netip.ParseAddrPort(echoServer(t))
	if err != nil {
		t.Fatal(err)
	}
	snap := snapshot(2, echoServer(t))
	evil := &snap.Services[1]
	evil.IPs, evil.Ports[0].Port, evil.Slices = []netip.Addr{apiServer.Addr()}, apiServer.Port(), nil
	for name, topology := range map[string]Topology{
		"outside of the ranges":   {Ranges: ranges},
		"inside, and the cluster": {Ranges: append(slices.Clone(ranges), netip.MustParsePrefix("127.0.0.0/8")), Own: []lb.Own{{Prefix: netip.MustParsePrefix("127.0.0.1/32"), Use: "Services"}}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			cfg.Topology = topology
			a, err := New(t.Context(), cfg, discard)
			if err != nil {
				t.Fatal(err)
			}
			mustSync(t, a, snap)
			for _, at := range []string{apiServer.String(), "243.0.0.1:80"} {
				c, err := new(net.Dialer).DialContext(t.Context(), "tcp", at)
				if err != nil {
					t.Errorf("connect to %s: %v", at, err)
					continue
				}
				if answer, err := io.ReadAll(c); string(answer) != "!" {
					t.Errorf("%s answers %q, %v", at, answer, err)
				}
				_ = c.Close()
			}
			if s := a.Status(); len(s.Problems) != 1 || s.Problems[0].Service != evil.Service || !s.Problems[0].Reason.RefusesVIP() {
				t.Errorf("problems %v, want one of %s", s.Problems, evil.Service)
			}
			if err := errors.Join(a.Status().Ready(), a.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Traffic goes on while a killed agent stays down, and the next agent writes nothing.
func TestKilledAgentLosesNothing(t *testing.T) {
	cfg, backend := testConfig(t), echoServer(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s", childAgent, cfg.CgroupRoot, cfg.BPFFS, backend))
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the agent said %q, %v", line, err)
	}
	d := startDialer(t)
	d.waitFor(t, 200)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the error says that the process was killed
	d.waitFor(t, 1000)

	a, err := New(t.Context(), cfg, discard)
	if err != nil {
		t.Fatal(err)
	}
	mustSync(t, a, snapshot(1, backend))
	if n := a.Status().Writes; n != 0 {
		t.Errorf("the next agent wrote %d entries", n)
	}
	d.check(t)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

func TestCleanupRemovesEverything(t *testing.T) {
	cfg, backend := testConfig(t), echoServer(t)
	a, err := New(t.Context(), cfg, discard)
	if err != nil {
		t.Fatal(err)
	}
	mustSync(t, a, snapshot(1, backend))
	if err := dialOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.Close(), Cleanup(cfg)); err != nil {
		t.Fatal(err)
	}
	if err := dialOnce(t.Context()); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("after the cleanup: %v, want %v", err, unix.ENETUNREACH)
	}
	if _, err := os.Stat(filepath.Join(cfg.BPFFS, "isthmus")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left: %v", err)
	}
}

// The agent needs three capabilities, and not SYS_ADMIN.
func TestThreeCapabilitiesAreEnough(t *testing.T) {
	cfg := testConfig(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s", childLimited, cfg.CgroupRoot, cfg.BPFFS))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// runLimited drops all capabilities but those that the DaemonSet grants, and runs an agent from start to cleanup.
func runLimited(args []string) error {
	const stripped = "ISTHMUS_TEST_STRIPPED"
	if os.Getenv(stripped) == "" {
		// The bounding set belongs to a thread and is inherited by exec, which also makes root's
		// capabilities from it.
		runtime.LockOSThread()
		if err := limitBoundingSet(unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON); err != nil {
			return err
		}
		return syscall.Exec(os.Args[0], os.Args, append(os.Environ(), stripped+"=1"))
	}
	if err := onlyHas(1<<unix.CAP_BPF | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_PERFMON); err != nil {
		return err
	}
	ctx, cfg := context.Background(), Config{CgroupRoot: args[0], BPFFS: args[1], Topology: Topology{Ranges: ranges}}
	for i, backends := range [][]string{{"10.1.0.1:8080"}, {"10.1.0.1:8080"}, nil} {
		a, err := New(ctx, cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return fmt.Errorf("start %d: %w", i, err)
		}
		if err := a.Sync(ctx, snapshot(2, backends...)); err != nil {
			return fmt.Errorf("sync %d: %w", i, err)
		}
		s := a.Status()
		if err := errors.Join(s.Ready(), a.Close()); err != nil {
			return fmt.Errorf("status %d: %w", i, err)
		}
		if want := []uint64{10, 0, 6}[i]; s.Writes != want {
			return fmt.Errorf("start %d: %d writes, want %d", i, s.Writes, want)
		}
		if s.Refusals == nil {
			return fmt.Errorf("start %d: refusals cannot be read", i)
		}
	}
	return Cleanup(cfg)
}

// limitBoundingSet drops every capability but keep from the bounding set of this thread.
func limitBoundingSet(keep ...uintptr) error {
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		kept := false
		for _, k := range keep {
			kept = kept || k == c
		}
		if kept {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}

// onlyHas reports whether the effective capabilities of this process are these.
func onlyHas(want uint64) error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&head, &sets[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if have := uint64(sets[0].Effective) | uint64(sets[1].Effective)<<32; have != want {
		return fmt.Errorf("capabilities are %#x, want %#x", have, want)
	}
	return nil
}

// 10,000 Services of 10 backends: the first snapshot, and the same snapshot again.
func BenchmarkSync(b *testing.B) {
	fs := netlab.BPFFS(b)
	cfg := Config{CgroupRoot: netlab.NewTestCgroup(b).Path, BPFFS: fs, Topology: Topology{Ranges: ranges}}
	full, empty := large(10000), &cs.Snapshot{}
	a, err := New(b.Context(), cfg, discard)
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	b.Run("program", func(b *testing.B) {
		for b.Loop() {
			if err := a.Sync(b.Context(), full); err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if err := a.Sync(b.Context(), empty); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
	if err := a.Sync(b.Context(), full); err != nil {
		b.Fatal(err)
	}
	b.Run("unchanged", func(b *testing.B) {
		for b.Loop() {
			if err := a.Sync(b.Context(), full); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("one endpoint", func(b *testing.B) {
		less := &cs.Snapshot{Services: slices.Clone(full.Services)}
		svc := &less.Services[5000]
		svc.Slices = slices.Clone(svc.Slices[1:])
		snapshots, took := [2]*cs.Snapshot{less, full}, []time.Duration{}
		for b.Loop() {
			began := time.Now()
			if err := a.Sync(b.Context(), snapshots[len(took)%2]); err != nil {
				b.Fatal(err)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
	})
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			next, err := New(b.Context(), cfg, discard)
			if err != nil {
				b.Fatal(err)
			}
			if err := errors.Join(next.Sync(b.Context(), full), next.Close()); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// large returns a snapshot of n Services with ten backends each.
func large(n int) *cs.Snapshot {
	snap := &cs.Snapshot{}
	for i := range n {
		backends := make([]string, 10)
		for j := range backends {
			backends[j] = fmt.Sprintf("10.%d.%d.%d:8080", j+1, i/250, i%250+1)
		}
		svc := snapshot(1, backends...).Services[0]
		svc.Service.Name = fmt.Sprint("s", i)
		svc.IPs[0] = netip.AddrFrom4([4]byte{243, 0, byte(i / 250), byte(i%250 + 1)})
		snap.Services = append(snap.Services, svc)
	}
	return snap
}
