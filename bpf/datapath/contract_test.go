package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// dataplane is the contract of Datapath and Fake.
type dataplane interface {
	Load(ctx context.Context) (lb.State, error)
	Apply(ctx context.Context, p lb.Plan) error
	Limits() lb.Limits
	Writes() uint64
	Refusals() (map[Refusal]uint64, error)
	Hooks() []HookStatus
	Clusters() (map[clusterset.ClusterID]Evidence, error)
	CloseStale(ctx context.Context) (closed int, err error)
	Follow(ctx context.Context) error
	Missing() []string
	Findings() ([]Finding, error)
	Close() error
}

var (
	_ dataplane = (*Datapath)(nil)
	_ dataplane = (*Fake)(nil)
)

// testConfig returns a node for one test: an empty cgroup and an empty BPF filesystem.
func testConfig(t *testing.T) Config {
	t.Helper()
	return Config{CgroupRoot: netlab.NewTestCgroup(t).Path, BPFFS: netlab.BPFFS(t)}
}

func mustOpen(t *testing.T, cfg Config) *Datapath {
	t.Helper()
	d, err := Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestContract(t *testing.T) {
	kinds := map[string]func(t *testing.T) dataplane{
		"kernel": func(t *testing.T) dataplane {
			t.Helper()
			return mustOpen(t, testConfig(t))
		},
		"fake": func(*testing.T) dataplane { return NewFake(lb.NewState()) },
	}
	for name, start := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Run("starts empty", func(t *testing.T) { expect(t, start(t), lb.NewState()) })
			t.Run("holds what was applied", func(t *testing.T) { holdsWhatWasApplied(t, start(t)) })
			t.Run("ignores deletes of missing entries", func(t *testing.T) { deletesMissingEntries(t, start(t)) })
			t.Run("stops with its context", func(t *testing.T) { stopsWithContext(t, start(t)) })
			t.Run("reports nothing on an idle node", func(t *testing.T) { reportsNothingWhenIdle(t, start(t)) })
			t.Run("knows its hooks and reasons", func(t *testing.T) { knowsHooks(t, start(t)) })
		})
	}
}

// small are map sizes that a few Services exceed.
var small = map[string]uint32{bpf.MapFrontends: 6, bpf.MapSlots: 120, bpf.MapBackends: 8, bpf.MapServices: 5}

// Full maps are no error: what fits is served, Problems name the rest, and the rest is served once there is room.
func TestFullMaps(t *testing.T) {
	kinds := map[string]func(t *testing.T) dataplane{
		"kernel": func(t *testing.T) dataplane {
			t.Helper()
			b := currentVersion(t)
			for name, size := range small {
				b.specs[0].Maps[name].MaxEntries = size
			}
			d, err := open(t.Context(), testConfig(t), b, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = d.Close() })
			return d
		},
		"fake": func(*testing.T) dataplane {
			f := NewFake(lb.NewState())
			f.Capacity = lb.Limits{Frontends: 6, Slots: 120, Backends: 8, Services: 5}
			return f
		},
	}
	for name, start := range kinds {
		t.Run(name, func(t *testing.T) {
			d := start(t)
			planner := lb.NewPlanner(lb.NewState())
			sync := func(services ...clusterset.Service) string {
				snap := &clusterset.Snapshot{Services: services}
				_, problems := plan(t, d, planner, snap)
				if again, still := plan(t, d, planner, snap); again > 0 {
					problems = still // room that was not there before others went
				}
				expect(t, d, planner.State())
				var named []string
				for _, p := range problems {
					if p.Reason != lb.NoRoom {
						t.Errorf("an unexpected problem: %s", p)
					}
					named = append(named, p.Service.Name)
				}
				return strings.Join(slices.Compact(named), " ")
			}
			three := []clusterset.Service{numbered(0, 2), numbered(1, 2), numbered(2, 3)}
			for _, step := range []struct {
				what     string
				services []clusterset.Service
				without  string // the Services without room
			}{
				{"some room is left", three, ""},
				{"backends do not fit", append(slices.Clone(three), numbered(3, 1), numbered(4, 2)), "s4"},
				{"frontends and names do not fit", append(slices.Clone(three), numbered(3, 0), numbered(4, 0), numbered(5, 0), numbered(6, 0)), "s5 s6"},
				{"slots do not fit", []clusterset.Service{maglev(numbered(0, 2)), maglev(numbered(1, 2)), numbered(2, 3)}, "s1"},
				{"all of them fit again", three, ""},
				{"other Services take all the room", []clusterset.Service{numbered(7, 3), numbered(8, 3), numbered(9, 2)}, ""},
			} {
				if without := sync(step.services...); without != step.without {
					t.Errorf("%s: no room for %q, want %q", step.what, without, step.without)
				}
			}
		})
	}
}

