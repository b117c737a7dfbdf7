package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/e2e/testbed"
)

// client runs the echo client somewhere on clientNode and returns what it printed.
type client func(ctx context.Context, args ...string) (string, error)

func podClient(ctx context.Context, args ...string) (string, error) {
	return bed.Exec(ctx, "a", namespace, "client", slices.Concat([]string{"echo-server", "client"}, args)...)
}

func hostClient(ctx context.Context, args ...string) (string, error) {
	return bed.Exec(ctx, "a", namespace, "host-client", slices.Concat([]string{"echo-server", "client"}, args)...)
}

func nodeClient(ctx context.Context, args ...string) (string, error) {
	return bed.Node(ctx, clientNode, slices.Concat([]string{bed.Program("echo-server"), "client"}, args)...)
}

// report is what the echo client prints (e2e/lab/echo).
type report struct {
	Connections int            `json:"connections"`
	Failures    int            `json:"failures"`
	Errors      map[string]int `json:"errors"`
	Backends    map[string]int `json:"backends"` // answers by "cluster/pod"
	Peers       map[string]int `json:"peers"`    // connections by what getpeername said

	LastAnswer  map[string]time.Time `json:"lastAnswer"`  // of each backend
	LastFailure time.Time            `json:"lastFailure"` // when the last connection that failed began
}

func (c client) run(ctx context.Context, args ...string) (report, error) {
	out, err := c(ctx, args...)
	if err != nil {
		return report{}, err
	}
	var r report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return report{}, fmt.Errorf("read the echo client's report %q: %w", out, err)
	}
	return r, nil
}

