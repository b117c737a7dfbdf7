package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// The API paths of the objects that the topology is read from.
const (
	nodePath     = "/api/v1/nodes/n1"
	propertyPath = "/apis/about.k8s.io/v1beta1/clusterproperties/cluster.clusterset.k8s.io"
	memberPath   = "/apis/isthmus.dev/v1alpha1/namespaces/isthmus-system/members/a"
	fedPath      = "/apis/federation.isthmus.dev/v1alpha1/federations/federation"
	cidrsPath    = "/apis/networking.k8s.io/v1/servicecidrs"
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
	text, given := s.objects[r.URL.Path]
	if !given && strings.HasSuffix(r.URL.Path, "/endpointslices") {
		text = `{"items":[]}` // as an API server answers
	}
	if c, ok := code[text]; ok {
		w.WriteHeader(c)
		text = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"` + reason[text] + `"}`
	}
	_, _ = w.Write([]byte(text))
}

func prefixes(texts ...string) []netip.Prefix {
	all, err := parseRanges(texts)
	if err != nil {
		panic(err)
	}
	return all
}

func own(text, use string) lb.Own { return lb.Own{Prefix: netip.MustParsePrefix(text), Use: use} }

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
	ranges := prefixes("243.1.0.0/16", "fd00:243::/64")
	tests := map[string]struct {
		cfg     Config
		objects map[string]string
		want    agent.Topology
		missing string // words in the warning
		retry   bool
		pending bool
		asked   int
	}{
		"all found": {objects: all, want: agent.Topology{Node: node, Ranges: ranges}, asked: 6},
		"a region": {
			objects: with(nodePath, `{"metadata":{"labels":{"topology.kubernetes.io/zone":"z1","topology.kubernetes.io/region":"r1"}}}`),
			want:    agent.Topology{Node: lb.Node{Cluster: "a", Name: "n1", Zone: "z1", Region: "r1"}, Ranges: ranges}, asked: 6,
		},
		"flags override": {
			cfg:     Config{ClusterID: "x", Zone: "y", Region: "z", Ranges: []string{"244.0.0.0/8"}, ZonesSpanClusters: true, RegionsSpanClusters: true},
			objects: with(nodePath, `{"metadata":{"labels":{"topology.kubernetes.io/zone":"z1","topology.kubernetes.io/region":"r1"}}}`),
			want: agent.Topology{
				Node: lb.Node{Cluster: "x", Name: "n1", Zone: "y", Region: "z"}, ZonesSpanClusters: true, RegionsSpanClusters: true, Ranges: prefixes("244.0.0.0/8"),
			}, asked: 4,
		},
		"any imports, without a range": {cfg: Config{Imports: writers.Any}, objects: all, want: agent.Topology{Node: node}, asked: 5},
		"any imports, no member":       {cfg: Config{Imports: writers.Any}, objects: with(memberPath, "404"), want: agent.Topology{Node: node}, asked: 5},
		"not a member":                 {objects: map[string]string{nodePath: `{}`}, want: agent.Topology{Node: lb.Node{Name: "n1"}}, missing: "--cluster-id", asked: 5},
		"no registration":              {objects: with(memberPath, "404"), want: agent.Topology{Node: node}, missing: "--clusterset-ip-range", asked: 6},
		"forbidden":                    {objects: with(nodePath, "403"), want: agent.Topology{Node: lb.Node{Cluster: "a", Name: "n1"}, Ranges: ranges}, missing: "zone", asked: 6},
		"no answer":                    {objects: with(propertyPath, "500"), want: agent.Topology{Node: lb.Node{Name: "n1", Zone: "z1"}}, missing: "--cluster-id", retry: true, asked: 5},
		"invalid cluster id":           {objects: with(propertyPath, `{"spec":{"value":"A"}}`), want: agent.Topology{Node: lb.Node{Name: "n1", Zone: "z1"}}, missing: "--cluster-id RFC", retry: true, asked: 5},
		"ranges pending": {
			objects: with(memberPath, `{"spec":{"clustersetIPCIDR":["243.1.0.0/16"]}}`), want: agent.Topology{Node: node},
			missing: "--clusterset-ip-range yet", pending: true, asked: 6,
		},
		"invalid range": {objects: with(memberPath, `{"status":{"clustersetIPCIDRRange":["243"]}}`), want: agent.Topology{Node: node}, missing: "--clusterset-ip-range", retry: true, asked: 6},
		"a federation too": {
			objects: with(fedPath, `{"spec":{"clusterSetIP":{"ranges":["242.0.0.0/16"]}}}`),
			want:    agent.Topology{Node: node, Ranges: prefixes("242.0.0.0/16", "243.1.0.0/16", "fd00:243::/64")}, asked: 6,
		},
		"a federation alone": {
			objects: map[string]string{nodePath: all[nodePath], propertyPath: all[propertyPath], fedPath: `{"spec":{"clusterSetIP":{"ranges":["242.0.0.0/16"]}}}`},
			want:    agent.Topology{Node: node, Ranges: prefixes("242.0.0.0/16")}, asked: 6,
		},
		"a federation without ranges": {objects: with(fedPath, `{"spec":{}}`), want: agent.Topology{Node: node, Ranges: ranges}, asked: 6},
		"a federation forbidden":      {objects: with(fedPath, "403"), want: agent.Topology{Node: node, Ranges: ranges}, missing: "--clusterset-ip-range", asked: 6},
		"the cluster's own addresses": {
			objects: map[string]string{
				nodePath: `{"metadata":{"labels":{"topology.kubernetes.io/zone":"z1"}},"spec":{"podCIDRs":["10.201.3.0/24"]},
					"status":{"addresses":[{"type":"Hostname","address":"n1"},{"type":"InternalIP","address":"192.0.2.11"},{"type":"InternalIP","address":"fd73::b"}]}}`,
				propertyPath: all[propertyPath],
				memberPath: `{"spec":{"podCIDRs":["10.201.0.0/16"],"nodeCIDRs":["192.0.2.0/24"],"serviceCIDRs":["10.96.0.0/12"],"extraCIDRs":["198.51.100.0/24"]},
					"status":{"clustersetIPCIDRRange":["243.1.0.0/16","fd00:243::/64"]}}`,
				cidrsPath: `{"items":[{"spec":{"cidrs":["10.96.0.0/16","fd00:96::/112"]}},{"spec":{"cidrs":["10.111.0.0/16"]}}]}`,
			},
			want: agent.Topology{Node: node, Ranges: ranges, Own: []lb.Own{
				own("10.96.0.0/16", useServices), own("10.111.0.0/16", useServices), own("fd00:96::/112", useServices),
				own("10.96.0.0/12", useServices), own("10.201.0.0/16", usePods), own("192.0.2.0/24", useNodes), own("198.51.100.0/24", useExtra),
				own("10.201.3.0/24", usePods), own("192.0.2.11/32", useNodes), own("fd73::b/128", useNodes),
			}}, asked: 6,
		},
		"Service ranges forbidden": {objects: with(cidrsPath, "403"), want: agent.Topology{Node: node, Ranges: ranges}, missing: "addresses", asked: 6},
		"Service ranges invalid":   {objects: with(cidrsPath, `{"items":[{"spec":{"cidrs":["10"]}}]}`), want: agent.Topology{Node: node, Ranges: ranges}, missing: "addresses", retry: true, asked: 6},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := &apiServer{objects: tc.objects}
			w := newTopologyWatcher(t, s, tc.cfg)
			got := w.lookup(t.Context(), w.cfg.topology())
			if diff := cmp.Diff(tc.want, got.topology, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("topology (-want +got):\n%s", diff)
			}
			if got.retry != tc.retry || got.pending != tc.pending || (got.missing == nil) != (tc.missing == "") {
				t.Errorf("missing %v, retry %v, pending %v", got.missing, got.retry, got.pending)
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

// Addresses stay in force when their object cannot be read any more, and when it is deleted.
func TestAddressesOutliveTheirObjects(t *testing.T) {
	all := map[string]string{
		nodePath:     `{"status":{"addresses":[{"address":"192.0.2.11"}]}}`,
		propertyPath: `{"spec":{"value":"a"}}`,
		memberPath:   `{"spec":{"podCIDRs":["10.201.0.0/16"]},"status":{"clustersetIPCIDRRange":["243.1.0.0/16"]}}`,
		fedPath:      `{"spec":{"clusterSetIP":{"ranges":["242.0.0.0/16"]}}}`,
		cidrsPath:    `{"items":[{"spec":{"cidrs":["10.96.0.0/16"]}}]}`,
	}
	for _, later := range []string{"404", "403", "500"} {
		s := &apiServer{objects: maps.Clone(all)}
		w := newTopologyWatcher(t, s, Config{})
		first := w.lookup(t.Context(), w.cfg.topology())
		for path := range s.objects {
			s.objects[path] = later
		}
		second := w.lookup(t.Context(), first.topology)
		if diff := cmp.Diff(first.topology, second.topology, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("after %s (-before +after):\n%s", later, diff)
		}
		if len(second.topology.Ranges) != 2 || len(second.topology.Own) != 3 {
			t.Errorf("after %s: %+v", later, second.topology)
		}
	}
}

// emptyServer is an API server without objects, and without a network.
type emptyServer struct{ apiServer }

func (s *emptyServer) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Result(), nil
}

// The name server learns the profile of the ClusterSet before the first snapshot passes. A Member that is gone takes it from nobody.
func TestProfileOfClusterSet(t *testing.T) {
	server := &apiServer{objects: map[string]string{
		nodePath:     `{}`,
		propertyPath: `{"spec":{"value":"a"}}`,
		memberPath:   `{"spec":{"profile":"lighthouse"},"status":{"clustersetIPCIDRRange":["243.1.0.0/16"]}}`,
	}}
	w := newTopologyWatcher(t, server, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var have []string
	w.profile = func(profile string) { have = append(have, profile) }
	w.apply = func(context.Context, agent.Topology) error {
		select {
		case <-w.ready:
			t.Error("snapshots pass before the profile is known")
		default:
		}
		cancel()
		return nil
	}
	if err := w.Run(ctx); err != nil {
		t.Fatal(err)
	}
	server.objects[memberPath] = "404"
	w.lookup(t.Context(), agent.Topology{})
	if want := []string{"lighthouse"}; !slices.Equal(have, want) || w.addresses.profile != "lighthouse" {
		t.Errorf("the profiles %q were told, want %q; without a Member it is %q", have, want, w.addresses.profile)
	}
}

// A VIP that is refused because of the ranges causes a lookup, and more of them until the range is found. Further such VIPs
// cause none for a while: otherwise a tenant could keep all nodes busy with them.
func TestRefusedVIPCausesLookup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookups := 0
		client, err := objectServer(&rest.Config{Host: "http://192.0.2.1", Transport: &emptyServer{}})
		if err != nil {
			t.Fatal(err)
		}
		w := &topologyWatcher{
			cfg: Config{NodeName: "n1"}, server: client, log: slog.New(slog.DiscardHandler), refused: signal.New(), ready: make(chan struct{}),
			apply: func(context.Context, agent.Topology) error { lookups++; return nil },
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		before := 0 // not read as a step begins: the first lookup may be over by then
		step := func(d time.Duration, least, most int) {
			t.Helper()
			<-time.After(d)
			synctest.Wait()
			if n := lookups - before; n < least || n > most {
				t.Errorf("%d lookups in %s, want %d to %d", n, d, least, most)
			}
			before = lookups
		}
		step(time.Second, 1, 1)
		step(9*time.Minute, 0, 0)
		w.refused.Notify()
		step(topologyRetry, 1, 1) // at once
		step(time.Minute, 4, 5)   // after 2, 6, 14, 30 seconds
		for range 60 {
			w.refused.Notify()
			<-time.After(time.Second)
		}
		before = lookups
		step(time.Minute, 0, 2)
		step(30*time.Minute, 3, 15)
		w.refused.Notify()
		step(topologyRetry, 1, 1)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