// plan brings d to snap, and returns the number of writes.
func plan(t *testing.T, d dataplane, planner *lb.Planner, snap *clusterset.Snapshot) (writes int, problems []lb.Problem) {
	t.Helper()
	p, problems := planner.Plan(lb.Input{Snapshot: snap, Limits: d.Limits()})
	if err := d.Apply(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p.Writes(), problems
}

// numbered returns the i-th Service, with its own endpoints.
func numbered(i, endpoints int) clusterset.Service {
	svc := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: fmt.Sprint("s", i)}, Type: clusterset.ClusterSetIP,
		IPs:   []netip.Addr{netip.AddrFrom4([4]byte{243, 0, 0, byte(i)})},
		Ports: []clusterset.Port{{Name: "web", Protocol: clusterset.TCP, Port: 80}},
	}}
	slice := clusterset.Slice{Cluster: "a", Family: clusterset.IPv4, Ports: []clusterset.EndpointPort{{Name: "web", Protocol: clusterset.TCP, Port: 8080}}}
	for e := range endpoints {
		slice.Endpoints = append(slice.Endpoints, clusterset.Endpoint{
			Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i), byte(1 + e)})}, Ready: true, Serving: true,
		})
	}
	svc.Slices = []clusterset.Slice{slice}
	return svc
}

func maglev(svc clusterset.Service) clusterset.Service {
	svc.Annotations = map[string]string{lb.AnnotationBalancer: "maglev"}
	return svc
}

// stateOf returns a state of n frontends of both families and protocols, each of a Service with two backends.
func stateOf(n int) lb.State {
	s := lb.NewState()
	s.Clusters[1], s.Clusters[2] = "a", "b.eu"
	s.Ranges[netip.MustParsePrefix("243.0.0.0/8")], s.Ranges[netip.MustParsePrefix("fd00:243::/48")] = true, true
	for i := range n {
		vip, pod := netip.AddrFrom4([4]byte{243, 0, byte(i >> 8), byte(i)}), netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		if i%2 == 1 {
			vip, pod = netip.MustParseAddr(fmt.Sprintf("fd00:243::%x", i)), netip.MustParseAddr(fmt.Sprintf("fd00:10::%x", i))
		}
		proto := []clusterset.Protocol{clusterset.TCP, clusterset.UDP}[i/2%2]
		id := lb.FrontendID(i + 1)
		s.Frontends[lb.Address{AddrPort: netip.AddrPortFrom(vip, 80), Protocol: proto}] = lb.Frontend{
			ID: id, Count: 2, Service: lb.ServiceID(i + 1), Affinity: uint32(i % 3), Maglev: i%2 == 1,
		}
		s.Services[lb.ServiceID(i+1)] = clusterset.ServiceName{Namespace: "demo", Name: fmt.Sprint("s", i)}
		for j := range 2 {
			be := lb.BackendID(2*i + j + 1)
			s.Slots[lb.Slot{Frontend: id, Index: uint32(j)}] = be
			s.Backends[be] = lb.Backend{
				Address: lb.Address{AddrPort: netip.AddrPortFrom(pod, uint16(8080+j)), Protocol: proto}, Cluster: lb.ClusterIndex(i%2 + 1), Draining: j == 1,
			}
		}
	}
	return s
}

