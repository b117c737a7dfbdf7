package datapath

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// nextABI turns a build into one of the next ABI, whose maps have another layout.
func nextABI(b build) build {
	b.abi++
	for _, spec := range b.specs {
		if m := spec.Maps[bpf.MapFrontends]; m != nil {
			m.MaxEntries /= 2
		}
	}
	return b
}

// serving is a state in which 243.0.0.5:80 leads to a listener on loopback.
func serving(port uint16) lb.State {
	s := lb.NewState()
	s.Services[1] = clusterset.ServiceName{Namespace: "demo", Name: "hello"}
	s.Backends[1] = lb.Backend{Address: lb.Address{
		AddrPort: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), Protocol: clusterset.TCP,
	}}
	s.Slots[lb.Slot{Frontend: 1}] = 1
	s.Frontends[lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.5:80"), Protocol: clusterset.TCP}] = lb.Frontend{ID: 1, Count: 1, Service: 1}
	return s
}

// traffic connects to the VIP in a loop until the test ends, and counts failures once the VIP is served.
type traffic struct {
	port         uint16
	done, failed atomic.Int64
	last         atomic.Value // error
}

func startTraffic(t *testing.T) *traffic {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tr := &traffic{port: uint16(l.Addr().(*net.TCPAddr).Port)}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		running.Wait()
	})
	running.Go(func() {
		pace := time.NewTicker(200 * time.Microsecond) // leaves the machine to the test
		defer pace.Stop()
		for ctx.Err() == nil {
			<-pace.C
			if err := dial(); err == nil {
				tr.done.Add(1)
			} else if tr.done.Load() > 0 {
				tr.failed.Add(1)
				tr.last.Store(err)
			}
		}
	})
	return tr
}

// dial connects to the VIP and closes with a reset, so that no port stays in use.
func dial() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	return errors.Join(err, unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{243, 0, 0, 5}, Port: 80}))
}

// more waits for some more connections.
func (tr *traffic) more(t *testing.T) {
	t.Helper()
	want := tr.done.Load() + 20
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); tr.done.Load() < want; <-tick.C {
		if tr.failed.Load() > 0 || time.Now().After(deadline) {
			t.Fatalf("%d connects made, %d failed: %v", tr.done.Load(), tr.failed.Load(), tr.last.Load())
		}
	}
}

