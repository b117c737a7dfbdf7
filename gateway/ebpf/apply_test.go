package ebpf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// solo returns a balancer in the test's own namespace, on its loopback device.
func solo(t testing.TB, bpffs string) *Balancer {
	t.Helper()
	b, err := Open(Config{BPFFS: bpffs, Devices: []string{"lo"}, Flows: 1024, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(context.Background(), false); err != nil {
			t.Error(err)
		}
	})
	return b
}

func apply(t testing.TB, b *Balancer, s *desired.State) {
	t.Helper()
	if err := b.Apply(context.Background(), s); err != nil {
		t.Fatal(err)
	}
}

func drift(t testing.TB, b *Balancer) desired.Faults {
	t.Helper()
	d, err := b.Drift(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Drift reports changes by other processes, and the next Apply repairs them. A successor process finds nothing to
// write.
func TestDriftIsRepaired(t *testing.T) {
	netlab.Privileged(t)
	bpffs := netlab.BPFFS(t)
	b := solo(t, bpffs)
	s := state(desired.SNAT, 1, 2)
	apply(t, b, s)
	if d := drift(t, b); len(d) > 0 {
		t.Fatalf("drift right after Apply: %v", d)
	}
	lo := 1
	for what, spoil := range map[string]func() error{
		"vips": func() error { return b.k.maps[bpf.MapGatewayVIPs].Delete(bpf.Addr16(vips[0])) },
		"origins": func() error {
			return b.k.maps[bpf.MapGatewayOrigins].Delete(bpf.GatewayOriginKey(endpoint(netip.AddrPortFrom(backend(0, 1), backendPort), 6)))
		},
		"frontends": func() error {
			return b.k.maps[bpf.MapFrontends].Put(endpoint(netip.AddrPortFrom(vips[0], 9), 6), bpf.GatewayFrontend{Id: 99})
		},
		"backends": func() error { return b.k.maps[bpf.MapBackends].Put(uint32(77), bpf.GatewayBackend{}) },
		"tables": func() error {
			inner, err := b.k.table(1)
			if err != nil {
				return err
			}
			defer inner.Close()
			return inner.Put(uint32(0), make([]byte, 4*len(bpf.GatewayTable{})))
		},
		"device lo": func() error { return b.k.detach(filepath.Join(b.k.links(), strconv.Itoa(lo))) },
	} {
		if err := spoil(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if d := drift(t, b); len(d) != 1 {
			t.Errorf("%s: drift %v, want one fault", what, d)
		}
		apply(t, b, s)
		if d := drift(t, b); len(d) > 0 {
			t.Errorf("%s: drift %v after the repair", what, d)
		}
	}
	next := solo(t, bpffs)
	if d := next.have.differences(b.have); d[bpf.MapFrontends] || d[bpf.MapBackends] || d[bpf.MapGatewayVIPs] || len(next.have.tables) != len(b.have.tables) {
		t.Errorf("a successor finds differences: %v", d)
	}
	apply(t, next, s)
	other := &desired.State{Cluster: "a", Group: "edge", Balancer: desired.NFTables}
	if faults, ok := errors.AsType[desired.Faults](next.Apply(context.Background(), other)); !ok || faults[0].Field != "balancer" {
		t.Errorf("a state for another balancer: faults %v", faults)
	}
	apply(t, next, &desired.State{Cluster: "a", Group: "edge", Balancer: desired.EBPF})
	if len(next.have.vips)+len(next.have.frontends)+len(next.have.backends)+len(next.have.origins)+len(next.have.sources)+len(next.have.tables) > 0 {
		t.Errorf("without VIPs the maps hold %+v", next.have)
	}
	if err := Remove(bpffs); err != nil {
		t.Fatal(err)
	}
	if runs, err := next.k.runs(lo); err != nil || runs {
		t.Errorf("the program runs after Remove: %t, %v", runs, err)
	}
	if err := Remove(bpffs); err != nil {
		t.Fatal(err)
	}
}

// A state that cannot be applied changes nothing.
func TestApplyIsAllOrNothing(t *testing.T) {
	netlab.Privileged(t)
	b := solo(t, netlab.BPFFS(t))
	apply(t, b, state(desired.Routed, 1, 2))
	bad := state(desired.Masquerade, 1, 2, 3) // the namespace has no route to its backends
	faults, ok := errors.AsType[desired.Faults](b.Apply(context.Background(), bad))
	if !ok || faults[0].Field != "vips[0].return" {
		t.Fatalf("a state without a route to its backends: faults %v", faults)
	}
	// The map of sources holds fewer entries than this.
	full := state(desired.Routed, 3)
	for i := range 70_000 {
		full.VIPs[0].Frontends[0].Sources = append(full.VIPs[0].Frontends[0].Sources, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32))
	}
	if err := b.Apply(context.Background(), full); err == nil {
		t.Fatal("more sources than the map can hold were applied")
	}
	if d := drift(t, b); len(d) > 0 {
		t.Errorf("after Apply failed: %v", d)
	}
	if n := len(b.have.backends); n != 8 {
		t.Errorf("there are %d backends, want the previous 8", n)
	}
}

// thousand returns a state of 1,000 VIPs with 10 backends each.
func thousand() *desired.State {
	s := &desired.State{Cluster: "a", Group: "edge", Balancer: desired.EBPF}
	for v := range 1000 {
		fe := desired.Frontend{Service: fmt.Sprint("shop/s", v), Protocol: "TCP", Port: 80}
		for n := range 10 {
			fe.Backends = append(fe.Backends, desired.Backend{Addr: netip.AddrFrom4([4]byte{10, 1 + byte(v>>8), byte(v), byte(n)}), Port: 8080, Weight: 1})
		}
		s.VIPs = append(s.VIPs, desired.VIP{
			Addr: netip.AddrFrom4([4]byte{198, 18, byte(v >> 8), byte(v)}), Announce: desired.ByBGP, Return: desired.Routed, Frontends: []desired.Frontend{fe},
		})
	}
	return s
}

// BenchmarkApply adds or removes one backend in a state of 1,000 VIPs with 10 backends each.
func BenchmarkApply(b *testing.B) {
	netlab.Privileged(b)
	balancer := solo(b, netlab.BPFFS(b))
	more := thousand()
	start := time.Now()
	apply(b, balancer, more)
	all := time.Since(start)
	less := thousand()
	less.VIPs[500].Frontends[0].Backends = slices.Clone(less.VIPs[500].Frontends[0].Backends[:9])
	states := [2]*desired.State{less, more}
	i := 0
	for b.Loop() {
		apply(b, balancer, states[i%2])
		i++
	}
	start = time.Now()
	if d := drift(b, balancer); len(d) > 0 {
		b.Fatal(d)
	}
	b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/drift")
	b.ReportMetric(float64(all.Milliseconds()), "ms/all")
}
