package e2e

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

var (
	//go:embed testdata/only-b.yaml
	onlyB string
	//go:embed testdata/later.yaml
	later string
)

// TestClusterJoinsAndLeavesUnderTraffic: while a's pod asks for a Service of b, and for one of a and b, cluster
// c joins, exports the second one too, unexports it, exports it again, joins again with Lighthouse's profile and leaves. No request
// fails.
func TestClusterJoinsAndLeavesUnderTraffic(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctl := func(member string, args ...string) {
		t.Helper()
		_, err := bed.Isthmusctl(ctx, member, args...)
		must(err)
	}
	must(bed.Apply(ctx, "b", onlyB))
	ctl("b", "export", "service", "only-b", "--namespace", namespace)
	must(serviceImportedFrom(ctx, "a", "only-b", "b"))
	must(serves(ctx, "only-b"))

	streams := map[string]*stream{
		"only-b": flow(t, podClient, "--rate", "100", "--url", "http://only-b.e2e.svc.clusterset.local"),
		"echo":   flow(t, podClient, "--rate", "100", "--url", "http://"+name),
	}
	fromGuest := streams["echo"]
	defer func() {
		for service, s := range streams {
			r, err := s.end()
			if err != nil {
				t.Errorf("%s: %v", service, err)
			}
			if r.Failures != 0 || r.Connections == 0 {
				t.Errorf("%s: %d of %d requests failed: %v", service, r.Failures, r.Connections, r.Errors)
			}
			t.Logf("%s: %d requests, answered by %v", service, r.Connections, slices.Sorted(maps.Keys(r.Backends)))
			if s == fromGuest && !slices.Contains(r.clusters(), testbed.Guest) {
				t.Errorf("%s: nothing of %s has answered, but clusters %v", service, testbed.Guest, r.clusters())
			}
		}
	}()

	must(bed.Join(ctx, testbed.Guest))
	must(startWorkload(ctx, testbed.Guest))
	offer := func() {
		t.Helper()
		ctl(testbed.Guest, "export", "service", "echo", "--namespace", namespace)
		must(importedFrom(ctx, "a", "a b c"))
		must(reaches(ctx, podClient, "a", "b", "c"))
	}
	withdrawn := func() {
		t.Helper()
		must(importedFrom(ctx, "a", "a b"))
		must(reaches(ctx, podClient, "a", "b"))
	}
	offer()
	namesOfClusters(t)
	laterNode(t)
	ctl(testbed.Guest, "unexport", "service", "echo", "--namespace", namespace)
	withdrawn()
	offer()
	lighthouseProfile(t)
	must(bed.Leave(ctx, testbed.Guest))
	withdrawn()
	left, err := bed.Kubectl(ctx, testbed.Guest, "get", "serviceimports,endpointslices", "--all-namespaces",
		"--selector", "multicluster.kubernetes.io/service-name", "--output", "name")
	must(err)
	if left != "" {
		t.Errorf("%s still has %s", testbed.Guest, left)
	}
	if kept := inKernel(t, "c1"); kept != "" {
		t.Errorf("Isthmus was uninstalled, and node c1 still has %s", kept)
	}
	conformance.Holds(t, "L49")
}

// inKernel returns what Isthmus has in the kernel of a node: the folder with its pins, its devices and its programs.
func inKernel(t *testing.T, node string) string {
	t.Helper()
	said, err := bed.Node(t.Context(), node, "sh", "-c", "ls -d /sys/fs/bpf/isthmus 2>/dev/null; ip -o link | grep -o 'isthmus[^:@]*'; bpftool cgroup tree /sys/fs/cgroup | grep -o 'isthmus[^ ]*'; true")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(said), " ")
}

// namesOfClusters checks in the guest that a name with a cluster has that cluster's own endpoints and their ports. Members whose agents
// are not told so have no such names.
func namesOfClusters(t *testing.T) {
	t.Helper()
	for _, exporter := range append(testbed.Members(), testbed.Guest) {
		of := exporter + "." + name
		resolvesTo(t, testbed.Guest, "A", of, echoIPs(t, exporter)...)
		resolvesTo(t, testbed.Guest, "SRV", "_http._tcp."+of, "8080 "+of)
		if output, err := inPod(t.Context(), "a", "nslookup", of+"."); err == nil {
			t.Errorf("a also knows %s:\n%s", of, output)
		}
	}
}

