package e2e

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/near.yaml
var near string

//go:embed testdata/leaving.yaml
var leaving string

// behind is a Service that stands before the servers of testdata/workload.yaml with some ports, in YAML.
func behind(service, ports string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %s, namespace: %s}
spec: {selector: {app: echo}, ipFamilyPolicy: PreferDualStack, ports: [%s]}
`, service, namespace, ports)
}

// patch changes an object of a member.
func patch(t *testing.T, member, kind, name, change string) {
	t.Helper()
	if _, err := bed.Kubectl(t.Context(), member, "patch", kind, name, "--namespace", namespace, "--type", "merge", "--patch", change); err != nil {
		t.Fatal(err)
	}
}

// TestNearestServe: every choice of near and far servers that a Service's owner can make, seen from a pod of a2 and
// from one of b1. a has a server on each of its nodes. Those of b say that their node is called a2 as well, and their
// zone has the name of a's: the agents of a are told that this is one zone, those of b are not.
func TestNearestServe(t *testing.T) {
	needBed(t)
	t.Parallel()
	ctx := t.Context()
	if err := bed.Apply(ctx, "a", near); err != nil {
		t.Fatal(err)
	}
	nearInB(t, true)
	if _, err := bed.Kubectl(ctx, "a", "wait", "pod", "near-1", "near-2", "--namespace", namespace, "--for", "condition=Ready", "--timeout", patience.String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for member, things := range map[string][]string{
			"a": {"service/near", "pod/near-1", "pod/near-2"},
			"b": {"service/near", "endpointslice/near-by-hand"},
		} {
			args := slices.Concat([]string{"delete", "--namespace", namespace, "--wait=false"}, things)
			if _, err := bed.Kubectl(context.WithoutCancel(ctx), member, args...); err != nil {
				t.Error(err)
			}
		}
	})
	target := netip.AddrPortFrom(publish(t, "near", "a", "b"), 7).String()

	// leads waits until clients meet exactly these servers. Those of b are one.
	leads := func(why string, c client, want ...string) {
		t.Helper()
		err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
			r, err := c.run(ctx, "--connections", "40", "--timeout", "2s", "--tcp", target)
			if err != nil {
				return err
			}
			met := map[string]bool{}
			for server := range r.Backends {
				if strings.HasPrefix(server, "b/") {
					server = "b"
				}
				met[server] = true
			}
			if have := slices.Sorted(maps.Keys(met)); !slices.Equal(have, want) || r.Failures > 0 {
				return fmt.Errorf("%v answer, want %v; %d failures: %v", have, want, r.Failures, r.Errors)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", why, err)
		}
	}
	ready := func(pod string, is bool) {
		t.Helper()
		command := []string{"touch", "/tmp/unready"}
		if is {
			command = []string{"rm", "/tmp/unready"}
		}
		if _, err := bed.Exec(ctx, "a", namespace, pod, command...); err != nil {
			t.Fatal(err)
		}
	}
	a2, b1 := clientIn("a"), clientIn("b")
	leads("no wish", a2, "a/near-1", "a/near-2", "b")

	patch(t, "a", "service", "near", `{"spec": {"trafficDistribution": "PreferSameNode"}}`)
	leads("the same node", a2, "a/near-2")
	leads("the same node, by packets", outsideClient, "a/near-2")
	ready("near-2", false)
	leads("the same zone, without a server on the node", a2, "a/near-1", "b")
	conformance.Holds(t, "K11")
	ready("near-2", true)

	patch(t, "a", "service", "near", `{"spec": {"trafficDistribution": "PreferSameZone"}}`)
	leads("zones span clusters", a2, "a/near-1", "a/near-2", "b")
	leads("zones do not span clusters", b1, "b")
	nearInB(t, false)
	leads("another cluster, when there is nobody in the zone", b1, "a/near-1", "a/near-2")
	nearInB(t, true)
	patch(t, "a", "service", "near", `{"spec": {"trafficDistribution": "PreferClose"}}`)
	leads("close is the zone", b1, "b")

	// leadsAway waits until a2 meets b while no server of a is ready.
	leadsAway := func(why string) {
		t.Helper()
		ready("near-1", false)
		ready("near-2", false)
		leads(why, a2, "b")
		ready("near-1", true)
		ready("near-2", true)
	}
	patch(t, "a", "serviceexport", "near", `{"spec": {"exportedAnnotations": {"isthmus.dev/prefer": "cluster,remote"}}}`)
	leads("the own cluster", a2, "a/near-1", "a/near-2")
	leadsAway("another cluster, when there is nobody in the own")
	patch(t, "a", "serviceexport", "near", `{"spec": {"exportedAnnotations": {"isthmus.dev/prefer": "remote"}}}`)
	leads("another cluster", a2, "b")
	leads("another cluster", b1, "a/near-1", "a/near-2")

	patch(t, "a", "serviceexport", "near", `{"spec": {"exportedAnnotations": {"isthmus.dev/prefer": "region,remote"}}}`)
	leads("regions span clusters", a2, "a/near-1", "a/near-2", "b")
	leads("regions do not span clusters", b1, "b")
	regionOfB(t, "elsewhere")
	leads("the own region", a2, "a/near-1", "a/near-2")
	leads("the own region, by packets", outsideClient, "a/near-1", "a/near-2")
	leadsAway("another region, when there is nobody in the own")
	regionOfB(t, "lab")

	patch(t, "a", "service", "near", `{"spec": {"internalTrafficPolicy": "Local", "trafficDistribution": null}}`)
	leads("only the node", a2, "a/near-2")
	if err := refuses(ctx, b1, "--tcp", target); err != nil {
		t.Errorf("only the node, where nobody is: %v", err)
	}
	ready("near-2", false)
	for path, c := range paths() {
		if err := refuses(ctx, c, "--tcp", target); err != nil {
			t.Errorf("only the node, where nobody is ready, %s: %v", path, err)
		}
	}
}

// regionOfB labels the Nodes of b with a region.
func regionOfB(t *testing.T, region string) {
	t.Helper()
	if _, err := bed.Kubectl(t.Context(), "b", "label", "node", "--all", "--overwrite", "topology.kubernetes.io/region="+region); err != nil {
		t.Fatal(err)
	}
}

// echoIPs returns the IPv4 addresses of a member's servers of testdata/workload.yaml.
func echoIPs(t *testing.T, member string) []string {
	t.Helper()
	ips, err := bed.Kubectl(t.Context(), member, "get", "pods", "--namespace", namespace, "--selector", "app=echo", "--output", "jsonpath={.items[*].status.podIP}")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(ips)
}

// nearInB makes b's Service near of the servers of testdata/workload.yaml, on a node and in a zone of names that a has
// too.
func nearInB(t *testing.T, ready bool) {
	t.Helper()
	manifest := `
