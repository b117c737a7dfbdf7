package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// client returns the echo client as a command that runs somewhere.
type client func(ctx context.Context, args ...string) (*exec.Cmd, error)

// clientIn is an ordinary pod of a member.
func clientIn(member string) client { return in(member, "client") }

// in is a client in a pod.
func in(member, pod string) client {
	return func(ctx context.Context, args ...string) (*exec.Cmd, error) {
		return bed.ExecCommand(ctx, member, namespace, pod, slices.Concat([]string{"echo-server", "client"}, args)...)
	}
}

func podClient(ctx context.Context, args ...string) (*exec.Cmd, error) {
	return clientIn("a")(ctx, args...)
}

func hostClient(ctx context.Context, args ...string) (*exec.Cmd, error) {
	return in("a", "host-client")(ctx, args...)
}

func nodeClient(ctx context.Context, args ...string) (*exec.Cmd, error) {
	return bed.Lab.NodeCommand(ctx, clientNode, slices.Concat([]string{bed.Program("echo-server"), "client"}, args)...), nil
}

// outsideClient is in a pod and outside of the node's cgroups: it has the packet path alone. The pod is one of its own,
// since a port that leads to a backend by packets leads there by nothing else (bpf/PACKETS.md, Direct connections).
func outsideClient(ctx context.Context, args ...string) (*exec.Cmd, error) {
	return bed.OutsideCommand(ctx, "a", namespace, "outside", slices.Concat([]string{bed.Program("echo-server"), "client"}, args)...)
}

// paths are clients that reach VIPs by either path.
func paths() map[string]client {
	return map[string]client{"sockets": podClient, "packets": outsideClient}
}

// report is what the echo client prints (tools/lab/echo).
type report struct {
	Connections int            `json:"connections"`
	Failures    int            `json:"failures"`
	Errors      map[string]int `json:"errors"`
	Backends    map[string]int `json:"backends"` // answers by "cluster/pod"
	Peers       map[string]int `json:"peers"`    // connections by what getpeername said

	LastAnswer   map[string]time.Time `json:"lastAnswer"`   // of each backend
	FirstFailure time.Time            `json:"firstFailure"` // when the first connection that failed began
	LastFailure  time.Time            `json:"lastFailure"`  // the same of the last one
	Failed       []json.RawMessage    `json:"failed"`       // the first failures, one by one
}

func (c client) run(ctx context.Context, args ...string) (report, error) {
	cmd, err := c(ctx, args...)
	if err != nil {
		return report{}, err
	}
	out, err := process.Output(cmd)
	if err != nil {
		return report{}, err
	}
	return readReport(out)
}

func readReport(out string) (report, error) {
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
	si, err := serviceImport(ctx, "a", service)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, ip := range si.Spec.IPs {
		a, err := netip.ParseAddr(ip)
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
	for _, vip := range addrs {
		if err := answeredBy(ctx, c, "--tcp", netip.AddrPortFrom(vip, 7).String(), clusters...); err != nil {
			return err
		}
	}
	return nil
}

// answeredBy waits until no connection of c to a target fails and exactly these clusters answer. protocol is the client's
// flag.
func answeredBy(ctx context.Context, c client, protocol, target string, clusters ...string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		r, err := c.run(ctx, "--connections", "50", "--timeout", "2s", protocol, target)
		if err != nil {
			return err
		}
		if got := r.clusters(); !slices.Equal(got, clusters) || r.Failures > 0 {
			return fmt.Errorf("%s leads to clusters %v, want %v; errors %v", target, got, clusters, r.Errors)
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

// TestVIPFromEverywhere: 1,000 connections of each kind from a pod, from a pod outside of the node's cgroups, from a
// hostNetwork pod and from the node itself, in both families: none fails, every backend of both clusters is hit, and
// getpeername says the VIP.
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
	for from, c := range map[string]client{"pod": podClient, "outside": outsideClient, "hostNetwork": hostClient, "node": nodeClient} {
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
					peer := echo
					if kind == "HTTP" {
						peer = http
					}
					connects(t, c, 1000, want, peer, target...)
				})
			}
		}
	}
	conformance.Holds(t, "N18", "N21", "L69", "K53")
}

