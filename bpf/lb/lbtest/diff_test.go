package lbtest

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func TestDiffOfEveryTable(t *testing.T) {
	t.Parallel()
	at := lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.5:80"), Protocol: clusterset.TCP}
	have, want := lb.NewState(), lb.NewState()
	have.Services[1], want.Services[1], want.Services[2] = clusterset.ServiceName{Name: "a"}, clusterset.ServiceName{Name: "b"}, clusterset.ServiceName{Name: "c"}
	have.Clusters[1], want.Clusters[2] = "a", "a"
	have.Backends[1], want.Backends[1] = lb.Backend{Address: at}, lb.Backend{Address: at, Draining: true}
	have.Slots[lb.Slot{Frontend: 1}] = 1
	want.Frontends[at] = lb.Frontend{ID: 1}
	have.Ranges[netip.MustParsePrefix("243.0.0.0/8")], want.Ranges[netip.MustParsePrefix("fd00::/8")] = true, true

	plan := Diff(have, want)
	if n := plan.Writes(); n != 9 {
		t.Errorf("%d writes, want 9: %+v", n, plan)
	}
	have.Apply(plan)
	if diff := cmp.Diff(want.Text(), have.Text()); diff != "" {
		t.Errorf("have + Diff(have, want) is not want (-want +got):\n%s", diff)
	}
	if n := Diff(want, want).Writes(); n != 0 {
		t.Errorf("equal states differ by %d writes", n)
	}
}