// clusters lists whose pods answered.
func (r report) clusters() []string {
	seen := map[string]bool{}
	for b := range r.Backends {
		cluster, _, _ := strings.Cut(b, "/")
		seen[cluster] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// vips returns the VIPs of the Service that most tests ask, by family, as cluster a sees them.
func vips(ctx context.Context) ([]netip.Addr, error) { return vipsOf(ctx, "echo") }

// vipsOf is vips for a Service of choice.
func vipsOf(ctx context.Context, service string) ([]netip.Addr, error) {
	said, err := bed.Kubectl(ctx, "a", "get", "serviceimport", service, "--namespace", namespace, "--output", "jsonpath={.spec.ips[*]}")
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for f := range strings.FieldsSeq(said) {
		a, err := netip.ParseAddr(f)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}

// reaches waits until the VIPs lead c to pods of exactly these clusters.
func reaches(ctx context.Context, c client, clusters ...string) error {
	addrs, err := vips(ctx)
	if err != nil {
		return err
	}
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		for _, vip := range addrs {
			r, err := c.run(ctx, "--connections", "50", "--timeout", "2s", "--tcp", netip.AddrPortFrom(vip, 7).String())
			if err != nil {
				return err
			}
			if got := r.clusters(); !slices.Equal(got, clusters) || r.Failures > 0 {
				return fmt.Errorf("%s leads to clusters %v, want %v; errors %v", vip, got, clusters, r.Errors)
			}
		}
		return nil
	})
}

// backends lists the pods behind the Service as "cluster/pod".
func backends(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, member := range testbed.Members() {
		said, err := bed.Kubectl(t.Context(), member, "get", "pods", "--namespace", namespace, "--selector", "app=echo",
			"--output", "jsonpath={.items[*].metadata.name}")
		if err != nil {
			t.Fatal(err)
		}
		for pod := range strings.FieldsSeq(said) {
			all = append(all, member+"/"+pod)
		}
	}
	return slices.Sorted(slices.Values(all))
}

// TestVIPFromEverywhere: 1,000 connections of each kind from a pod, a hostNetwork pod and the node itself,
// in both families: none fails, every backend of both clusters is hit, and getpeername says the VIP.
func TestVIPFromEverywhere(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := backends(t)
	if len(want) != 4 {
		t.Fatalf("want two pods in each of two clusters, have %v", want)
	}
	for from, c := range map[string]client{"pod": podClient, "hostNetwork": hostClient, "node": nodeClient} {
		// A controller that has just begun waits for the first renewal of the other member.
		if err := reaches(t.Context(), c, "a", "b"); err != nil {
			t.Fatal(err)
		}
		for _, vip := range addrs {
			http, echo := netip.AddrPortFrom(vip, 80), netip.AddrPortFrom(vip, 7)
			for kind, target := range map[string][]string{
				"HTTP": {"--url", "http://" + http.String()},
				"TCP":  {"--tcp", echo.String()},
				"UDP":  {"--udp", echo.String()},
			} {
				t.Run(fmt.Sprintf("%s/%s/%s", from, vip, kind), func(t *testing.T) {
					r, err := c.run(t.Context(), slices.Concat([]string{"--connections", "1000", "--concurrency", "4"}, target)...)
					if err != nil {
						t.Fatal(err)
					}
					if r.Failures != 0 || r.Connections != 1000 {
						t.Errorf("%d of %d connections failed: %v", r.Failures, r.Connections, r.Errors)
					}
					if got := slices.Sorted(maps.Keys(r.Backends)); !slices.Equal(got, want) {
						t.Errorf("backends hit: %v, want %v", got, want)
					}
					peer := echo
					if kind == "HTTP" {
						peer = http
					}
					if r.Peers[peer.String()] != 1000 {
						t.Errorf("getpeername said %v, want 1000 times %s", r.Peers, peer)
					}
				})
			}
		}
	}
}

// TestNames: the Service's name has the VIP of each family in every member, a name nobody exported is
// NXDOMAIN, and cluster.local knows nothing of the other cluster.
func TestNames(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dig := func(args ...string) string {
		t.Helper()
		out, err := bed.Exec(t.Context(), "a", namespace, "client", slices.Concat([]string{"dig", "+tries=1", "+time=5"}, args)...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for _, vip := range addrs {
		qtype := "A"
		if vip.Is6() {
			qtype = "AAAA"
		}
		if got := strings.TrimSpace(dig("+short", name, qtype)); got != vip.String() {
			t.Errorf("%s %s is %q, want %s", name, qtype, got, vip)
		}
	}
	if out := dig("nobody.road.svc.clusterset.local", "A"); !strings.Contains(out, "status: NXDOMAIN") {
		t.Errorf("a name nobody exported is not NXDOMAIN:\n%s", out)
	}
	clusterIP, err := bed.Kubectl(t.Context(), "a", "get", "service", "echo", "--namespace", namespace, "--output", "jsonpath={.spec.clusterIP}")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(dig("+short", "echo.road.svc.cluster.local", "A")); got != clusterIP {
		t.Errorf("echo.road.svc.cluster.local is %q, want the local ClusterIP %s", got, clusterIP)
	}
	r, err := client(podClient).run(t.Context(), "--connections", "200", "--url", "http://"+name)
	if err != nil {
		t.Fatal(err)
	}
	if r.Failures != 0 || !slices.Equal(r.clusters(), []string{"a", "b"}) {
		t.Errorf("by name: %d failures %v, clusters %v", r.Failures, r.Errors, r.clusters())
	}
}

// TestUnexportMovesTraffic: after an unexport in b the same VIP leads to a alone, and back.
func TestUnexportMovesTraffic(t *testing.T) {
	needBed(t)
	before, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Isthmusctl(t.Context(), "b", "unexport", "service", "echo", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	if err := importedFrom(t.Context(), "a", "a"); err != nil {
		t.Error(err)
	}
	if err := reaches(t.Context(), podClient, "a"); err != nil {
		t.Error(err)
	}
	if _, err := bed.Isthmusctl(t.Context(), "b", "export", "service", "echo", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	if err := importedFrom(t.Context(), "a", "a b"); err != nil {
		t.Error(err)
	}
	if err := reaches(t.Context(), podClient, "a", "b"); err != nil {
		t.Error(err)
	}
	after, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(before, after) {
		t.Errorf("the VIPs changed from %v to %v", before, after)
	}
}
