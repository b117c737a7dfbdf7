package ebpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Each connection of a Service is counted once, however many entries its translations take, and only while it is open. A
// Service that is gone has no counts.
func TestCounts(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	opened := uint64(0)
	for _, r := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		s := state(r, 1, 2)
		for i := range s.VIPs {
			s.VIPs[i].Frontends = append(s.VIPs[i].Frontends, desired.Frontend{Service: "shop/idle", Protocol: "TCP", Port: 81, Backends: s.VIPs[i].Frontends[0].Backends})
		}
		w.apply(s)
		stop := w.export(0).stop
		var open []*conn
		for f := range vips {
			for range each {
				c, err := w.dial("tcp", f, servedPort, 0)
				w.check(err)
				_, _, err = c.ask("hello")
				w.check(err)
				open = append(open, c)
			}
		}
		opened += uint64(len(open))
		web := flows.CountKey{Service: "shop/web", Protocol: "TCP"}
		want := map[flows.CountKey]flows.Counts{
			web: {Opened: opened, Active: len(open)}, {Service: "shop/web", Protocol: "UDP"}: {}, {Service: "shop/idle", Protocol: "TCP"}: {},
		}
		w.until(func() bool { return w.counts(0)[web].Opened >= opened }, "all connections are announced")
		if diff := cmp.Diff(want, w.counts(0), withoutTraffic); diff != "" {
			t.Errorf("%s: counts (-want +have):\n%s", r, diff)
		}
		for _, c := range open {
			w.check(c.Close())
		}
		w.until(func() bool { return w.counts(0)[web].Active == 0 }, "closed connections are not active")
		stop()
	}
	w.apply(&desired.State{Cluster: "a", Group: "edge", Balancer: desired.EBPF})
	if all := w.counts(0); len(all) > 0 {
		t.Errorf("without Services there are counts %v", all)
	}
}

var withoutTraffic = cmpopts.IgnoreFields(flows.Counts{}, "Traffic")

// counts returns the counts of a gateway, with the flows that are active now.
func (w *testbed) counts(g int) map[flows.CountKey]flows.Counts {
	w.t.Helper()
	b := w.balancers[g]
	later := time.Now()
	if b.tally.Now != nil {
		later = b.tally.Now().Add(time.Hour)
	}
	b.tally.Now = func() time.Time { return later }
	all, err := b.Counts()
	w.check(err)
	return all
}

// Every packet of a Service is counted once, with all bytes of it, whichever program forwards it and however often it is translated. A
// Service that takes over the ports of another one begins at 0.
func TestTraffic(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	web := flows.CountKey{Service: "shop/web", Protocol: "UDP"}
	for _, xdp := range []bool{false, true} {
		if xdp {
			w.accelerate()
			w.sumUp(true)
		}
		for _, r := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
			w.apply(state(r, 1, 2))
			before, sent := w.counts(0)[web].Traffic, w.balancers[0].Sent()
			var want flows.Traffic
			for f, headers := range []int{20 + 8, 40 + 8} {
				c, err := w.dial("udp", f, servedPort, 0)
				w.check(err)
				for range 50 {
					backend, seen, err := c.ask("hello")
					w.check(err)
					want = want.Plus(flows.Traffic{
						ToBackends: flows.Sum{Packets: 1, Bytes: uint64(headers + len("hello\n"))},
						ToClients:  flows.Sum{Packets: 1, Bytes: uint64(headers + len(fmt.Sprintln(backend, seen, "hello")))},
					})
				}
				w.check(c.Close())
			}
			if diff := cmp.Diff(want, w.counts(0)[web].Since(before)); diff != "" {
				t.Errorf("%s, XDP %t: traffic (-want +have):\n%s", r, xdp, diff)
			}
			if now := w.balancers[0].Sent(); xdp == (now == sent) {
				t.Errorf("%s, XDP %t: drivers forwarded %d packets", r, xdp, now-sent)
			}
		}
	}
	s := state(desired.Routed, 1, 2)
	for i := range s.VIPs {
		for j := range s.VIPs[i].Frontends {
			s.VIPs[i].Frontends[j].Service = "shop/other"
		}
	}
	w.apply(s)
	for k, c := range w.counts(0) {
		if k.Service != "shop/other" || c.Traffic != (flows.Traffic{}) {
			t.Errorf("%v has %v, want no traffic of shop/other", k, c)
		}
	}
	c, err := w.dial("udp", 0, servedPort, 0)
	w.check(err)
	_, _, err = c.ask("hello")
	w.check(err)
	w.check(c.Close())
	if is := w.counts(0)[flows.CountKey{Service: "shop/other", Protocol: "UDP"}]; is.ToBackends.Packets != 1 || is.ToClients.Packets != 1 {
		t.Errorf("of one datagram and its answer %v is counted", is.Traffic)
	}
}
