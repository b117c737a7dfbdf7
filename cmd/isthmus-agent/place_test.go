package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The paths of the API that a place is made of.
const (
	nodePath     = "/api/v1/nodes/n1"
	propertyPath = "/apis/about.k8s.io/v1beta1/clusterproperties/cluster.clusterset.k8s.io"
	memberPath   = "/apis/isthmus.dev/v1alpha1/namespaces/isthmus-system/members/a"
)

// apiServer serves objects by path, and what is not there as an API server says it.
type apiServer struct {
	mu      sync.Mutex
	objects map[string]string // "500", "403" or "404" are errors
	asked   []string
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	reason := map[string]string{"500": "InternalError", "403": "Forbidden", "404": "NotFound", "": "NotFound"}
	code := map[string]int{"500": 500, "403": 403, "404": 404, "": 404}
	text := s.objects[r.URL.Path]
	if c, ok := code[text]; ok {
		w.WriteHeader(c)
		text = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"` + reason[text] + `"}`
	}
	_, _ = w.Write([]byte(text))
}

func newLocator(t *testing.T, s *apiServer, cfg Config) *locator {
	t.Helper()
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	client, err := objectServer(&rest.Config{Host: h.URL})
	if err != nil {
		t.Fatal(err)
	}
	cfg.NodeName, cfg.Namespace = "n1", "isthmus-system"
	return &locator{cfg: cfg, server: client, log: slog.New(slog.DiscardHandler), known: make(chan struct{})}
}

func TestLocatorAsks(t *testing.T) {
	all := map[string]string{
		nodePath:     `{"metadata":{"name":"n1","labels":{"topology.kubernetes.io/zone":"z1"}}}`,
		propertyPath: `{"spec":{"value":"a"}}`,
		memberPath:   `{"status":{"clustersetIPCIDRRange":["fd00:243::/64","243.1.0.0/16"]}}`,
	}
	with := func(path, object string) map[string]string {
		objects := maps.Clone(all)
		objects[path] = object
		return objects
	}
	node := lb.Node{Cluster: "a", Name: "n1", Zone: "z1"}
	ranges := []netip.Prefix{netip.MustParsePrefix("243.1.0.0/16"), netip.MustParsePrefix("fd00:243::/64")}
	tests := map[string]struct {
		cfg     Config
		objects map[string]string
		want    agent.Topology
		lacks   string // parts of the warning, by blanks
		asking  bool
		asked   int
	}{
		"all is found":        {objects: all, want: agent.Topology{Node: node, Ranges: ranges}, asked: 3},
		"flags overrule":      {cfg: Config{ClusterID: "x", Zone: "y", Ranges: []string{"244.0.0.0/8"}, ZonesSpanClusters: true}, objects: all, want: agent.Topology{Node: lb.Node{Cluster: "x", Name: "n1", Zone: "y"}, ZonesSpanClusters: true, Ranges: []netip.Prefix{netip.MustParsePrefix("244.0.0.0/8")}}},
		"no member at all":    {objects: map[string]string{nodePath: `{}`}, want: agent.Topology{Node: lb.Node{Name: "n1"}}, lacks: "--cluster-id", asked: 2},
		"no registration":     {objects: with(memberPath, "404"), want: agent.Topology{Node: node}, lacks: "--clusterset-ip-range", asked: 3},
		"not allowed":         {objects: with(nodePath, "403"), want: agent.Topology{Node: lb.Node{Cluster: "a", Name: "n1"}, Ranges: ranges}, lacks: "zone", asked: 3},
		"no answer":           {objects: with(propertyPath, "500"), want: agent.Topology{Node: lb.Node{Name: "n1", Zone: "z1"}}, lacks: "--cluster-id", asking: true, asked: 2},
		"an id that is none":  {objects: with(propertyPath, `{"spec":{"value":"A"}}`), want: agent.Topology{Node: lb.Node{Name: "n1", Zone: "z1"}}, lacks: "--cluster-id RFC", asking: true, asked: 2},
		"ranges come later":   {objects: with(memberPath, `{"spec":{"clustersetIPCIDR":["243.1.0.0/16"]}}`), want: agent.Topology{Node: node}, lacks: "--clusterset-ip-range yet", asked: 3},
		"a range that is not": {objects: with(memberPath, `{"status":{"clustersetIPCIDRRange":["243"]}}`), want: agent.Topology{Node: node}, lacks: "--clusterset-ip-range", asking: true, asked: 3},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := &apiServer{objects: tc.objects}
			l := newLocator(t, s, tc.cfg)
			got := l.ask(t.Context(), l.cfg.place())
			if diff := cmp.Diff(tc.want, got.place, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("place (-want +got):\n%s", diff)
			}
			if got.asking != tc.asking || (got.lacks == nil) != (tc.lacks == "") {
				t.Errorf("lacks %v, asking again %v", got.lacks, got.asking)
			}
			for word := range strings.FieldsSeq(tc.lacks) {
				if !strings.Contains(got.lacks.Error(), word) {
					t.Errorf("%q does not say %q", got.lacks, word)
				}
			}
			if len(s.asked) != tc.asked {
				t.Errorf("asked for %v, want %d", s.asked, tc.asked)
			}
		})
	}
}

// Worlds wait for the place, and what cannot be found for now stays as it was.
func TestWorldsWaitForThePlace(t *testing.T) {
	s := &apiServer{objects: map[string]string{nodePath: "500", propertyPath: `{"spec":{"value":"a"}}`, memberPath: "404"}}
	l := newLocator(t, s, Config{})
	settled := make(chan agent.Topology, 10)
	l.settle = func(_ context.Context, p agent.Topology) error { settled <- p; return nil }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- l.Run(ctx) }()
	if p := <-settled; p.Node != (lb.Node{Cluster: "a", Name: "n1"}) {
		t.Errorf("place %+v", p)
	}
	brief, end := context.WithTimeout(ctx, 10*time.Millisecond)
	defer end()
	worlds := make(chan *clusterset.Snapshot, 1)
	g := gate{sink(func(w *clusterset.Snapshot) { worlds <- w }), l.known}
	if err := g.Sync(brief, &clusterset.Snapshot{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a world went through while the place was not known: %v", err)
	}
	s.mu.Lock()
	s.objects[nodePath], s.objects[propertyPath] = `{"metadata":{"labels":{"topology.kubernetes.io/zone":"z1"}}}`, "404"
	s.mu.Unlock()
	if p := <-settled; p.Node != (lb.Node{Cluster: "a", Name: "n1", Zone: "z1"}) {
		t.Errorf("place %+v", p)
	}
	if err := g.Sync(ctx, &clusterset.Snapshot{}); err != nil {
		t.Error(err)
	}
	<-worlds
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

type sink func(*clusterset.Snapshot)

func (s sink) Sync(_ context.Context, w *clusterset.Snapshot) error { s(w); return nil }
