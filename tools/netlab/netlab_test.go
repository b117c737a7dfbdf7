package netlab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

// A datagram crosses a router with its source address.
func TestNamespacesReachEachOther(t *testing.T) {
	Privileged(t)
	ns := make([]*Namespace, 3)
	for i := range ns {
		n, err := NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		ns[i] = n
	}
	client, router, server := ns[0], ns[1], ns[2]
	p := netip.MustParsePrefix
	for _, err := range []error{
		client.Connect(router, p("10.99.0.2/24"), p("10.99.0.1/24")),
		router.Connect(server, p("10.99.1.1/24"), p("10.99.1.2/24")),
		client.Route(netip.MustParseAddr("10.99.0.1")),
		server.Route(netip.MustParseAddr("10.99.1.1")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var in *net.UDPConn
	if err := server.Do(func() (err error) {
		in, err = net.ListenUDP("udp4", nil)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	port := in.LocalAddr().(*net.UDPAddr).Port
	if err := client.Do(func() error {
		out, err := net.Dial("udp4", fmt.Sprintf("10.99.1.2:%d", port))
		if err != nil {
			return err
		}
		defer out.Close()
		_, err = out.Write([]byte("?"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	_, from, err := in.ReadFromUDPAddrPort(make([]byte, 8))
	if err != nil || from.Addr().Unmap() != netip.MustParseAddr("10.99.0.2") {
		t.Errorf("datagram from %s, %v, want one from 10.99.0.2", from, err)
	}
}

func TestMainIsolates(t *testing.T) {
	Privileged(t)
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagUp != 0 {
			t.Errorf("device %s is up; the tests run in the machine's network", i.Name)
		}
	}
}

func TestCgroup(t *testing.T) {
	c := NewTestCgroup(t)
	own, err := ownCgroup()
	if err != nil || own != c.Path {
		t.Errorf("in cgroup %s, %v, want %s", own, err, c.Path)
	}
	if err := c.Leave(); err != nil {
		t.Fatal(err)
	}
	if own, err = ownCgroup(); err != nil || strings.HasPrefix(own, c.Path) {
		t.Errorf("in cgroup %s, %v, having left %s", own, err, c.Path)
	}
}

// A disconnected device can be connected again at both ends, and disconnecting twice is no error.
func TestDisconnect(t *testing.T) {
	Privileged(t)
	var ends [2]*Namespace
	for i := range ends {
		n, err := NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = n
		t.Cleanup(func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	here, there := netip.MustParsePrefix("10.99.2.1/30"), netip.MustParsePrefix("10.99.2.2/30")
	for range 2 {
		if err := errors.Join(ends[1].Disconnect(there), ends[0].Connect(ends[1], here, there)); err != nil {
			t.Fatal(err)
		}
	}
}

// Commands that die with their parent must not die when another goroutine visits a namespace.
func TestVisitEndsNoCommand(t *testing.T) {
	Privileged(t)
	n, err := NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 200 { // one of them is on the thread that started the command
		if err := n.Do(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if ended := cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(); ended != syscall.SIGTERM {
		t.Errorf("the command ended by %v, want %v", ended, syscall.SIGTERM)
	}
}
