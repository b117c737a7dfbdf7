package nft

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
		if diff := cmp.Diff(want, w.counts(0)); diff != "" {
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
