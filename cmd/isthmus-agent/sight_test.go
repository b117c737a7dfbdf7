package main

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// reviewer is an API server that is asked whose token this is: all it knows is the token "good".
type reviewer struct {
	authenticationclient.TokenReviewInterface

	status authenticationv1.TokenReviewStatus
	err    error
}

func (r reviewer) Create(_ context.Context, asked *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	out := asked.DeepCopy()
	if asked.Spec.Token == "good" && len(asked.Spec.Audiences) == 1 && asked.Spec.Audiences[0] == status.TokenAudience {
		out.Status = r.status
	}
	return out, r.err
}

// Nobody sees what clients do but those who may make a token of one ServiceAccount for one audience; where there is no
// API server, processes of the node.
func TestAccess(t *testing.T) {
	const observer = "system:serviceaccount:isthmus-system:isthmus-observer"
	good := authenticationv1.TokenReviewStatus{
		Authenticated: true, User: authenticationv1.UserInfo{Username: observer}, Audiences: []string{status.TokenAudience},
	}
	other, elsewhere, nobody := good, good, good
	other.User.Username = "system:serviceaccount:demo:isthmus-observer"
	elsewhere.Audiences = nil // an API server that knows nothing of audiences
	nobody.Authenticated = false
	for name, c := range map[string]struct {
		reviews authenticationclient.TokenReviewInterface
		token   string
		from    string
		code    int
	}{
		"a good token":               {reviewer{status: good}, "good", "192.0.2.1:1", http.StatusOK},
		"no token":                   {reviewer{status: good}, "", "192.0.2.1:1", http.StatusForbidden},
		"no token, from the node":    {reviewer{status: good}, "", "127.0.0.1:1", http.StatusForbidden},
		"another token":              {reviewer{status: good}, "bad", "127.0.0.1:1", http.StatusForbidden},
		"another account":            {reviewer{status: other}, "good", "127.0.0.1:1", http.StatusForbidden},
		"for whatever audience":      {reviewer{status: elsewhere}, "good", "127.0.0.1:1", http.StatusForbidden},
		"not authenticated":          {reviewer{status: nobody}, "good", "127.0.0.1:1", http.StatusForbidden},
		"the API server is away":     {reviewer{status: good, err: errors.New("away")}, "good", "127.0.0.1:1", http.StatusServiceUnavailable},
		"without one, from the node": {nil, "", "127.0.0.1:1", http.StatusOK},
		"the same over IPv6":         {nil, "", "[::1]:1", http.StatusOK},
		"without one, from afar":     {nil, "good", "192.0.2.1:1", http.StatusForbidden},
		"from nowhere":               {nil, "", "", http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			a := access{reviews: c.reviews, account: observer}
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/explain", nil)
			r.RemoteAddr = c.from
			r.Header.Set(status.TokenHeader, c.token)
			w := httptest.NewRecorder()
			a.guard(func(http.ResponseWriter, *http.Request) {})(w, r)
			if w.Code != c.code {
				t.Errorf("answers %d, want %d: %s", w.Code, c.code, w.Body)
			}
		})
	}
}

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