apiVersion: v1
kind: Service
metadata: {name: near, namespace: e2e}
spec: {ipFamilyPolicy: PreferDualStack, ports: [{name: tcp, port: 7, targetPort: 8081}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: near-by-hand, namespace: e2e, labels: {kubernetes.io/service-name: near}}
addressType: IPv4
ports: [{name: tcp, port: 8081}]
endpoints:
`
	for _, ip := range echoIPs(t, "b") {
		manifest += fmt.Sprintf("- {addresses: [%s], nodeName: a2, zone: z1, conditions: {ready: %t}}\n", ip, ready)
	}
	if err := bed.Apply(t.Context(), "b", manifest); err != nil {
		t.Fatal(err)
	}
}

// TestWeightsOfClusters: a and b have two servers each, and a has three times the weight. Whether 4,000 connections
// fell as they should is a chi-square test with three degrees of freedom; chance alone fails it once in a million
// runs.
func TestWeightsOfClusters(t *testing.T) {
	needBed(t)
	t.Parallel()
	const n, critical = 4000, 30.66
	for _, m := range testbed.Members() {
		if err := bed.Apply(t.Context(), m, behind("weighed", "{name: tcp, port: 7, targetPort: 8081}")); err != nil {
			t.Fatal(err)
		}
	}
	// Weights count because both clusters state the same ones.
	for _, m := range []string{"a", "b"} {
		if err := bed.Apply(t.Context(), m, `
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: weighed, namespace: e2e}
spec: {exportedAnnotations: {isthmus.dev/cluster-weights: "a=3,b=1"}}
`); err != nil {
			t.Fatal(err)
		}
	}
	target := netip.AddrPortFrom(publish(t, "weighed", "a", "b"), 7).String()
	for path, c := range paths() {
		if err := answeredBy(t.Context(), c, "--tcp", target, "a", "b"); err != nil {
			t.Fatal(err)
		}
		r, err := c.run(t.Context(), "--connections", fmt.Sprint(n), "--concurrency", "4", "--tcp", target)
		if err != nil {
			t.Fatal(err)
		}
		var chiSquare float64
		for _, server := range backends(t) {
			want := n / 8.
			if strings.HasPrefix(server, "a/") {
				want *= 3
			}
			off := float64(r.Backends[server]) - want
			chiSquare += off * off / want
		}
		t.Logf("%s: chi-square %.2f of %v", path, chiSquare, r.Backends)
		if r.Failures > 0 || chiSquare > critical {
			t.Errorf("%s: %d failures, chi-square %.2f > %v: %v", path, r.Failures, chiSquare, critical, r.Backends)
		}
	}
}

// TestLeavingServers: a server that was told to end keeps its connections and gets no new ones while another is ready.
// When all were told to end, those that still answer serve (KEP-1669), and after them nobody.
func TestLeavingServers(t *testing.T) {
	needBed(t)
	t.Parallel()
	ctx := t.Context()
	kubectl := func(args ...string) {
		t.Helper()
		if _, err := bed.Kubectl(ctx, "b", append(args, "--namespace", namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	start := func(pod string) {
		t.Helper()
		if err := bed.Apply(ctx, "b", strings.ReplaceAll(leaving, "NAME", pod)); err != nil {
			t.Fatal(err)
		}
		kubectl("wait", "pod", pod, "--for", "condition=Ready", "--timeout", patience.String())
	}
	end := func(pod string) {
		t.Helper()
		kubectl("delete", "pod", pod, "--wait=false")
		t.Cleanup(func() { // the server may be gone for good
			_, _ = bed.Exec(context.WithoutCancel(ctx), "b", namespace, pod, "touch", "/tmp/go")
		})
	}
	manifest := strings.ReplaceAll(behind("leaving", "{name: http, port: 80, targetPort: 8080}"), "app: echo", "app: leaving")
	if err := bed.Apply(ctx, "b", manifest); err != nil {
		t.Fatal(err)
	}
	start("leaving-1")
	vip := netip.AddrPortFrom(publish(t, "leaving", "b"), 80).String()
	url := "http://" + vip
	// leads waits until new clients on both paths meet exactly these servers.
	leads := func(why string, want ...string) {
		t.Helper()
		for path, c := range paths() {
			err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
				r, err := c.run(ctx, "--connections", "40", "--timeout", "2s", "--url", url)
				if have := slices.Sorted(maps.Keys(r.Backends)); err == nil && (!slices.Equal(have, want) || r.Failures > 0) {
					err = fmt.Errorf("%v answer, want %v; %d failures: %v", have, want, r.Failures, r.Errors)
				}
				return err
			})
			if err != nil {
				t.Errorf("%s, %s: %v", why, path, err)
			}
		}
	}
	leads("one server", "b/leaving-1")
	var stay []held
	for _, c := range paths() {
		stay = append(stay, hold(t, c, url))
	}
	start("leaving-2")
	leads("two servers", "b/leaving-1", "b/leaving-2")

	end("leaving-1")
	leads("one of two was told to end", "b/leaving-2")
	for _, h := range stay {
		h.end(t)
	}
	var streams []*stream
	for _, c := range paths() {
		streams = append(streams, flow(t, c, "--rate", "200", "--timeout", "3s", "--url", url))
	}
	end("leaving-2")
	leads("both were told to end", "b/leaving-1", "b/leaving-2")
	for _, s := range streams {
		if r, err := s.end(); err != nil || r.Failures > 0 {
			t.Errorf("when the last one was told to end, %d of %d connections failed: %v, %v", r.Failures, r.Connections, r.Errors, err)
		}
	}
	for _, pod := range []string{"leaving-1", "leaving-2"} {
		if _, err := bed.Exec(ctx, "b", namespace, pod, "touch", "/tmp/go"); err != nil {
			t.Fatal(err)
		}
	}
	for path, c := range paths() {
		if err := refuses(ctx, c, "--tcp", vip); err != nil {
			t.Errorf("nobody is left, %s: %v", path, err)
		}
	}
}