// TestSocketsOfEveryKind: Multipath TCP and IPv4 by sockets of IPv6, from a pod, a hostNetwork pod and the node.
func TestSocketsOfEveryKind(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := backends(t)
	for from, c := range map[string]client{"pod": podClient, "hostNetwork": hostClient, "node": nodeClient} {
		for _, vip := range addrs {
			echo := netip.AddrPortFrom(vip, 7)
			kinds := map[string][]string{"Multipath TCP": {"--multipath", "--tcp"}}
			if vip.Is4() {
				kinds["mapped TCP"] = []string{"--mapped", "--tcp"}
				kinds["mapped UDP"] = []string{"--mapped", "--udp"}
			}
			for kind, args := range kinds {
				t.Run(fmt.Sprintf("%s/%s/%s", from, vip, kind), func(t *testing.T) {
					connects(t, c, 100, want, echo, append(args, echo.String())...)
				})
			}
		}
	}
	conformance.Holds(t, "L69")
}

// connects makes n connections to a VIP and checks that none fails, that all of servers answer and nobody else, and that
// getpeername says the VIP.
func connects(t *testing.T, c client, n int, servers []string, vip netip.AddrPort, args ...string) {
	t.Helper()
	r, err := c.run(t.Context(), slices.Concat([]string{"--connections", strconv.Itoa(n), "--concurrency", "4"}, args)...)
	if err != nil {
		t.Fatal(err)
	}
	if r.Failures != 0 || r.Connections != n {
		t.Errorf("%d of %d connections failed: %v", r.Failures, r.Connections, r.Errors)
	}
	if got := slices.Sorted(maps.Keys(r.Backends)); !slices.Equal(got, servers) {
		t.Errorf("backends hit: %v, want %v", got, servers)
	}
	if r.Peers[vip.String()] != n {
		t.Errorf("getpeername said %v, want %d times %s", r.Peers, n, vip)
	}
}

// TestNames: the Service's name has the VIP of each family in every member, a name that is not exported is
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
	conformance.Holds(t, "N40", "C18", "L68")
	if out := dig("unexported.e2e.svc.clusterset.local", "A"); !strings.Contains(out, "status: NXDOMAIN") {
		t.Errorf("the name of a Service that is not exported is not NXDOMAIN:\n%s", out)
	}
	clusterIP, err := bed.Kubectl(t.Context(), "a", "get", "service", "echo", "--namespace", namespace, "--output", "jsonpath={.spec.clusterIP}")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(dig("+short", "echo.e2e.svc.cluster.local", "A")); got != clusterIP {
		t.Errorf("echo.e2e.svc.cluster.local is %q, want the local ClusterIP %s", got, clusterIP)
	}
	conformance.Holds(t, "N38", "C20")
	r, err := client(podClient).run(t.Context(), "--connections", "200", "--url", "http://"+name)
	if err != nil {
		t.Fatal(err)
	}
	if r.Failures != 0 || !slices.Equal(r.clusters(), []string{"a", "b"}) {
		t.Errorf("by name: %d failures %v, clusters %v", r.Failures, r.Errors, r.clusters())
	}
}

// TestUnexportMovesTraffic: after an unexport in b the same VIP leads to a alone, and back. Connections that led to
// b before go on.
func TestUnexportMovesTraffic(t *testing.T) {
	needBed(t)
	before, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []client{podClient, outsideClient, hostClient, nodeClient} {
		for _, vip := range before {
			defer holdTo(t, c, "http://"+netip.AddrPortFrom(vip, 80).String(), "b").end(t)
		}
	}
	conformance.Holds(t, "L69")
	if _, err := bed.Isthmusctl(t.Context(), "b", "unexport", "service", "echo", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	if err := importedFrom(t.Context(), "a", "a"); err != nil {
		t.Error(err)
	}
	if err := reaches(t.Context(), podClient, "a"); err != nil {
		t.Error(err)
	}
	conformance.Holds(t, "K10")
	if _, err := bed.Isthmusctl(t.Context(), "b", "export", "service", "echo", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	if err := importedFrom(t.Context(), "a", "a b"); err != nil {
		t.Error(err)
	}
	if err := reaches(t.Context(), podClient, "a", "b"); err != nil {
		t.Error(err)
	}
	conformance.Holds(t, "K53")
	after, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(before, after) {
		t.Errorf("the VIPs changed from %v to %v", before, after)
	}
}
