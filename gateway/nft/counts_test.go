package nft

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Each connection of a Service is counted once, whatever events follow its handshake, and only while it is open. A Service
// that is gone has no counts.
func TestCounts(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	masquerade := func(v *desired.VIP) { v.Return = desired.Masquerade }
	w.apply(w.state(masquerade))
	w.serve()
	defer w.tells(0, 1)()
	web := flows.CountKey{Service: "shop/web", Protocol: "TCP"}
	var open []*flow
	w.poll(func() bool { // events are received now
		open = append(open, w.open(0, "echo"))
		return w.counts(0)[web].Opened > 0
	}, "no connection is counted")
	missed := uint64(len(open)) - w.counts(0)[web].Opened
	for range 2 {
		for family := range familyNames {
			for range 4 {
				open = append(open, w.open(family, "echo"))
			}
		}
		w.poll(func() bool { return w.counts(0)[web].Opened+missed >= uint64(len(open)) }, "not all connections are counted")
		want := map[flows.CountKey]flows.Counts{web: {Opened: uint64(len(open)) - missed, Active: len(open)}, {Service: "shop/web", Protocol: "UDP"}: {}}
		if diff := cmp.Diff(want, w.counts(0), cmpopts.IgnoreFields(flows.Counts{}, "Traffic")); diff != "" {
			t.Errorf("counts (-want +have):\n%s", diff)
		}
	}
	for _, f := range open {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	w.poll(func() bool { return w.counts(0)[web].Active == 0 }, "closed connections are active")
	w.apply(&desired.State{Cluster: "a", Group: "edge", Balancer: desired.NFTables})
	if all := w.counts(0); len(all) > 0 {
		t.Errorf("without Services there are counts %v", all)
	}
}

// Every packet of a Service is counted once, with all bytes of it, however often connections are listed meanwhile, and also if its
// connection ends before. A connection that a peer keeps is counted there.
func TestTraffic(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	for _, r := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		w.apply(w.state(func(v *desired.VIP) { v.Return = r }))
		web := flows.CountKey{Service: "shop/web", Protocol: "UDP"}
		before := w.counts(0)[web].Traffic
		var want flows.Traffic
		for family, headers := range []int{20 + 8, 40 + 8} {
			c, err := w.dial("udp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], vipPort))
			if err != nil {
				t.Fatal(err)
			}
			for i := range 20 {
				if _, err := fmt.Fprint(c, "hello"); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 100)
				n, err := c.Read(b)
				if err != nil {
					t.Fatal(err)
				}
				want = want.Plus(flows.Traffic{
					ToBackends: flows.Sum{Packets: 1, Bytes: uint64(headers + len("hello"))}, ToClients: flows.Sum{Packets: 1, Bytes: uint64(headers + n)},
				})
				if i%8 == 0 {
					w.counts(0)
				}
			}
		}
		if diff := cmp.Diff(want, w.counts(0)[web].Since(before)); diff != "" {
			t.Errorf("%s: traffic (-want +have):\n%s", r, diff)
		}
	}
	web := flows.CountKey{Service: "shop/web", Protocol: "TCP"}
	before := w.counts(0)[web].Traffic
	f := w.open(0, "echo")
	if err := f.echoes(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	w.poll(func() bool { return w.counts(0)[web].Active == 0 }, "a closed connection is active")
	// At least SYN, ACK, two lines and FIN one way, SYN+ACK, two lines and FIN the other way.
	if is := w.counts(0)[web].Since(before); is.ToBackends.Packets < 5 || is.ToClients.Packets < 4 {
		t.Errorf("of a closed connection %v is counted", is)
	}
}

// counts returns the counts of a gateway, with the connections that are active now.
func (w *testbed) counts(gateway int) (all map[flows.CountKey]flows.Counts) {
	w.t.Helper()
	b := w.gateways[gateway]
	later := time.Now()
	if b.tally.Now != nil {
		later = b.tally.Now().Add(time.Hour)
	}
	b.tally.Now = func() time.Time { return later }
	in(w.t, b.ns, func() (err error) {
		all, err = b.Counts()
		return err
	})
	return all
}
