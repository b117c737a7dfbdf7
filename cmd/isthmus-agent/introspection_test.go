package main

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func TestParseWatch(t *testing.T) {
	parse := func(query string) (agent.EventFilter, error) {
		v, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		return parseWatch(v.Get)
	}
	for query, want := range map[string]agent.EventFilter{
		"":                                    {Rate: 1},
		"sample=100&service=demo/web":         {Rate: 100, Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}},
		"reason=no_backend&refused=true":      {Rate: 1, Reason: bpf.DropNoBackend, Refused: true},
		"sample=1&service=&reason=&refused=0": {Rate: 1},
	} {
		if have, err := parse(query); err != nil || have != want {
			t.Errorf("%q: %+v, %v, want %+v", query, have, err, want)
		}
	}
	for _, query := range []string{"sample=0", "sample=-1", "sample=x", "sample=4294967296", "service=web", "service=/web", "service=demo/", "reason=none", "reason=x", "refused=perhaps"} {
		if have, err := parse(query); err == nil {
			t.Errorf("%q is %+v", query, have)
		}
	}
}

// Each broken link is reported, in the order of the chain.
func TestExplanation(t *testing.T) {
	ap, addr := netip.MustParseAddrPort, netip.MustParseAddr
	name := clusterset.ServiceName{Namespace: "demo", Name: "web"}
	vip := lb.Address{AddrPort: ap("243.0.0.5:80"), Protocol: clusterset.TCP}
	missing := &net.DNSError{Err: "no such host", Name: "web.demo.svc.clusterset.local.", IsNotFound: true}
	type inputs struct {
		is status.Agent
		x  agent.Explanation
		a  answers
	}
	good := func() inputs {
		return inputs{
			is: status.Agent{Node: "n1", Ready: true},
			x: agent.Explanation{
				Known:     true,
				Import:    clusterset.Import{Service: name, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{addr("fd00::5"), addr("243.0.0.5")}},
				Endpoints: []agent.ExplainedEndpoint{{Addr: addr("10.1.0.1"), Cluster: "a", State: agent.EndpointServes}, {Addr: addr("10.2.0.1"), Cluster: "b", State: agent.EndpointServes}, {Addr: addr("fd00::1"), Cluster: "b", State: agent.EndpointServes}},
				Frontends: []agent.ExplainedFrontend{{Address: vip, State: agent.FrontendCorrect, Backends: []lb.Address{{AddrPort: ap("10.1.0.1:8080"), Protocol: clusterset.TCP}}}},
				Counters:  datapath.Counters{Chosen: 42, Refused: map[bpf.DropReason]uint64{bpf.DropNoBackend: 3, bpf.DropBackendGone: 1}},
			},
			a: answers{
				own:     resolved{ap("169.254.20.53:53"), []netip.Addr{addr("243.0.0.5"), addr("fd00::5")}, nil},
				cluster: resolved{ap("10.96.0.10:53"), []netip.Addr{addr("243.0.0.5"), addr("fd00::5")}, nil},
			},
		}
	}
	state := func(w *inputs, s agent.EndpointState) {
		for i := range w.x.Endpoints {
			w.x.Endpoints[i].State = s
		}
	}
	for what, c := range map[string]struct {
		change func(*inputs)
		want   string // links in order, one a line
	}{
		"all is well": {func(*inputs) {}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 answers 243.0.0.5 fd00::5
ok cluster DNS: 10.96.0.10:53 answers the same
ok map: 1 entry in the kernel
ok backends: 1 of a, 1 of b
note clients: 42 got a backend, 4 refused (backend_gone 1, no_backend 3)`},
		"the cluster DNS is unknown": {func(w *inputs) { w.a.cluster = resolved{} }, "ok map: 1 entry"},
		"the agent is not ready": {
			func(w *inputs) { w.is = status.Agent{Waiting: []string{"the dataplane does not follow"}} },
			"\nbroken agent: the dataplane does not follow",
		},
		"unknown":                {func(w *inputs) { w.x = agent.Explanation{} }, "\nbroken import: the agent knows no such ServiceImport"},
		"the node has no answer": {func(w *inputs) { w.a.own = resolved{err: errors.New("does not listen")} }, "broken name: the node's name server returns no address: does not listen"},
		"the node has another answer": {
			func(w *inputs) { w.a.own.addrs = w.a.own.addrs[:1] }, "broken name: 169.254.20.53:53 answers 243.0.0.5, not 243.0.0.5 fd00::5",
		},
		"the cluster's DNS does not forward": {
			func(w *inputs) { w.a.cluster = resolved{w.a.cluster.server, nil, missing} },
			"broken cluster DNS: 10.96.0.10:53 has no such name, although the node's own server has it",
		},
		"the cluster's DNS is down": {
			func(w *inputs) { w.a.cluster = resolved{w.a.cluster.server, nil, context.DeadlineExceeded} },
			"broken cluster DNS: 10.96.0.10:53 returns no address: context deadline exceeded",
		},
		"the cluster's DNS is behind": {
			func(w *inputs) { w.a.cluster.addrs = nil }, "broken cluster DNS: 10.96.0.10:53 answers nothing, and the node's own server 243.0.0.5 fd00::5",
		},
		"not in the kernel": {func(w *inputs) { w.x.Frontends[0].State = agent.FrontendMissing }, "broken map: 243.0.0.5:80/TCP is not in the kernel"},
		"wrong in the kernel": {
			func(w *inputs) { w.x.Frontends[0].State = agent.FrontendWrong },
			"broken map: 243.0.0.5:80/TCP has the wrong backends in the kernel: 10.1.0.1:8080",
		},
		"taken by another Service": {
			func(w *inputs) {
				w.x.Frontends[0].State, w.x.Frontends[0].Owner = agent.FrontendConflict, clusterset.ServiceName{Namespace: "demo", Name: "api"}
			}, "broken map: 243.0.0.5:80/TCP belongs to demo/api",
		},
		"no port":        {func(w *inputs) { w.x.Frontends = nil }, "broken map: the ServiceImport has no VIP and port that a client can connect to"},
		"none ready":     {func(w *inputs) { state(w, agent.EndpointNotReady) }, "broken backends: no endpoint gets clients; clients are refused; not ready: 1 of a, 1 of b"},
		"no endpoint":    {func(w *inputs) { w.x.Endpoints = nil }, "broken backends: no cluster offers an endpoint; clients are refused"},
		"one is drained": {func(w *inputs) { w.x.Endpoints[1].State = agent.EndpointDrained }, "ok backends: 1 of a, 1 of b; drained: 1 of b"},
		"all are drained": {
			func(w *inputs) { state(w, agent.EndpointDrained) }, "broken backends: no endpoint gets clients; clients are refused; drained: 1 of a, 1 of b",
		},
		"none on this node, by policy": {
			func(w *inputs) { state(w, agent.EndpointStandby); w.x.Import.InternalTrafficPolicy = "Local" },
			"note backends: none: internalTrafficPolicy is Local and no endpoint runs on this node; clients are refused",
		},
		"a problem": {
			func(w *inputs) {
				w.x.Problems = []lb.Problem{{Service: name, Reason: lb.UnsupportedProtocol, Message: "port 9/SCTP is served to packets only"}}
			}, "note problem: UnsupportedProtocol: port 9/SCTP is served to packets only",
		},
		"a VIP is refused": {
			func(w *inputs) {
				w.x.Problems = []lb.Problem{{Service: name, Reason: lb.VIPOfCluster, Message: "10.96.0.1 is not served: it is a Service; delete it"}}
				w.x.Frontends = nil
			}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 answers 243.0.0.5 fd00::5
ok cluster DNS: 10.96.0.10:53 answers the same
broken VIP: VIPOfCluster: 10.96.0.1 is not served: it is a Service
ok backends: 1 of a, 1 of b
note clients: 42 got a backend, 4 refused (backend_gone 1, no_backend 3)`,
		},
		"one of two VIPs is refused": {
			func(w *inputs) {
				w.x.Problems = []lb.Problem{{Service: name, Reason: lb.VIPOutsideRanges, Message: "192.0.2.1 is not served: it is outside; delete it"}}
			}, "broken VIP: VIPOutsideRanges: 192.0.2.1 is not served: it is outside\nok map: 1 entry",
		},
		"anyone may have written it": {func(w *inputs) { w.is.View.LabelsReserved = new(false) }, "\nnote writer: may be anyone"},
		"the labels are reserved":    {func(w *inputs) { w.is.View.LabelsReserved = new(true) }, "ok import: read by the agent\nok name"},
		"headless": {
			func(w *inputs) {
				w.x.Import.Type, w.x.Import.IPs, w.x.Frontends = clusterset.Headless, nil, nil
				w.a.own.addrs, w.a.cluster.addrs = []netip.Addr{addr("10.1.0.1"), addr("10.2.0.1"), addr("fd00::1")}, []netip.Addr{addr("10.1.0.1"), addr("10.2.0.1"), addr("fd00::1")}
			}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 answers 10.1.0.1 10.2.0.1 fd00::1
ok cluster DNS: 10.96.0.10:53 answers the same
ok backends: 1 of a, 1 of b`,
		},
		"headless, none ready": {
			func(w *inputs) {
				w.x.Import.Type, w.x.Import.IPs, w.x.Frontends = clusterset.Headless, nil, nil
				w.a.own, w.a.cluster = resolved{w.a.own.server, nil, missing}, resolved{w.a.cluster.server, nil, missing}
				state(w, agent.EndpointNotReady)
			}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 has no such name, because no endpoint is ready
ok cluster DNS: 10.96.0.10:53 has no such name either
broken backends: no endpoint gets clients; clients are refused; not ready: 1 of a, 1 of b`,
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := good()
			c.change(&w)
			e := explanation(w.is, name, w.x, w.a)
			var text strings.Builder
			for _, l := range e.Links {
				text.WriteString("\n" + string(l.State) + " " + l.Link + ": " + l.Text)
				if (l.Fix != "") != (l.State == status.LinkBroken) {
					t.Errorf("link %+v: broken links have a fix, others have none", l)
				}
			}
			if strings.Count(c.want, "\n") > 1 {
				if diff := cmp.Diff(c.want, text.String()); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			} else if !strings.Contains(text.String(), c.want) {
				t.Errorf("no link %q in:%s", c.want, text.String())
			}
			if body, err := json.Marshal(e); err != nil || strings.Contains(string(body), "invalid") {
				t.Errorf("as JSON: %s, %v", body, err)
			}
		})
	}
}
