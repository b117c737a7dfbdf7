package liveness

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// probeDeadline is long enough for an answer on a busy machine.
const probeDeadline = 3 * time.Second

// serving returns an endpoint at address that accepts connections.
func serving(t *testing.T, address string) netip.AddrPort {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return netip.MustParseAddrPort(listener.Addr().String())
}

// refusing returns an endpoint that refuses connections.
func refusing(t *testing.T) netip.AddrPort {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = listener.Close()
	return netip.MustParseAddrPort(listener.Addr().String())
}

// silent returns an endpoint that answers no handshake: a listener with a full queue drops them.
func silent(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	in4, ok := bound.(*unix.SockaddrInet4)
	if !ok {
		t.Fatalf("bound to %T", bound)
	}
	endpoint := netip.AddrPortFrom(netip.AddrFrom4(in4.Addr), uint16(in4.Port))
	for range 4 { // one fits; it is full when one does not
		conn, err := net.DialTimeout("tcp", endpoint.String(), probeDeadline)
		if err != nil {
			return endpoint
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("a queue for one takes four")
	return endpoint
}

func TestProbe(t *testing.T) {
	v4, v6, none, quiet := serving(t, "127.0.0.1:0"), serving(t, "[::1]:0"), refusing(t), silent(t)
	unroutable := netip.MustParseAddrPort("127.0.0.1:0") // no port: the kernel refuses to try
	for name, tc := range map[string]struct {
		endpoints []netip.AddrPort
		want      Verdict
	}{
		"no endpoint":                         {nil, Unknown},
		"one serves":                          {[]netip.AddrPort{v4}, Answering},
		"one serves, IPv6":                    {[]netip.AddrPort{v6}, Answering},
		"one refuses":                         {[]netip.AddrPort{none}, Unknown},
		"one is silent":                       {[]netip.AddrPort{quiet}, Silent},
		"all are silent":                      {[]netip.AddrPort{quiet, quiet, quiet, quiet}, Silent},
		"one serves, two are silent":          {[]netip.AddrPort{quiet, v4, quiet}, Answering},
		"one serves, two refuse":              {[]netip.AddrPort{none, none, v6}, Answering},
		"one refuses, two are silent":         {[]netip.AddrPort{none, quiet, quiet}, Unknown},
		"one is unroutable, two are silent":   {[]netip.AddrPort{unroutable, quiet, quiet}, Unknown},
		"one is unroutable, the others serve": {[]netip.AddrPort{unroutable, v4, v6}, Answering},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			deadline := probeDeadline
			if tc.want == Answering {
				deadline = time.Minute // which passes only when the probe waits for silent endpoints
			}
			p := &Probe{Deadline: deadline, Endpoints: func(id clusterset.ClusterID) []netip.AddrPort {
				if id != "b" {
					t.Errorf("the Probe wants endpoints of %s", id)
				}
				return tc.endpoints
			}}
			began := time.Now()
			if have := p.Answers(t.Context(), "b"); have != tc.want {
				t.Errorf("verdict %v, want %v", have, tc.want)
			}
			if took := time.Since(began); tc.want == Answering && took >= deadline {
				t.Errorf("the probe waited %v for the other endpoints", took)
			}
		})
	}
}

// A cancelled Probe returns Unknown.
func TestProbeCancelled(t *testing.T) {
	quiet := silent(t)
	p := &Probe{Deadline: time.Hour, Endpoints: func(clusterset.ClusterID) []netip.AddrPort { return []netip.AddrPort{quiet} }}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	defer time.AfterFunc(probeDeadline, cancel).Stop()
	if have := p.Answers(ctx, "b"); have != Unknown {
		t.Errorf("verdict %v, want %v", have, Unknown)
	}
}

// A Probe tries a few of many endpoints, over time each of them, and does not reorder the caller's list.
func TestProbeChoosesAtRandom(t *testing.T) {
	const many = 10
	reached := make(chan int, 1000)
	var endpoints []netip.AddrPort
	for i := range many {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		endpoints = append(endpoints, netip.MustParseAddrPort(listener.Addr().String()))
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				_ = conn.Close()
				reached <- i
			}
		}()
	}
	list := fmt.Sprint(endpoints)
	p := &Probe{Endpoints: func(clusterset.ClusterID) []netip.AddrPort { return endpoints }}
	tried := map[int]bool{}
	for rounds := 0; len(tried) < many; rounds++ {
		if rounds == 500 {
			t.Fatalf("in 500 rounds only %d of %d were tried", len(tried), many)
		}
		if p.Answers(t.Context(), "b") != Answering {
			t.Fatal("it does not answer")
		}
		now := 0
		for wait := time.After(time.Second); now == 0; {
			select {
			case i := <-reached:
				tried[i] = true
				now++
			case <-wait:
				t.Fatal("no endpoint was tried")
			}
		}
	}
	if list != fmt.Sprint(endpoints) {
		t.Error("the list was changed")
	}
}

func TestVerdictOf(t *testing.T) {
	for err, want := range map[error]Verdict{
		syscall.ECONNREFUSED:     Unknown,
		syscall.ECONNRESET:       Unknown,
		syscall.ENETUNREACH:      Unknown,
		syscall.EPERM:            Unknown,
		syscall.EACCES:           Unknown,
		syscall.EADDRNOTAVAIL:    Unknown,
		syscall.EMFILE:           Unknown,
		context.Canceled:         Unknown,
		syscall.ETIMEDOUT:        Silent,
		syscall.EHOSTUNREACH:     Silent,
		context.DeadlineExceeded: Silent,
	} {
		if have := verdictOf(&net.OpError{Op: "dial", Err: err}); have != want {
			t.Errorf("%v: %v, want %v", err, have, want)
		}
	}
}
