package nft

import (
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func setSysctl(sysctl, value string) error {
	return os.WriteFile("/proc/sys/"+sysctl, []byte(value), 0)
}

// ruleCounter returns how many packets the rules with a reason counted on a gateway, in both families.
func (w *testbed) ruleCounter(gateway int, why string) (n uint64) {
	w.t.Helper()
	in(w.t, w.gateways[gateway].ns, func() error {
		return w.gateways[gateway].eachRule(func(r kernelRule) {
			if strings.HasPrefix(r.comment, why) {
				n += r.packets
			}
		})
	})
	return n
}

// poll waits until a condition holds.
func (w *testbed) poll(is func() bool, otherwise string) {
	w.t.Helper()
	for end := time.Now().Add(patience); !is(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatal(otherwise)
		}
	}
}

// Any change to the table is detected and repaired. Other tables are left alone.
func TestDrift(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	g := w.gateways[0]
	w.apply(w.state(each(func(f *desired.Frontend) { f.Sources = clientNets })))
	drift := func() (found []desired.Fault) {
		t.Helper()
		in(t, g.ns, func() (err error) {
			found, err = g.Drift(t.Context())
			return err
		})
		return found
	}
	for _, tt := range []struct {
		command string
		drifts  bool
	}{
		{"add table inet others", false},
		{"flush table ip " + Table, true},
		{"delete table ip6 " + Table, true},
		{"flush ruleset", true},
		{"flush set ip " + Table + " vips", true},
		{"flush set ip6 " + Table + " sources", true},
		{"flush map ip6 " + Table + " maglev-restricted", true},
		{"flush chain ip " + Table + " source", true},
		{"flush chain ip6 " + Table + " to-peers", true},
		{"add rule ip " + Table + " refuse drop", true},
		{"add element ip " + Table + " vips { 192.0.2.1 }", true},
	} {
		in(t, g.ns, func() error {
			if out, err := exec.Command("nft", strings.Fields(tt.command)...).CombinedOutput(); err != nil {
				t.Errorf("%s: %s", tt.command, out)
			}
			return nil
		})
		if found := drift(); (len(found) > 0) != tt.drifts {
			t.Errorf("%s: drift %v", tt.command, found)
		}
		w.apply(w.state(each(func(f *desired.Frontend) { f.Sources = clientNets })))
		if found := drift(); len(found) > 0 {
			t.Errorf("%s: mended, and then %v", tt.command, found)
		}
	}
}

// A restarted balancer recognises its table and writes nothing; from then on it writes differences.
func TestRestart(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state())
	g := w.gateways[0]
	b, err := New(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	in(t, g.ns, func() error {
		s, err := g.open()
		if err != nil {
			return err
		}
		before, err := s.generation()
		if err != nil {
			return err
		}
		if err := b.Apply(t.Context(), w.state()); err != nil {
			return err
		}
		if after, err := s.generation(); err != nil || after != before {
			t.Errorf("generation %d became %d, %v", before, after, err)
		}
		return b.Apply(t.Context(), &desired.State{})
	})
	if have, _ := read(t, g.ns, b); len(have) != 0 {
		t.Errorf("left in the kernel: %v", have)
	}
}

// Remove leaves nothing, with or without a table.
func TestRemove(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state())
	for range 2 {
		in(t, w.gateways[0].ns, Remove)
	}
	if _, recreate := read(t, w.gateways[0].ns, w.gateways[0].Balancer); !recreate {
		t.Error("the table is still there")
	}
}

// A change that the kernel refuses changes nothing.
func TestRefusedByKernel(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state())
	g := w.gateways[0]
	before, _ := read(t, g.ns, g.Balancer)
	// Removing fails for an element that the kernel does not have, although the balancer expects it.
	in(t, g.ns, func() error {
		g.contents.tables[listener{vips[0], "TCP", vipPort}].prefix = endpoint(netip.MustParseAddr("203.0.113.1"), 6, 1)
		if err := g.Apply(t.Context(), &desired.State{}); err == nil {
			t.Error("the kernel refused nothing")
		}
		if len(g.contents.vips) != len(vips) {
			t.Errorf("the balancer believes that it has %d VIPs", len(g.contents.vips))
		}
		return nil
	})
	after, _ := read(t, g.ns, g.Balancer)
	if c := diff(before, after); c.size() != 0 {
		t.Errorf("%d elements changed", c.size())
	}
}

// read returns the contents of a namespace's table, without empty sets.
func read(t *testing.T, ns *netlab.Namespace, b *Balancer) (have map[familySet]map[string]string, recreate bool) {
	t.Helper()
	in(t, ns, func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		s, err := b.open()
		if err != nil {
			return err
		}
		have, recreate, err = b.read(s)
		return err
	})
	maps.DeleteFunc(have, func(_ familySet, all map[string]string) bool { return len(all) == 0 })
	return have, recreate
}

// bench is a balancer with many VIPs.
type bench struct {
	b         testing.TB
	ns        *netlab.Namespace
	balancer  *Balancer
	all, less *desired.State
}

func newBench(b testing.TB, vips int) *bench {
	b.Helper()
	netlab.Privileged(b)
	ns, err := netlab.NewNamespace()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = ns.Close() })
	balancer, err := New(slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	w := &bench{b, ns, balancer, large(vips), large(vips)}
	f := &w.less.VIPs[vips/2].Frontends[0]
	f.Backends = f.Backends[:9]
	w.change(false)
	return w
}

// change applies the state with one backend less, or with all.
func (w *bench) change(less bool) {
	w.b.Helper()
	s := w.all
	if less {
		s = w.less
	}
	if err := w.ns.Do(func() error { return w.balancer.Apply(w.b.Context(), s) }); err != nil {
		w.b.Fatal(err)
	}
}
