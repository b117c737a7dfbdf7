package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

var families = [2]string{"IPv4", "IPv6"}

// One edge serves several tests of what a gateway does for clients.
func TestBalancer(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	for _, tc := range []struct {
		name string
		test func(*testing.T, *testbed)
	}{ // in this order: flows to removed backends remain for the next test
		{"every way back", everyWayBack}, {"refusals", refuses}, {"gateways make the same choice", gatewaysChooseAlike}, {"affinity", affinity},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.t = t
			w.lead(0)
			tc.test(t, w)
		})
	}
	w.t = t
}

// Every way back delivers the reply, and the backend sees the expected source.
func everyWayBack(t *testing.T, w *testbed) {
	t.Helper()
	port := uint16(20000) // a new port each time: a known flow keeps its way back
	for _, way := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		w.apply(state(way, 1, 2, 3, 4))
		for f := range vips {
			for _, network := range []string{"tcp", "udp"} {
				t.Run(fmt.Sprint(way, " ", families[f], " ", network), func(t *testing.T) {
					met := map[netip.Addr]int{}
					for range 40 {
						port++
						c, err := w.dial(network, f, servedPort, port)
						if err != nil {
							t.Fatal(err, w.refusals(0))
						}
						for range 3 {
							backend, seen, err := c.ask("hello")
							if err != nil {
								t.Fatal(err, w.refusals(0))
							}
							want := map[desired.Return]netip.Addr{desired.Routed: clients[f], desired.SNAT: vips[f], desired.Masquerade: arms[0][f][0].Addr()}[way]
							if seen != want {
								t.Fatalf("the backend sees %s, want %s", seen, want)
							}
							met[backend]++
						}
						if err := c.Close(); err != nil {
							t.Fatal(err)
						}
					}
					if len(met) != backends {
						t.Errorf("40 clients reached %v, want all %d backends", met, backends)
					}
				})
			}
		}
	}
}

// refused expects a connection to be refused at once, and counted under a reason.
func (w *testbed) refused(network string, f int, port uint16, reason string) {
	w.t.Helper()
	before := w.refusals(0)[reason]
	c, err := w.dial(network, f, port, 0)
	if err == nil {
		_, _, err = c.ask("hello")
		_ = c.Close()
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		w.t.Errorf("%s to port %d of %s: %v, want it refused", network, port, vips[f], err)
	}
	if after := w.refusals(0)[reason]; after == before {
		w.t.Errorf("%s to port %d of %s is not counted as %s: %v", network, port, vips[f], reason, w.refusals(0))
	}
}

// A client that cannot be served is refused at once. A client that may not connect gets no reply.
func refuses(t *testing.T, w *testbed) {
	t.Helper()
	s := state(desired.Routed, 1, 2)
	for i := range s.VIPs {
		empty := desired.Frontend{Service: "shop/empty", Protocol: "TCP", Port: 81}
		drained := desired.Frontend{Service: "shop/drained", Protocol: "UDP", Port: 82, Backends: []desired.Backend{{Addr: backend(i, 1), Port: 9, Weight: 1, Draining: true}}}
		mine := desired.Frontend{Service: "shop/mine", Protocol: "TCP", Port: 83, Backends: s.VIPs[i].Frontends[0].Backends, Sources: []netip.Prefix{netip.PrefixFrom(clients[i], 16).Masked()}}
		others := desired.Frontend{Service: "shop/others", Protocol: "TCP", Port: 84, Backends: s.VIPs[i].Frontends[0].Backends, Sources: []netip.Prefix{netip.PrefixFrom(vips[i], 24).Masked()}}
		s.VIPs[i].Frontends = append(s.VIPs[i].Frontends, empty, drained, mine, others)
	}
	w.apply(s)
	for f := range vips {
		w.refused("tcp", f, 81, "no_backend")
		w.refused("udp", f, 82, "no_backend")
		w.refused("tcp", f, 7, "no_frontend")
		w.refused("udp", f, 7, "no_frontend")
		c, err := w.dial("tcp", f, 83, 0)
		if err != nil {
			t.Fatalf("a client that may connect: %v", err)
		}
		_ = c.Close()
		w.silent(f, 84)
	}
	all, err := w.balancers[0].Refusals()
	w.check(err)
	if n := all[flows.Refusal{Service: "shop/others", Reason: "source"}]; n == 0 {
		t.Errorf("a client that may not connect is not counted: %v", all)
	}
}