// Each link of a node is named when it does not hold; the first one comes first.
func TestExplanation(t *testing.T) {
	ap, addr := netip.MustParseAddrPort, netip.MustParseAddr
	name := clusterset.ServiceName{Namespace: "demo", Name: "web"}
	vip := lb.Address{AddrPort: ap("243.0.0.5:80"), Protocol: clusterset.TCP}
	missing := &net.DNSError{Err: "no such host", Name: "web.demo.svc.clusterset.local.", IsNotFound: true}
	type world struct {
		is status.Agent
		x  agent.Explanation
		a  answers
	}
	good := func() world {
		return world{
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
	state := func(w *world, s agent.EndpointState) {
		for i := range w.x.Endpoints {
			w.x.Endpoints[i].State = s
		}
	}
	for what, c := range map[string]struct {
		change func(*world)
		want   string // links in order, one a line
	}{
		"all holds": {func(*world) {}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 answers 243.0.0.5 fd00::5
ok cluster DNS: 10.96.0.10:53 answers the same
ok map: 1 entry in the kernel
ok backends: 1 of a, 1 of b
note clients: 42 given a backend, 4 refused (backend_gone 1, no_backend 3)`},
		"no cluster DNS that is known": {func(w *world) { w.a.cluster = resolved{} }, "ok map: 1 entry"},
		"the agent is not ready": {
			func(w *world) { w.is = status.Agent{Waiting: []string{"the dataplane does not follow"}} },
			"\nbroken agent: the dataplane does not follow",
		},
		"unknown":                {func(w *world) { w.x = agent.Explanation{} }, "\nbroken import: the agent knows of no such ServiceImport"},
		"the node has no answer": {func(w *world) { w.a.own = resolved{err: errors.New("does not listen")} }, "broken name: the node's name server gives no address: does not listen"},
		"the node has another": {
			func(w *world) { w.a.own.addrs = w.a.own.addrs[:1] }, "broken name: 169.254.20.53:53 answers 243.0.0.5, not 243.0.0.5 fd00::5",
		},
		"the cluster's DNS does not forward": {
			func(w *world) { w.a.cluster = resolved{w.a.cluster.server, nil, missing} },
			"broken cluster DNS: 10.96.0.10:53 knows no such name, though the node's own server does",
		},
		"the cluster's DNS is down": {
			func(w *world) { w.a.cluster = resolved{w.a.cluster.server, nil, context.DeadlineExceeded} },
			"broken cluster DNS: 10.96.0.10:53 gives no address: context deadline exceeded",
		},
		"the cluster's DNS is behind": {
			func(w *world) { w.a.cluster.addrs = nil }, "broken cluster DNS: 10.96.0.10:53 answers nothing, and the node's own server 243.0.0.5 fd00::5",
		},
		"not in the kernel": {func(w *world) { w.x.Frontends[0].State = agent.FrontendMissing }, "broken map: 243.0.0.5:80/TCP is not in the kernel"},
		"wrong in the kernel": {
			func(w *world) { w.x.Frontends[0].State = agent.FrontendWrong },
			"broken map: 243.0.0.5:80/TCP leads to others than it should in the kernel: 10.1.0.1:8080",
		},
		"another's": {
			func(w *world) {
				w.x.Frontends[0].State, w.x.Frontends[0].Owner = agent.FrontendConflict, clusterset.ServiceName{Namespace: "demo", Name: "api"}
			}, "broken map: 243.0.0.5:80/TCP belongs to demo/api",
		},
		"no port":        {func(w *world) { w.x.Frontends = nil }, "broken map: the ServiceImport has no VIP and port that a client can connect to"},
		"nobody ready":   {func(w *world) { state(w, agent.EndpointNotReady) }, "broken backends: nobody gets clients, they are refused; not ready: 1 of a, 1 of b"},
		"no endpoint":    {func(w *world) { w.x.Endpoints = nil }, "broken backends: no cluster offers an endpoint; clients are refused"},
		"one is drained": {func(w *world) { w.x.Endpoints[1].State = agent.EndpointDrained }, "ok backends: 1 of a, 1 of b; drained: 1 of b"},
		"all are drained": {
			func(w *world) { state(w, agent.EndpointDrained) }, "broken backends: nobody gets clients, they are refused; drained: 1 of a, 1 of b",
		},
		"none on this node, by policy": {
			func(w *world) { state(w, agent.EndpointStandby); w.x.Import.InternalTrafficPolicy = "Local" },
			"note backends: none: internalTrafficPolicy is Local, and none runs on this node; clients are refused",
		},
		"a problem": {
			func(w *world) {
				w.x.Problems = []lb.Problem{{Service: name, Reason: lb.UnsupportedProtocol, Message: "port 9/SCTP is served to packets only"}}
			}, "note problem: UnsupportedProtocol: port 9/SCTP is served to packets only",
		},
		"headless": {
			func(w *world) {
				w.x.Import.Type, w.x.Import.IPs, w.x.Frontends = clusterset.Headless, nil, nil
				w.a.own.addrs, w.a.cluster.addrs = []netip.Addr{addr("10.1.0.1"), addr("10.2.0.1"), addr("fd00::1")}, []netip.Addr{addr("10.1.0.1"), addr("10.2.0.1"), addr("fd00::1")}
			}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 answers 10.1.0.1 10.2.0.1 fd00::1
ok cluster DNS: 10.96.0.10:53 answers the same
ok backends: 1 of a, 1 of b`,
		},
		"headless, nobody ready": {
			func(w *world) {
				w.x.Import.Type, w.x.Import.IPs, w.x.Frontends = clusterset.Headless, nil, nil
				w.a.own, w.a.cluster = resolved{w.a.own.server, nil, missing}, resolved{w.a.cluster.server, nil, missing}
				state(w, agent.EndpointNotReady)
			}, `
ok agent: ready
ok import: read by the agent
ok name: 169.254.20.53:53 has no such name, for nobody is ready
ok cluster DNS: 10.96.0.10:53 has no such name either
broken backends: nobody gets clients, they are refused; not ready: 1 of a, 1 of b`,
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
					t.Errorf("link %+v: what is broken, and nothing else, has a fix", l)
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
