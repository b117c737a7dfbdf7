package datapath

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// envClient makes this test binary run clientMain, a program in a pod.
const envClient = "ISTHMUS_TEST_CLIENT"

// The destinations of the client's sockets, and what should become of them.
var stalePeers = []struct {
	name, to string
	closed   bool
}{
	{"by the VIP of the removed backend", "243.0.0.5:53", true},
	{"the same over IPv6", "[fd00:243::5]:53", true},
	{"the same from a dual-stack socket", "[::ffff:243.0.0.5]:53", true},
	{"by the VIP of another backend", "243.0.0.6:53", false},
	{"to the removed backend without a VIP", "127.0.0.1:5301", false},
	{"the same over IPv6 without a VIP", "[::1]:5301", false},
}

// stalePeerSockets connects one UDP socket to each of stalePeers.
func stalePeerSockets() ([]int, error) {
	var fds []int
	for _, p := range stalePeers {
		ap := netip.MustParseAddrPort(p.to)
		family, to := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: ap.Addr().As16(), Port: int(ap.Port())})
		if ap.Addr().Is4() {
			family, to = unix.AF_INET, &unix.SockaddrInet4{Addr: ap.Addr().As4(), Port: int(ap.Port())}
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fds, err
		}
		fds = append(fds, fd)
		if err := unix.Connect(fd, to); err != nil {
			return fds, fmt.Errorf("connect to %s: %w", p.to, err)
		}
	}
	return fds, nil
}

// aborted reports which sockets have been closed from outside, which their next read returns.
func aborted(fds []int) ([]bool, error) {
	closed := make([]bool, len(fds))
	for i, fd := range fds {
		_, _, err := unix.Recvfrom(fd, make([]byte, 8), unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.ECONNABORTED):
			closed[i] = true
		case !errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("read from socket %d: %w", i, err)
		}
	}
	return closed, nil
}

// clientMain is a program in its own network namespace: it connects, prints that it has, waits for a line, and prints
// which of its sockets have been closed.
func clientMain() {
	err := func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		fds, err := stalePeerSockets()
		if err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "connected")
		if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
			return err
		}
		closed, err := aborted(fds)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(closed)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "client:", err)
		os.Exit(1)
	}
}

// twoUDPServices has two UDP Services, the first one in both families.
func twoUDPServices() lb.State {
	s := lb.NewState()
	udp := func(text string) lb.Address {
		return lb.Address{AddrPort: netip.MustParseAddrPort(text), Protocol: clusterset.UDP}
	}
	for i, pair := range [][2]string{{"243.0.0.5:53", "127.0.0.1:5301"}, {"[fd00:243::5]:53", "[::1]:5301"}, {"243.0.0.6:53", "127.0.0.1:5302"}} {
		id := uint32(i + 1)
		s.Frontends[udp(pair[0])] = lb.Frontend{ID: lb.FrontendID(id), Count: 1}
		s.Slots[lb.Slot{Frontend: lb.FrontendID(id)}] = lb.BackendID(id)
		s.Backends[lb.BackendID(id)] = lb.Backend{Address: udp(pair[1])}
	}
	return s
}

// UDP sockets that were connected to a removed backend are closed, in this network namespace and in that of another
// process; no other sockets are.
func TestCloseStale(t *testing.T) {
	t.Run("by iterator", func(t *testing.T) {
		d := mustOpen(t, testConfig(t))
		if !d.stale.closes {
			netlab.Skip(t, "this kernel cannot close a socket from an iterator")
		}
		closesStale(t, d)
	})
	t.Run("over netlink", func(t *testing.T) {
		d := mustOpen(t, testConfig(t))
		it, err := loadIterator(d.maps, bpf.ProgramFindStale, bpf.LoadFindSpec)
		if err != nil {
			t.Fatal(err)
		}
		_ = d.stale.iterator.Close()
		d.stale = &staleSockets{it, false}
		closesStale(t, d)
	})
}

func closesStale(t *testing.T, d *Datapath) {
	t.Helper()
	before := twoUDPServices()
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), before)); err != nil {
		t.Fatal(err)
	}
	client := startClient(t)
	fds, err := stalePeerSockets()
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	if err != nil {
		t.Fatal(err)
	}
	if n, err := d.CloseStale(t.Context()); n != 0 || err != nil {
		t.Errorf("closed %d, %v with all backends there, want none", n, err)
	}

	after := before.Clone()
	for _, id := range []lb.BackendID{1, 2} {
		delete(after.Slots, lb.Slot{Frontend: lb.FrontendID(id)})
		delete(after.Backends, id)
	}
	for a, fe := range after.Frontends {
		if fe.ID < 3 {
			fe.Count = 0
			after.Frontends[a] = fe
		}
	}
	if err := d.Apply(t.Context(), lbtest.Diff(before, after)); err != nil {
		t.Fatal(err)
	}
	if n, err := d.CloseStale(t.Context()); n != 6 || err != nil {
		t.Errorf("closed %d, %v, want three here and three there", n, err)
	}
	here, err := aborted(fds)
	if err != nil {
		t.Fatal(err)
	}
	for where, closed := range map[string][]bool{"here": here, "in another namespace": client()} {
		for i, p := range stalePeers {
			if closed[i] != p.closed {
				t.Errorf("socket %s, %s: closed %v, want %v", p.name, where, closed[i], p.closed)
			}
		}
	}
	if n, err := d.CloseStale(t.Context()); n != 0 || err != nil {
		t.Errorf("closed %d, %v the second time, want none", n, err)
	}
}

// startClient starts a process in its own network namespace, and returns a function that asks it which of its sockets
// are closed.
func startClient(t *testing.T) func() []bool {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), envClient+"=1")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	in, errIn := cmd.StdinPipe()
	out, errOut := cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // has ended already, if all went well
		_ = cmd.Wait()
	})
	said := bufio.NewReader(out)
	if line, err := said.ReadString('\n'); err != nil || line != "connected\n" {
		t.Fatalf("the client says %q, %v", line, err)
	}
	return func() []bool {
		t.Helper()
		if _, err := in.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
		var closed []bool
		if err := json.NewDecoder(said).Decode(&closed); err != nil {
			t.Fatal(err)
		}
		return closed
	}
}

// Missing lists each missing feature once, with its consequence.
func TestMissing(t *testing.T) {
	d := mustOpen(t, testConfig(t))
	for _, m := range d.Missing() {
		t.Errorf("missing here, where nothing should be: %s", m)
	}
	no := errors.New("no such function")
	for _, c := range []struct {
		close, find error
		says        string
	}{{no, nil, "are closed over netlink"}, {no, no, "stay open until their programs close them"}} {
		if all := missingFeatures(true, c.close, c.find); len(all) != 1 || !strings.Contains(all[0], c.says) {
			t.Errorf("closing %v, finding %v: %v", c.close, c.find, all)
		}
	}
}