func holdsWhatWasApplied(t *testing.T, d dataplane) {
	t.Helper()
	// More than one batch, to test the borders between batches.
	large, small := stateOf(chunk+7), stateOf(3)
	for _, step := range []lb.State{large, small, lb.NewState(), large} {
		have, err := d.Load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		before, plan := d.Writes(), lbtest.Diff(have, step)
		if err := d.Apply(t.Context(), plan); err != nil {
			t.Fatal(err)
		}
		if have, want := d.Writes()-before, uint64(plan.Writes()); have != want {
			t.Errorf("%d writes counted, want %d", have, want)
		}
		expect(t, d, step)
	}
}

func deletesMissingEntries(t *testing.T, d dataplane) {
	t.Helper()
	have := stateOf(5)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), have)); err != nil {
		t.Fatal(err)
	}
	gone := lb.Plan{
		Frontends: lb.Changes[lb.Address, lb.Frontend]{Delete: []lb.Address{{AddrPort: netip.MustParseAddrPort("243.9.9.9:9"), Protocol: clusterset.TCP}}},
		Slots:     lb.Changes[lb.Slot, lb.BackendID]{Delete: []lb.Slot{{Frontend: 900, Index: 1}, {Frontend: 1, Index: 1}, {Frontend: 901, Index: 1}}},
		Backends:  lb.Changes[lb.BackendID, lb.Backend]{Delete: []lb.BackendID{900, 901, 2, 902}},
	}
	if err := d.Apply(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	have.Apply(gone)
	expect(t, d, have)
}

func stopsWithContext(t *testing.T, d dataplane) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Apply(ctx, lbtest.Diff(lb.NewState(), stateOf(2))); !errors.Is(err, context.Canceled) {
		t.Errorf("Apply: %v, want %v", err, context.Canceled)
	}
	if _, err := d.Load(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Load: %v, want %v", err, context.Canceled)
	}
	expect(t, d, lb.NewState())
}

// reportsNothingWhenIdle checks the other methods on a node without traffic, packet path and sockets.
func reportsNothingWhenIdle(t *testing.T, d dataplane) {
	t.Helper()
	seen, err := d.Clusters()
	if err != nil || len(seen) != 0 {
		t.Errorf("evidence %v, %v, want none", seen, err)
	}
	if n, err := d.CloseStale(t.Context()); n != 0 || err != nil {
		t.Errorf("closed %d, %v, want none", n, err)
	}
	if found, err := d.Findings(); len(found) != 0 || err != nil {
		t.Errorf("findings %v, %v, want none without a packet path", found, err)
	}
	if m := d.Missing(); len(m) != 0 {
		t.Errorf("missing %v, want nothing here", m)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Follow(ctx); err != nil {
		t.Errorf("Follow: %v, want nil at the end", err)
	}
}

func knowsHooks(t *testing.T, d dataplane) {
	t.Helper()
	var want []HookStatus
	for _, h := range bpf.Hooks() {
		want = append(want, HookStatus{Name: h.Name, Attached: true})
	}
	if diff := cmp.Diff(want, d.Hooks()); diff != "" {
		t.Errorf("hooks (-want +got):\n%s", diff)
	}
	refusals, err := d.Refusals()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[Refusal]uint64{}, refusals); diff != "" {
		t.Errorf("refusals (-want +got):\n%s", diff)
	}
}

func expect(t *testing.T, d dataplane, want lb.State) {
	t.Helper()
	have, err := d.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if lbtest.Diff(have, want).Writes() == 0 {
		return
	}
	t.Fatalf("maps (-want +got):\n%.2000s", cmp.Diff(want.Text(), have.Text()))
}