// upgrade does what a starting agent of a build does.
func upgrade(t *testing.T, cfg Config, b build, want lb.State) {
	t.Helper()
	d, err := open(t.Context(), cfg, b, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	have, err := d.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Apply(t.Context(), lbtest.Diff(have, want)); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

// isServedBy checks that every hook runs a program of b, and that nothing of another build is left.
func isServedBy(t *testing.T, cfg Config, b build) {
	t.Helper()
	p := pins{cfg.BPFFS, b.abi}
	r := Reader{pins: p, maps: map[string]*ebpf.Map{}}
	defer r.Close()
	for _, spec := range b.specs {
		for name := range spec.Maps {
			m, err := ebpf.LoadPinnedMap(p.mapPath(name), nil)
			if err != nil {
				t.Fatal(err)
			}
			r.maps[name] = m
		}
	}
	foreign, err := p.foreign(mustCgroup(t, cfg), r.maps)
	if err != nil || foreign {
		t.Errorf("programs of another ABI run: %v, %v", foreign, err)
	}
	want := []string{"isthmus", "isthmus/links", fmt.Sprintf("isthmus/maps-v%d", b.abi), "isthmus/progs"}
	for _, h := range b.hooks {
		want = append(want, "isthmus/links/"+h.Name, "isthmus/progs/"+h.Name)
		l, err := link.LoadPinnedLink(p.linkPath(h.Name), nil)
		if err != nil {
			t.Fatal(err)
		}
		prog, err := p.runningProgram(h.Name, l)
		if err := errors.Join(err, l.Close()); err != nil || prog == nil {
			t.Fatalf("%s runs a program that is not pinned: %v", h.Name, err)
		}
		_ = prog.Close()
	}
	for name := range r.maps {
		want = append(want, fmt.Sprintf("isthmus/maps-v%d/%s", b.abi, name))
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, pinned(t, cfg)); diff != "" {
		t.Errorf("pins (-want +got):\n%s", diff)
	}
}

// Upgrade to the next ABI and back under traffic: no connection fails, and nothing of the other ABI is left.
func TestUpgradeToAnotherABIAndBack(t *testing.T) {
	cfg, tr := testConfig(t), startTraffic(t)
	for range 3 {
		for _, b := range []build{currentVersion(t), nextABI(currentVersion(t))} {
			upgrade(t, cfg, b, serving(tr.port))
			tr.more(t)
			isServedBy(t, cfg, b)
		}
	}
	if n := tr.failed.Load(); n > 0 {
		t.Errorf("%d connects failed, the last one so: %v", n, tr.last.Load())
	}
}

// Nothing changes for clients until the maps of the new ABI are filled, whatever fails.
func TestAnotherABIWaitsForItsMaps(t *testing.T) {
	cfg := testConfig(t)
	upgrade(t, cfg, currentVersion(t), refusing())
	before := linkPrograms(t, cfg)
	next := nextABI(otherVersion(t))
	d, err := open(t.Context(), cfg, next, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	expect(t, d, lb.NewState())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Apply(ctx, lb.Plan{}); !errors.Is(err, context.Canceled) {
		t.Errorf("Apply: %v, want %v", err, context.Canceled)
	}
	if diff := cmp.Diff(before, linkPrograms(t, cfg)); diff != "" {
		t.Errorf("programs (-before +after):\n%s", diff)
	}
	if err := connect(t); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("connect: %v, want %v of the old programs", err, unix.ECONNREFUSED)
	}
	for _, h := range d.Hooks() {
		if !h.Attached {
			t.Errorf("%s is not attached", h.Name)
		}
	}
	// A snapshot may have no Services: the first Apply switches even if it writes nothing.
	if err := d.Apply(t.Context(), lb.Plan{}); err != nil {
		t.Fatal(err)
	}
	if err := connect(t); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("connect: %v, want %v: nothing is translated any more", err, unix.ENETUNREACH)
	}
	isServedBy(t, cfg, next)
}

// A hook that only the other build has is removed with it.
func TestStaleHookIsRemoved(t *testing.T) {
	cfg := testConfig(t)
	all, fewer := nextABI(currentVersion(t)), currentVersion(t)
	fewer.hooks = fewer.hooks[:len(fewer.hooks)-1]
	upgrade(t, cfg, all, refusing())
	upgrade(t, cfg, fewer, refusing())
	isServedBy(t, cfg, fewer)
}

// The points at which an agent of another ABI is killed.
const (
	atOpened  = "opened"  // its maps are empty
	atWritten = "written" // and filled
	atHalf    = "half"    // some hooks run its programs, whose pins are not in their place
	atSwapped = "swapped" // all do; what is old is still there
	atEnd     = "end"
)

// envUpgrade makes this test binary run upgradeAndWait.
const envUpgrade = "ISTHMUS_TEST_UPGRADE"

// upgradeAndWait starts the next ABI on a node, proceeds to the given point and waits to be killed.
func upgradeAndWait() {
	words := strings.Split(os.Getenv(envUpgrade), " ") // place, cgroup, BPF filesystem, port
	err := func() error {
		var port uint16
		if _, err := fmt.Sscan(words[3], &port); err != nil {
			return err
		}
		b, err := currentBuild(false)
		if err != nil {
			return err
		}
		cfg := Config{CgroupRoot: words[1], BPFFS: words[2]}
		return goTo(words[0], cfg, nextABI(b), serving(port))
	}()
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, "there")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

func goTo(place string, cfg Config, b build, want lb.State) error {
	ctx := context.Background()
	d, err := open(ctx, cfg, b, slog.New(slog.DiscardHandler))
	if err != nil || place == atOpened {
		return err
	}
	if err := d.write(ctx, lbtest.Diff(lb.NewState(), want)); err != nil || place == atWritten {
		return err
	}
	in := installer{pins: d.pins, cgroup: d.cgroup, hooks: d.hooks, progs: d.progs}
	if place == atHalf {
		in.hooks = in.hooks[:len(in.hooks)-3]
		return in.attachAll()
	}
	if err := in.run(); err != nil || place == atSwapped {
		return err
	}
	return d.pins.clean(d.keeps, d.maps)
}

// An agent that is killed at any point of a change of ABI leaves a node that serves. The next start completes the change
// or goes back.
func TestKilledOnTheWayToAnotherABI(t *testing.T) {
	cfg, tr := testConfig(t), startTraffic(t)
	for _, place := range []string{atOpened, atWritten, atHalf, atSwapped, atEnd} {
		for name, next := range map[string]build{"back": currentVersion(t), "forwards": nextABI(currentVersion(t))} {
			t.Run(place+" and "+name, func(t *testing.T) {
				upgrade(t, cfg, currentVersion(t), serving(tr.port))
				tr.more(t)
				killAt(t, place, cfg, tr.port)
				tr.more(t)
				upgrade(t, cfg, next, serving(tr.port))
				tr.more(t)
				isServedBy(t, cfg, next)
			})
		}
	}
	if n := tr.failed.Load(); n > 0 {
		t.Errorf("%d connects failed, the last one so: %v", n, tr.last.Load())
	}
}

func killAt(t *testing.T, place string, cfg Config, port uint16) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s %d", envUpgrade, place, cfg.CgroupRoot, cfg.BPFFS, port))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
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
	said, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || said != "there\n" {
		t.Errorf("the agent to be killed says %q, %v", said, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
}
