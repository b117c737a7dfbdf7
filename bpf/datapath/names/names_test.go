package names

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

const hello = "hello.demo.svc.clusterset.local."

var (
	resolver = netip.MustParseAddr("10.96.0.10")
	vip      = netip.MustParseAddr("243.1.0.7")
	soa      = strings.Repeat("\x00\x06", 42) // as long as one, and of its type
)

// wire is a name in wire format.
func wire(t *testing.T, name string) string {
	t.Helper()
	b := make([]byte, 256)
	n, err := dns.PackDomainName(name, b, 0, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

// changes are the changes of one name.
func changes(name string, addrs ...netip.Addr) iter.Seq2[string, [2]netip.Addr] {
	var both [2]netip.Addr
	copy(both[:], addrs)
	return maps.All(map[string][2]netip.Addr{name: both})
}

// newResponder returns a Responder with room for some names.
func newResponder(t *testing.T, room int, log io.Writer) *Responder {
	t.Helper()
	netlab.Privileged(t)
	spec, err := bpf.LoadNamesSpec()
	if err != nil {
		t.Fatal(err)
	}
	spec.Maps[bpf.MapNames].MaxEntries = uint32(room)
	r, err := load(spec, Config{Resolvers: []netip.Addr{resolver}}, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// node is a network namespace with a resolver that refuses every query.
func node(t *testing.T) *netlab.Namespace {
	t.Helper()
	n, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	server := &dns.Server{Handler: dns.HandlerFunc(func(w dns.ResponseWriter, m *dns.Msg) {
		if err := w.WriteMsg(new(dns.Msg).SetRcode(m, dns.RcodeRefused)); err != nil {
			t.Error(err)
		}
	})}
	err = n.Do(func() (err error) {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(resolver.AsSlice())}); err != nil {
			return err
		}
		server.PacketConn, err = net.ListenPacket("udp", netip.AddrPortFrom(resolver, 53).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.ActivateAndServe() }()
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n
}

// pod connects a pod to a node.
func pod(t *testing.T, node *netlab.Namespace, number byte) *netlab.Namespace {
	t.Helper()
	n, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	here, there := netip.AddrFrom4([4]byte{10, 200, number, 1}), netip.AddrFrom4([4]byte{10, 200, number, 2})
	if err := node.Connect(n, netip.PrefixFrom(here, 24), netip.PrefixFrom(there, 24)); err != nil {
		t.Fatal(err)
	}
	if err := n.Route(here); err != nil {
		t.Fatal(err)
	}
	return n
}

// ask returns the rcode and the addresses of the answer that a pod gets.
func ask(t *testing.T, pod *netlab.Namespace, name string, typ uint16) (rcode int, addrs []string) {
	t.Helper()
	var conn net.Conn
	err := pod.Do(func() (err error) {
		conn, err = net.Dial("udp", netip.AddrPortFrom(resolver, 53).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer, _, err := new(dns.Client).ExchangeWithConn(new(dns.Msg).SetQuestion(name, typ), &dns.Conn{Conn: conn})
	if err != nil {
		t.Fatal(err)
	}
	for _, rr := range answer.Answer {
		addrs = append(addrs, strings.TrimPrefix(rr.String(), rr.Header().String()))
	}
	return answer.Rcode, addrs
}

// eventually polls until ok, and fails t after a timeout.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

func TestResponder(t *testing.T) {
	r := newResponder(t, 10, t.Output())
	node := node(t)
	first := pod(t, node, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- node.Do(func() error { return r.Follow(ctx) }) }()
	devices := func(n int) func() bool {
		return func() bool {
			s, err := r.Status()
			if err != nil {
				t.Fatal(err)
			}
			return s.Devices == n
		}
	}
	eventually(t, "the pod that was there is answered", devices(1))

	want := func(pod *netlab.Namespace, name string, typ uint16, rcode int, addrs ...string) {
		t.Helper()
		gotCode, gotAddrs := ask(t, pod, name, typ)
		if gotCode != rcode || fmt.Sprint(gotAddrs) != fmt.Sprint(addrs) {
			t.Errorf("%s %s: %s %v, want %s %v", dns.TypeToString[typ], name,
				dns.RcodeToString[gotCode], gotAddrs, dns.RcodeToString[rcode], addrs)
		}
	}
	want(first, hello, dns.TypeA, dns.RcodeRefused)
	if err := r.Update(5, soa, changes(wire(t, hello), vip)); err != nil {
		t.Fatal(err)
	}
	want(first, hello, dns.TypeA, dns.RcodeSuccess, vip.String())
	want(first, "HELLO.demo.svc.clusterset.local.", dns.TypeA, dns.RcodeSuccess, vip.String())
	want(first, "other.demo.svc.clusterset.local.", dns.TypeA, dns.RcodeRefused)
	want(first, hello, dns.TypeSRV, dns.RcodeRefused)

	second := pod(t, node, 2)
	eventually(t, "a pod that comes is answered", devices(2))
	want(second, hello, dns.TypeA, dns.RcodeSuccess, vip.String())

	moved := netip.MustParseAddr("243.1.0.8")
	if err := r.Update(5, soa, changes(wire(t, hello), moved, netip.MustParseAddr("fd99::8"))); err != nil {
		t.Fatal(err)
	}
	want(first, hello, dns.TypeA, dns.RcodeSuccess, moved.String())
	want(first, hello, dns.TypeAAAA, dns.RcodeSuccess, "fd99::8")
	if s, err := r.Status(); err != nil || s.A != 4 || s.AAAA != 1 {
		t.Errorf("status %+v, %v; want 4 questions for A and 1 for AAAA answered", s, err)
	}

	if err := r.Update(5, soa, changes(wire(t, hello))); err != nil {
		t.Fatal(err)
	}
	want(first, hello, dns.TypeA, dns.RcodeRefused)
	if err := r.Update(5, soa, changes(wire(t, hello), vip)); err != nil {
		t.Fatal(err)
	}
	want(first, hello, dns.TypeA, dns.RcodeSuccess, vip.String())

	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	want(first, hello, dns.TypeA, dns.RcodeRefused)
}

// Names that are too long or find no room are left to the resolver, which is logged once. Other names stay correct.
func TestResponderRoom(t *testing.T) {
	var log bytes.Buffer
	const room = 100
	r := newResponder(t, room, &log)
	some := func(n int, addr netip.Addr) iter.Seq2[string, [2]netip.Addr] {
		return func(yield func(string, [2]netip.Addr) bool) {
			for i := range n {
				if !yield(fmt.Sprintf("\x07%07d", i), [2]netip.Addr{addr}) {
					return
				}
			}
		}
	}
	for range 2 { // the second time all of them but two are there
		if err := r.Update(5, soa, some(room+2, vip)); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "no room for more names"); n != 1 {
		t.Errorf("said %d times that there is no room, want once:\n%s", n, &log)
	}
	if err := r.Update(5, soa, some(2, netip.Addr{})); err != nil {
		t.Fatal(err)
	}
	if err := r.Update(5, soa, changes(strings.Repeat("a", 97), vip)); err != nil {
		t.Fatal(err)
	}
	var n int
	var key [96]byte
	var value [24]byte
	all := r.coll.Maps[bpf.MapNames].Iterate()
	for all.Next(&key, &value) {
		n++
	}
	if err := all.Err(); err != nil || n != room-2 {
		t.Errorf("%d names, %v; want %d", n, err, room-2)
	}
}

func TestResponderBadSOA(t *testing.T) {
	r := newResponder(t, 10, t.Output())
	if err := r.Update(5, "short", changes("", vip)); err == nil {
		t.Error("a SOA of 5 bytes is taken")
	}
}