// A Fake can fail after any number of writes, as the kernel can.
func TestFakeFailsHalfWay(t *testing.T) {
	broken := errors.New("map full")
	plan := lbtest.Diff(lb.NewState(), stateOf(4))
	for n := range plan.Writes() {
		f := NewFake(lb.NewState())
		f.FailAfter, f.Err = &n, broken
		if err := f.Apply(t.Context(), plan); !errors.Is(err, broken) {
			t.Fatalf("after %d writes: %v, want %v", n, err, broken)
		}
		want := lb.NewState()
		want.Apply(plan.Prefix(n))
		expect(t, f, want)
	}
}

// Decoding an encoded key or value returns the original.
func FuzzEncode(f *testing.F) {
	f.Add([]byte{243, 0, 0, 5}, uint16(80), uint8(6), uint32(1), uint32(2))
	f.Add(netip.MustParseAddr("fd00:243::5").AsSlice(), uint16(65535), uint8(17), uint32(0), ^uint32(0))
	f.Add(netip.MustParseAddr("::ffff:243.0.0.5").AsSlice(), uint16(0), uint8(255), ^uint32(0), uint32(0))
	f.Fuzz(func(t *testing.T, ip []byte, port uint16, proto uint8, id, n uint32) {
		addr, ok := netip.AddrFromSlice(ip)
		if !ok {
			t.Skip("no address")
		}
		a := lb.Address{AddrPort: netip.AddrPortFrom(addr.Unmap(), port), Protocol: clusterset.Protocol(proto)}
		if got := decodeFrontendKey(encodeFrontendKey(a)); got != a {
			t.Errorf("frontend key %v came back as %v", a, got)
		}
		be := lb.Backend{Address: a, Cluster: lb.ClusterIndex(id), Draining: n%2 == 1}
		if got := decodeBackend(encodeBackend(be)); got != be {
			t.Errorf("backend %v came back as %v", be, got)
		}
		r := netip.PrefixFrom(a.AddrPort.Addr(), int(n)%(a.AddrPort.Addr().BitLen()+1)).Masked()
		if got := decodeRange(encodeRange(r)); got != r {
			t.Errorf("range %v came back as %v", r, got)
		}
		fe := lb.Frontend{ID: lb.FrontendID(id), Count: n, Service: lb.ServiceID(n), Affinity: id, Maglev: n%2 == 1}
		if got := decodeFrontend(encodeFrontend(fe)); got != fe {
			t.Errorf("frontend %v came back as %v", fe, got)
		}
		slot := lb.Slot{Frontend: lb.FrontendID(id), Index: n}
		if got := decodeSlot(encodeSlot(slot)); got != slot {
			t.Errorf("slot %v came back as %v", slot, got)
		}
	})
}

// Apply deletes the affinities of a backend that was removed from a frontend, in that frontend only.
func TestApplyDeletesStaleAffinities(t *testing.T) {
	d := mustOpen(t, testConfig(t))
	m := d.maps[bpf.MapAffinities]
	for frontend := range uint32(3) {
		for backend := range uint32(3) {
			k := bpf.AffinityKey{FrontendId: frontend + 1}
			k.Client[15] = byte(backend)
			if err := m.Put(k, bpf.Affinity{FrontendId: frontend + 1, BackendId: backend + 1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := d.Apply(t.Context(), lb.Plan{StaleAffinities: []lb.StaleAffinity{{Frontend: 1, Backend: 2}, {Frontend: 3, Backend: 3}}}); err != nil {
		t.Fatal(err)
	}
	var left []string
	if err := dump(t.Context(), d.Reader, bpf.MapAffinities, func(k bpf.AffinityKey, v bpf.Affinity) {
		left = append(left, fmt.Sprint(k.FrontendId, "-", v.BackendId))
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(left)
	if want := []string{"1-1", "1-3", "2-1", "2-2", "2-3", "3-1", "3-2"}; !slices.Equal(want, left) {
		t.Errorf("left: %v, want %v", left, want)
	}
}