// silent expects a SYN to be dropped.
func (w *testbed) silent(f int, port uint16) {
	w.t.Helper()
	before := w.refusals(0)["source"]
	d := net.Dialer{}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- w.Client.Do(func() error {
			_, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(vips[f], port).String())
			return err
		})
	}()
	w.until(func() bool { return w.refusals(0)["source"] > before }, "the SYN is dropped")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		w.t.Errorf("a client that may not connect: %v, want no reply", err)
	}
}

// until waits until a condition holds.
func (w *testbed) until(holds func() bool, what string) {
	w.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			w.t.Fatalf("waited %s for: %s", patience, what)
		}
	}
}

// Two gateways choose the same backend for every client, regardless of the order in which they learned of the
// backends.
func gatewaysChooseAlike(t *testing.T, w *testbed) {
	t.Helper()
	w.check(w.applyTo(1, state(desired.Routed, 3, 4)))
	s := state(desired.Routed, 1, 2, 3, 4)
	s.VIPs[0].Frontends[1].Backends[2].Weight = 3
	w.apply(s)
	const asked = 100
	for f := range vips {
		var met [2][asked]netip.Addr
		for g := range met {
			w.lead(g)
			for i := range met[g] {
				c, err := w.dial("udp", f, servedPort, uint16(25000+i))
				w.check(err)
				met[g][i], _, err = c.ask("hello")
				w.check(err)
				w.check(c.Close())
			}
		}
		if met[0] != met[1] {
			t.Errorf("%s: %d clients reach other backends through the other gateway", families[f], asked)
		}
	}
}

// A client with session affinity reaches one backend from all its ports and at either gateway, even when backends are
// added. It moves only when that backend stops serving or the timeout expires.
func affinity(t *testing.T, w *testbed) {
	t.Helper()
	for _, way := range []desired.Return{desired.Routed, desired.Masquerade} {
		affinityBy(t, w, way)
	}
}

func affinityBy(t *testing.T, w *testbed, way desired.Return) {
	t.Helper()
	stays := func(seconds int32, numbers ...int) {
		s := state(way, numbers...)
		for i := range s.VIPs {
			s.VIPs[i].Frontends[0].Affinity = seconds
		}
		w.apply(s)
	}
	meets := func(f int) (backend netip.Addr, from net.Addr) {
		c, err := w.dial("tcp", f, servedPort, 0)
		w.check(err)
		backend, _, err = c.ask("hello")
		w.check(err)
		w.check(c.Close())
		return backend, c.LocalAddr()
	}
	for f := range vips {
		w.lead(0)
		stays(60, 1)
		sent := w.export(0)
		first, from := meets(f)
		w.until(func() bool { // flows that existed before are announced too
			return slices.ContainsFunc(sent.all(), func(o flows.Flow) bool { return o.Client.String() == from.String() })
		}, "its flow is exported")
		sent.stop()
		w.importFlows(1, sent.all())
		stays(60, 1, 2, 3, 4)
		for i := range 20 {
			w.lead(i % 2)
			if b, _ := meets(f); b != first {
				t.Fatalf("%s, %s: at gateway %d the client moves from %s to %s", way, families[f], i%2, first, b)
			}
		}
		stays(60, 2, 3, 4)
		second, _ := meets(f)
		stays(60, 1, 2, 3, 4)
		if b, _ := meets(f); second == first || b != second {
			t.Errorf("%s, %s: the client reached %s, which was removed, then %s, then %s", way, families[f], first, second, b)
		}
	}
}