// lighthouseProfile lets the guest join again with Lighthouse's profile and with the ClusterIPs of its Services as endpoints, which
// the network routes. Its Service that others export too keeps their VIP, and a's connections to it still reach the guest. One that
// it alone exports has no VIP: its name leads a's clients to its ClusterIPs.
func lighthouseProfile(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	routeServices(t, "a", testbed.Guest)
	settings := func(ctx context.Context, profile, endpoints string) {
		t.Helper()
		if _, err := bed.Isthmusctl(ctx, "broker", "deploy-broker", "--profile="+profile, "--endpoints="+endpoints); err != nil {
			t.Fatal(err)
		}
	}
	settings(ctx, "lighthouse", "service-vip")
	err := bed.Join(ctx, testbed.Guest)
	settings(context.WithoutCancel(ctx), "kep", "pods") // those of a and b, which have not joined again
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"restart"}, {"status", "--timeout=90s"}} { // the controller reads these settings at its start
		if _, err := bed.Kubectl(ctx, testbed.Guest, append([]string{"rollout", args[0], "deployment/isthmus-controller", "--namespace", testbed.Namespace}, args[1:]...)...); err != nil {
			t.Fatal(err)
		}
	}
	export := `
---
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: lit, namespace: ` + namespace + `}
`
	if err := bed.Apply(ctx, testbed.Guest, behind("lit", ports42)+export); err != nil {
		t.Fatal(err)
	}
	err = testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		said, err := bed.Kubectl(ctx, "a", "get", "endpointslices", "--namespace", namespace, "--output", "jsonpath={.items[*].endpoints[*].addresses[*]}",
			"--selector", "multicluster.kubernetes.io/service-name=echo,multicluster.kubernetes.io/source-cluster="+testbed.Guest)
		if have, want := strings.Fields(said), clusterIPs(t, testbed.Guest, "echo"); err == nil && !slices.Equal(slices.Sorted(slices.Values(have)), want) {
			err = fmt.Errorf("a has endpoints %v of %s, want its ClusterIPs %v", have, testbed.Guest, want)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	leadsToClusterIPs(t, "a", testbed.Guest, "lit")
	answers(t, "a", testbed.Guest, "--tcp", fqdn("lit", 42))
	answers(t, "a", testbed.Guest, "--udp", fqdn("lit", 42))
	if err := reaches(ctx, podClient, "a", "b", testbed.Guest); err != nil {
		t.Error(err)
	}
}

// laterNode gives the guest a node after it has joined. In a supernet that its administrator has registered, the guest's controller
// registers that node's pods, and a's clients reach them.
func laterNode(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	var supernets []string
	for _, cidr := range clusterOf(t, testbed.Guest).PodCIDRs() {
		supernets = append(supernets, cidr.String())
	}
	if _, err := bed.Isthmusctl(ctx, "broker", "member", "set", testbed.Guest, "--pod-supernet", strings.Join(supernets, ",")); err != nil {
		t.Fatal(err)
	}
	node, err := bed.AddNode(ctx, testbed.Guest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bed.Lab.RemoveNode(context.WithoutCancel(ctx), testbed.Guest); err != nil {
			t.Error(err)
		}
	})
	if err := bed.Apply(ctx, testbed.Guest, strings.NewReplacer("NODE", node.Name, "CLUSTER_ID", testbed.Guest).Replace(later)); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Isthmusctl(ctx, testbed.Guest, "export", "service", "later", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	answers(t, "a", testbed.Guest, "--tcp", fqdn("later", 42))
	answers(t, "a", testbed.Guest, "--udp", fqdn("later", 42))
}

// serves waits until a Service answers by its name.
func serves(ctx context.Context, service string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		r, err := client(podClient).run(ctx, "--connections", "10", "--url", "http://"+service+"."+namespace+".svc.clusterset.local")
		if err != nil {
			return err
		}
		if r.Failures > 0 {
			return fmt.Errorf("%s does not answer: %v", service, r.Errors)
		}
		return nil
	})
}
