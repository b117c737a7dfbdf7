package main

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/tables/tablestest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// shown returns a state with two Services: demo/web over TCP, balanced by Maglev over two clusters, with a draining backend,
// and demo/dns over UDP, without backends.
func shown() lb.State {
	s := lb.NewState()
	tcp := func(a string) lb.Address {
		return lb.Address{AddrPort: netip.MustParseAddrPort(a), Protocol: clusterset.TCP}
	}
	s.Services[1], s.Services[2] = clusterset.ServiceName{Namespace: "demo", Name: "web"}, clusterset.ServiceName{Namespace: "demo", Name: "dns"}
	s.Clusters[1], s.Clusters[2] = "a", "b.eu"
	s.Backends[1] = lb.Backend{Address: tcp("10.1.0.1:8080"), Cluster: 1}
	s.Backends[2] = lb.Backend{Address: tcp("[fd00::2]:8080"), Cluster: 2}
	s.Backends[3] = lb.Backend{Address: tcp("10.1.0.3:8080"), Cluster: 1, Draining: true}
	s.Backends[4] = lb.Backend{Address: tcp("10.1.0.4:8080"), Cluster: 1}
	for i, be := range []lb.BackendID{1, 2, 1} {
		s.Slots[lb.Slot{Frontend: 1, Index: uint32(i)}] = be
	}
	s.Frontends[tcp("243.0.0.5:80")] = lb.Frontend{ID: 1, Count: 3, Service: 1, Affinity: 10800, Maglev: true}
	s.Frontends[lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.6:53"), Protocol: clusterset.UDP}] = lb.Frontend{ID: 2, Service: 2}
	return s
}

func TestTables(t *testing.T) {
	ap := netip.MustParseAddrPort
	for name, c := range map[string]struct {
		table tables.Table
		want  string
	}{
		"services": {services(shown(), map[lb.ServiceID]uint64{1: 42}), `
SERVICE VIP PROTOCOL BACKENDS CLUSTERS BALANCER AFFINITY CHOSEN
demo/dns 243.0.0.6:53 UDP 0 - random - 0
demo/web 243.0.0.5:80 TCP 2 a,b.eu maglev 3h0m0s 42`},
		"backends": {backends(shown()), `
BACKEND PROTOCOL CLUSTER STATE SERVICES
10.1.0.1:8080 TCP a ready demo/web
10.1.0.3:8080 TCP a draining -
10.1.0.4:8080 TCP a unused -
[fd00::2]:8080 TCP b.eu ready demo/web`},
		"connections": {connections([]datapath.Connection{
			{Protocol: clusterset.UDP, Client: ap("10.9.0.1:4000"), VIP: ap("243.0.0.6:53"), Backend: ap("10.1.0.1:53"), State: "open", Silent: 90 * time.Second},
			{
				Protocol: clusterset.TCP, Client: ap("10.9.0.1:4001"), VIP: ap("243.0.0.5:80"), Backend: ap("10.1.0.1:8080"), Cluster: "a",
				Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}, State: "half", Fast: true, Silent: time.Second,
			},
		}), `
PROTOCOL CLIENT VIP BACKEND CLUSTER SERVICE STATE PATH SILENT
TCP 10.9.0.1:4001 243.0.0.5:80 10.1.0.1:8080 a demo/web half fast 1s
UDP 10.9.0.1:4000 243.0.0.6:53 10.1.0.1:53 - - open slow 1m30s`},
		"hooks": {hooks([]datapath.Attachment{
			{Hook: "connect4", Kind: "cgroup", Where: "/sys/fs/cgroup", Program: 17, Runs: 4, Time: 1001},
			{Hook: "to_client", Kind: "tcx", Where: "eth0", Program: 18},
			{Hook: "connect6", Kind: "cgroup", Program: 19},
		}), `
HOOK KIND WHERE PROGRAM RUNS NS/RUN
connect4 cgroup /sys/fs/cgroup 17 4 250
to_client tcx eth0 18 - -
connect6 cgroup (detached) 19 - -`},
		"drops": {drops(shown(), map[datapath.Refusal]uint64{
			{Service: 2, Reason: bpf.DropNoBackend}: 3, {Reason: bpf.DropNoFrontend}: 7, {Service: 9, Reason: bpf.DropNoMemory}: 1,
		}), `
SERVICE REASON COUNT MEANING
- no_frontend 7 no Service has the ClusterSetIP, or none at this port
demo/dns no_backend 3 no backend is ready
(removed, id 9) no_memory 1 no space to remember the VIP of a UDP socket`},
		"no services":    {services(lb.NewState(), nil), "\nno Service has a VIP on this node"},
		"no backends":    {backends(lb.NewState()), "\nno backends on this node"},
		"no connections": {connections(nil), "\nthe packet path has no connections; those of pods' sockets are translated when they connect and are not listed"},
		"no hooks":       {hooks(nil), "\nno BPF program of Isthmus is attached on this node"},
		"no drops":       {drops(lb.NewState(), nil), "\nno client was refused on this node"},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, "\n"+tablestest.Text(t, c.table)); diff != "" {
				t.Errorf("table (-want +got):\n%s", diff)
			}
			var out bytes.Buffer
			if err := tables.Write(&out, c.table, "json"); err != nil {
				t.Fatal(err)
			}
			var rows []map[string]any
			if err := json.Unmarshal(out.Bytes(), &rows); err != nil || rows == nil || len(rows) != len(c.table.Rows()) {
				t.Errorf("%d rows as JSON, %v, want %d and never null: %s", len(rows), err, len(c.table.Rows()), &out)
			}
		})
	}
}

// Every drop reason has an explanation.
func TestEveryReasonHasAMeaning(t *testing.T) {
	for r := bpf.DropNone + 1; r < bpf.DropMax; r++ {
		if meanings[r] == "" {
			t.Errorf("reason %s has no meaning", r)
		}
	}
}

// The commands read the kernel after the agent has ended.
func TestShowReadsTheKernel(t *testing.T) {
	cgroup, bpffs := netlab.NewTestCgroup(t).Path, netlab.BPFFS(t)
	d, err := datapath.Open(t.Context(), datapath.Config{CgroupRoot: cgroup, BPFFS: bpffs}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), shown())); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	show := func(what string) []map[string]any {
		t.Helper()
		var out bytes.Buffer
		cmd := newCommand()
		cmd.SetOut(&out)
		cmd.SetArgs([]string{"show", what, "-o", "json", "--cgroup-root", cgroup, "--bpffs", bpffs})
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		var rows []map[string]any
		if err := json.Unmarshal(out.Bytes(), &rows); err != nil {
			t.Fatalf("show %s: %v: %s", what, err, &out)
		}
		return rows
	}
	for what, n := range map[string]int{"services": 2, "backends": 4, "connections": 0, "hooks": len(bpf.Hooks()), "drops": 0} {
		if rows := show(what); len(rows) != n {
			t.Errorf("show %s: %d rows, want %d: %v", what, len(rows), n, rows)
		}
	}
	var hooks []string
	for _, row := range show("hooks") {
		hooks = append(hooks, row["hook"].(string))
		if row["where"] != cgroup || row["kind"] != "cgroup" || row["program"].(float64) == 0 {
			t.Errorf("hook %v, want it at %s", row, cgroup)
		}
	}
	for _, h := range bpf.Hooks() {
		if !slices.Contains(hooks, h.Name) {
			t.Errorf("hook %s is not shown", h.Name)
		}
	}
}
