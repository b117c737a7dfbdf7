package agent

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func tcp(a string) lb.Address {
	return lb.Address{AddrPort: netip.MustParseAddrPort(a), Protocol: cs.TCP}
}

// Explain names each difference between kernel and snapshot, and the reason why an endpoint gets no clients.
func TestExplain(t *testing.T) {
	mixed := func() *cs.Snapshot {
		snap := snapshot(2, "10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080", "10.1.0.4:8080")
		for i := range snap.Services {
			s := snap.Services[i].Slices
			s[1].Endpoints[0].Ready = false
			s[2].Endpoints[0].Ready, s[2].Endpoints[0].Serving, s[2].Endpoints[0].Terminating = false, true, true
			s[3].Cluster = "b"
			snap.Services[i].Slices[0].Endpoints[0].NodeName = cs.Share("n1")
		}
		return snap
	}
	name := cs.ServiceName{Namespace: "demo", Name: "s0"}
	at := tcp("243.0.0.1:80")
	served := ExplainedFrontend{Address: at, State: FrontendCorrect, Backends: []lb.Address{tcp("10.1.0.1:8080"), tcp("10.1.0.4:8080")}}
	endpoints := func(first, fourth EndpointState) []ExplainedEndpoint {
		return []ExplainedEndpoint{
			{netip.MustParseAddr("10.1.0.1"), "a", "n1", first},
			{netip.MustParseAddr("10.1.0.2"), "a", "", EndpointNotReady},
			{netip.MustParseAddr("10.1.0.3"), "a", "", EndpointTerminating},
			{netip.MustParseAddr("10.1.0.4"), "b", "", fourth},
		}
	}
	for what, c := range map[string]struct {
		change  func(*cs.Snapshot)
		corrupt func(lb.State)
		drain   map[cs.ClusterID]bool
		want    Explanation
	}{
		"as it should be": {want: Explanation{Frontends: []ExplainedFrontend{served}, Endpoints: endpoints(EndpointServes, EndpointServes)}},
		"missing in the kernel": {
			corrupt: func(s lb.State) { delete(s.Frontends, at) },
			want:    Explanation{Frontends: []ExplainedFrontend{{Address: at, State: FrontendMissing}}, Endpoints: endpoints(EndpointServes, EndpointServes)},
		},
		"a slot without a backend": {
			corrupt: func(s lb.State) { s.Slots[lb.Slot{Frontend: s.Frontends[at].ID, Index: 1}] = 99 },
			want: Explanation{
				Frontends: []ExplainedFrontend{{Address: at, State: FrontendWrong, Backends: []lb.Address{tcp("10.1.0.1:8080")}}},
				Endpoints: endpoints(EndpointServes, EndpointServes),
			},
		},
		"a slot with another backend": {
			corrupt: func(s lb.State) {
				fe := s.Frontends[at].ID
				s.Slots[lb.Slot{Frontend: fe, Index: 1}] = s.Slots[lb.Slot{Frontend: fe, Index: 0}]
			},
			want: Explanation{
				Frontends: []ExplainedFrontend{{Address: at, State: FrontendWrong, Backends: []lb.Address{tcp("10.1.0.1:8080")}}},
				Endpoints: endpoints(EndpointServes, EndpointServes),
			},
		},
		"a member is drained": {
			drain: map[cs.ClusterID]bool{"b": true},
			want: Explanation{
				Frontends: []ExplainedFrontend{{Address: at, State: FrontendCorrect, Backends: []lb.Address{tcp("10.1.0.1:8080")}}},
				Endpoints: endpoints(EndpointServes, EndpointDrained),
			},
		},
		"another cluster is preferred": {
			change: func(s *cs.Snapshot) {
				for i := range s.Services {
					s.Services[i].Annotations = map[string]string{lb.AnnotationClusterWeights: "a=1,b=0"}
				}
			},
			want: Explanation{
				Frontends: []ExplainedFrontend{{Address: at, State: FrontendCorrect, Backends: []lb.Address{tcp("10.1.0.1:8080")}}},
				Endpoints: endpoints(EndpointServes, EndpointStandby),
			},
		},
		"another Service has the VIP": {
			change: func(s *cs.Snapshot) {
				s.Services[0].Service.Name = "r0" // it comes first
				s.Services[1].Service.Name = "s0"
				s.Services[1].IPs = s.Services[0].IPs
			},
			want: Explanation{
				Frontends: []ExplainedFrontend{{
					Address: at, State: FrontendConflict, Owner: cs.ServiceName{Namespace: "demo", Name: "r0"}, Backends: served.Backends,
				}},
				Endpoints: endpoints(EndpointServes, EndpointServes),
				Problems:  []lb.Problem{{Service: name, Reason: lb.VIPTaken, Message: "243.0.0.1:80/TCP belongs to demo/r0"}},
			},
		},
	} {
		t.Run(what, func(t *testing.T) {
			f := datapath.NewFake(lb.NewState())
			f.ServiceCounters = map[cs.ServiceName]datapath.Counters{name: {Chosen: 3, Refused: map[bpf.DropReason]uint64{bpf.DropNoBackend: 1}}}
			a, snap := mustNew(t, f), mixed()
			if c.change != nil {
				c.change(snap)
			}
			mustSync(t, a, snap)
			if err := a.drain(t.Context(), c.drain); err != nil {
				t.Fatal(err)
			}
			if c.corrupt != nil {
				f.Corrupt(c.corrupt)
			}
			have, err := a.Explain(name)
			if err != nil {
				t.Fatal(err)
			}
			c.want.Known, c.want.Counters = true, f.ServiceCounters[name]
			if diff := cmp.Diff(c.want, have, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}), cmpopts.IgnoreFields(Explanation{}, "Import")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if have.Import.Service != name || len(have.Import.IPs) != 1 {
				t.Errorf("import %+v", have.Import)
			}
		})
	}
}

// A Service that the snapshot does not have has only counters, and so has every Service before the first snapshot.
func TestExplainUnknown(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	for range 2 {
		if e, err := a.Explain(cs.ServiceName{Namespace: "demo", Name: "unknown"}); err != nil || e.Known || e.Frontends != nil {
			t.Errorf("%+v, %v, want nothing", e, err)
		}
		mustSync(t, a, snapshot(2, "10.1.0.1:8080"))
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Explain(cs.ServiceName{Namespace: "demo", Name: "s0"}); !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want %v", err, ErrClosed)
	}
	if c, err := a.Counters(); c != nil || err != nil {
		t.Errorf("%v, %v after Close", c, err)
	}
}
