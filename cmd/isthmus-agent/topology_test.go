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

// The API paths of the objects that the topology is read from.
const (
	nodePath     = "/api/v1/nodes/n1"
	propertyPath = "/apis/about.k8s.io/v1beta1/clusterproperties/cluster.clusterset.k8s.io"
	memberPath   = "/apis/isthmus.dev/v1alpha1/namespaces/isthmus-system/members/a"
)

// apiServer is a fake API server. It serves objects by path, and errors as an API server does.
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

func newTopologyWatcher(t *testing.T, s *apiServer, cfg Config) *topologyWatcher {
	t.Helper()
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	client, err := objectServer(&rest.Config{Host: h.URL})
	if err != nil {
		t.Fatal(err)
	}
	cfg.NodeName, cfg.Namespace = "n1", "isthmus-system"
	return &topologyWatcher{cfg: cfg, server: client, log: slog.New(slog.DiscardHandler), ready: make(chan struct{})}
}

func TestTopologyLookup(t *testing.T) {
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
		missing string // words in the warning
		retry   bool
		asked   int
	}{
		"all found":          {objects: all, want: agent.Topology{Node: node, Ranges: ranges}, asked: 3},
		"flags override":     {cfg: Config{ClusterID: "x", Zone: "y", Ranges: []string{"244.0.0.0/8"}, ZonesSpanClusters: true}, objects: all, want: agent.Topology{Node: lb.Node{Cluster: "x", Name: "n1", Zone: "y"}, ZonesSpanClusters: true, Ranges: []netip.Prefix{netip.MustParsePrefix("244.0.0.0/8")}}},
		"not a member":       {objects: map[string]string{nodePath: `{}`}, want: agent.Topology{Node: lb.Node{Name: "n1"}}, missing: "--cluster-id", asked: 2},
		"no registration":    {objects: with(memberPath, "404"), want: agent.Topology{Node: node}, missing: "--clusterset-ip-range", asked: 3},
		"forbidden":          {objects: with(nodePath, "403"), want: agent.Topology{Node: lb.Node{Cluster: "a", Name: "n1"}, Ranges: ranges}, missing: "zone", asked: 3},
		"no answer":          {objects: with(propertyPath, "500"), want: agent.Topology{Node: lb.Node{Name: "n1", Zone: "z1"}}, missing: "--cluster-id", retry: true, asked: 2},
		"invalid cluster id": {objects: with(propertyPath, `{"spec":{"value":"A"}}`), want: agent.Topology{Node: lb.Node{Name: "n1", Zone: "z1"}}, missing: "--cluster-id RFC", retry: true, asked: 2},
		"ranges pending":     {objects: with(memberPath, `{"spec":{"clustersetIPCIDR":["243.1.0.0/16"]}}`), want: agent.Topology{Node: node}, missing: "--clusterset-ip-range yet", asked: 3},
		"invalid range":      {objects: with(memberPath, `{"status":{"clustersetIPCIDRRange":["243"]}}`), want: agent.Topology{Node: node}, missing: "--clusterset-ip-range", retry: true, asked: 3},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := &apiServer{objects: tc.objects}
			w := newTopologyWatcher(t, s, tc.cfg)
			got := w.lookup(t.Context(), w.cfg.topology())
			if diff := cmp.Diff(tc.want, got.topology, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("topology (-want +got):\n%s", diff)
			}
			if got.retry != tc.retry || (got.missing == nil) != (tc.missing == "") {
				t.Errorf("missing %v, retry %v", got.missing, got.retry)
			}
			for word := range strings.FieldsSeq(tc.missing) {
				if !strings.Contains(got.missing.Error(), word) {
					t.Errorf("%q does not say %q", got.missing, word)
				}
			}
			if len(s.asked) != tc.asked {
				t.Errorf("requests for %v, want %d", s.asked, tc.asked)
			}
		})
	}
}

// Snapshots wait for the topology, and a part that cannot be read keeps its last value.
func TestSnapshotsWaitForTopology(t *testing.T) {
	s := &apiServer{objects: map[string]string{nodePath: "500", propertyPath: `{"spec":{"value":"a"}}`, memberPath: "404"}}
	w := newTopologyWatcher(t, s, Config{})
	applied := make(chan agent.Topology, 10)
	w.apply = func(_ context.Context, p agent.Topology) error { applied <- p; return nil }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	if p := <-applied; p.Node != (lb.Node{Cluster: "a", Name: "n1"}) {
		t.Errorf("topology %+v", p)
	}
	brief, end := context.WithTimeout(ctx, 10*time.Millisecond)
	defer end()
	passed := make(chan *clusterset.Snapshot, 1)
	g := gate{sink(func(s *clusterset.Snapshot) { passed <- s }), w.ready}
	if err := g.Sync(brief, &clusterset.Snapshot{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a snapshot passed before the topology was known: %v", err)
	}
	s.mu.Lock()
	s.objects[nodePath], s.objects[propertyPath] = `{"metadata":{"labels":{"topology.kubernetes.io/zone":"z1"}}}`, "404"
	s.mu.Unlock()
	if p := <-applied; p.Node != (lb.Node{Cluster: "a", Name: "n1", Zone: "z1"}) {
		t.Errorf("topology %+v", p)
	}
	if err := g.Sync(ctx, &clusterset.Snapshot{}); err != nil {
		t.Error(err)
	}
	<-passed
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

type sink func(*clusterset.Snapshot)

func (f sink) Sync(_ context.Context, s *clusterset.Snapshot) error { f(s); return nil }
