package ebpf

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
		if diff := cmp.Diff(want, w.counts(0)); diff != "" {
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
