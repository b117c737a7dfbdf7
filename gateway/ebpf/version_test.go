package ebpf

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/oldflowstest"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// ours returns this version, on a kernel with TCX or without.
func ours(t *testing.T, tcx bool) version {
	t.Helper()
	v, err := thisVersion()
	if err != nil {
		t.Fatal(err)
	}
	v.noTCX = !tcx
	return v
}

// next returns a version of the next ABI, with maps that are incompatible with ours.
func next(t *testing.T, tcx bool) version {
	t.Helper()
	v := ours(t, tcx)
	v.abi++
	v.spec.Maps[bpf.MapFrontends].MaxEntries /= 2
	return v
}

// Starting the balancer again, with another program or with another ABI, loses no datagram and no connection.
func TestVersionsUnderTraffic(t *testing.T) {
	for name, tcx := range map[string]bool{"TCX and XDP": true, "clsact": false} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			if tcx {
				w.accelerate()
				w.sumUp(true)
			}
			w.serve()
			w.check(w.balancers[0].Close(context.Background(), false))
			w.openVersion(0, ours(t, tcx))
			w.check(w.applyTo(0, state(desired.SNAT, 1, 2)))
			q := w.askAll(4)
			s := state(desired.SNAT, 4, 3, 2, 1) // the hash sends some of them elsewhere now
			for _, v := range []version{ours(t, tcx), next(t, tcx), ours(t, tcx), next(t, tcx)} {
				w.check(w.balancers[0].Close(context.Background(), false))
				w.openVersion(0, v)
				before := q.asked.Load()
				w.check(w.applyTo(0, s))
				w.until(func() bool { return q.asked.Load() > before+200 || q.lost.Load() > 0 }, "traffic goes on")
				if sent := w.balancers[0].Sent() > 0; sent != tcx {
					t.Errorf("drivers forward packets: %t", sent)
				}
				pins, err := os.ReadDir(w.balancers[0].k.dir)
				w.check(err)
				if others := slices.DeleteFunc(pins, func(e os.DirEntry) bool {
					return !strings.HasPrefix(e.Name(), mapsPrefix) || e.Name() == fmt.Sprint(mapsPrefix, v.abi)
				}); len(others) > 0 {
					t.Errorf("maps of another ABI remain: %v", others)
				}
			}
			if asked, lost := q.end(); lost > 0 || asked < 800 {
				t.Errorf("%d of %d queries were lost", lost, asked)
			}
			w.check(w.Gateways[0].Do(func() error { return Remove(w.bpffs[0]) }))
		})
	}
}

// An upgrade from a build whose flows have no windows, or whose flows of UDP are among the connections, loses no datagram and no
// connection.
func TestFlowsOfOlderBuild(t *testing.T) {
	for name, c := range map[string]struct {
		way   desired.Return
		older func(dir string) error
	}{
		"routed":              {desired.Routed, oldflowstest.Demote},
		"SNAT":                {desired.SNAT, oldflowstest.Demote},
		"routed, UDP with it": {desired.Routed, oldflowstest.Unite},
	} {
		t.Run(name, func(t *testing.T) {
			way := c.way
			w := newTestbed(t)
			w.serve()
			w.check(w.applyTo(0, state(way, 1, 2)))
			q := w.askAll(4)
			s := state(way, 4, 3, 2, 1) // the hash sends some of them elsewhere now
			for range 2 {
				before := q.asked.Load()
				w.until(func() bool { return q.asked.Load() > before+200 || q.lost.Load() > 0 }, "traffic goes on")
				w.check(w.balancers[0].Close(context.Background(), false))
				w.check(c.older(w.balancers[0].k.mapsDir()))
				w.openVersion(0, ours(t, true))
				w.check(w.applyTo(0, s))
			}
			before := q.asked.Load()
			w.until(func() bool { return q.asked.Load() > before+200 || q.lost.Load() > 0 }, "traffic goes on")
			if asked, lost := q.end(); lost > 0 {
				t.Errorf("%d of %d queries were lost", lost, asked)
			}
		})
	}
}

// questions counts queries that are sent continuously.
type questions struct {
	asked, lost atomic.Int64
	done        chan struct{}
	asking      sync.WaitGroup
}

// askAll sends queries over n connections of each protocol and family until end is called.
func (w *testbed) askAll(n int) *questions {
	w.t.Helper()
	q := &questions{done: make(chan struct{})}
	for f := range vips {
		for _, network := range slices.Repeat([]string{"udp", "tcp"}, n) {
			c, err := w.dial(network, f, servedPort, 0)
			w.check(err)
			q.asking.Go(func() {
				defer c.Close()
				for {
					select {
					case <-q.done:
						return
					default:
					}
					q.asked.Add(1)
					if _, _, err := c.ask("hello"); err != nil {
						q.lost.Add(1)
						w.t.Logf("%s from %s: %v; refused %v", network, c.LocalAddr(), err, w.refusals(0))
						return
					}
				}
			})
		}
	}
	return q
}

func (q *questions) end() (asked, lost int64) {
	close(q.done)
	q.asking.Wait()
	return q.asked.Load(), q.lost.Load()
}

// If another ABI fails to start, nothing changes. When it starts again, it continues from there.
func TestVersionFails(t *testing.T) {
	netlab.Privileged(t)
	bpffs := netlab.BPFFS(t)
	b := solo(t, bpffs)
	apply(t, b, state(desired.SNAT, 1, 2))
	v := next(t, true)
	log := slog.New(slog.DiscardHandler)
	failing, err := openVersion(Config{BPFFS: bpffs, Devices: []string{"nowhere"}, Flows: 1024, Log: log}, v)
	if err != nil {
		t.Fatal(err)
	}
	if err := failing.Apply(context.Background(), state(desired.SNAT, 2, 3)); err == nil {
		t.Error("a missing device is no error")
	}
	if err := failing.Close(context.Background(), false); err != nil {
		t.Fatal(err)
	}
	if d := drift(t, b); len(d) > 0 {
		t.Errorf("the running version was changed: %v", d)
	}
	numbers := b.ids.backends
	again, err := openVersion(Config{BPFFS: bpffs, Devices: []string{"lo"}, Flows: 1024, Log: log}, next(t, true))
	if err != nil {
		t.Fatal(err)
	}
	apply(t, again, state(desired.SNAT, 3, 2))
	for key, number := range again.ids.backends {
		if had, ok := numbers[key]; ok && had != number {
			t.Errorf("backend %d now has id %d", had, number)
		} else if !ok && number <= uint32(len(numbers)) {
			t.Errorf("a new backend has the id %d of another", number)
		}
	}
	if err := again.Close(context.Background(), false); err != nil {
		t.Fatal(err)
	}
}
