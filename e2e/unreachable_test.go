package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// wall makes b's nodes drop what comes from some addresses, and what is for others, without a word, until the
// returned function is called or the test ends. It returns when the clock said what just before it stood.
func wall(t *testing.T, sources, targets []string) (since time.Time, open func()) {
	t.Helper()
	const table = "isthmus-test-wall"
	ruleset := "table inet " + table + " {\n chain drops { type filter hook prerouting priority -300;\n"
	for direction, list := range map[string][]string{"saddr": sources, "daddr": targets} {
		for _, a := range list {
			family := "ip"
			if strings.Contains(a, ":") {
				family = "ip6"
			}
			ruleset += fmt.Sprintf("  %s %s %s drop\n", family, direction, a)
		}
	}
	ruleset += " }\n}\n"
	said, err := bed.Node(t.Context(), "b1", "sh", "-c", "date +%s%N && echo '"+ruleset+"' | nft -f -")
	if err != nil {
		t.Fatal(err)
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(said), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	opened := false
	open = func() {
		t.Helper()
		if opened {
			return
		}
		opened = true
		if _, err := bed.Node(context.WithoutCancel(t.Context()), "b1", "nft", "delete", "table", "inet", table); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(open)
	return time.Unix(0, ns), open
}

// addressesOf lists where packets of a member's nodes come from, and those of its pods.
func addressesOf(t *testing.T, member string) (nodes, pods []string) {
	t.Helper()
	all := bed.Lab.Topology()
	i := slices.IndexFunc(all, func(c topology.Cluster) bool { return c.Name == member })
	if i < 0 {
		t.Fatalf("no cluster %s", member)
	}
	for _, n := range all[i].Nodes {
		nodes = append(nodes, n.IPv4.String(), n.IPv6.String())
		pods = append(pods, n.PodIPv4.String(), n.PodIPv6.String())
	}
	return nodes, pods
}

// drains waits until the agent on clientNode has drained exactly these members.
func drains(ctx context.Context, members ...string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		said, err := bed.AgentStatus(ctx, "a", clientNode)
		if err != nil {
			return err
		}
		if have := said.Dataplane.Drained; !slices.Equal(have, members) {
			return fmt.Errorf("%s has drained %v, want %v", clientNode, have, members)
		}
		return nil
	})
}

// exportOnlyB offers a Service that b alone serves, and returns its IPv4 VIP once it answers in a.
func exportOnlyB(t *testing.T) netip.Addr {
	t.Helper()
	ctx := t.Context()
	if err := bed.Apply(ctx, "b", onlyB); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Isthmusctl(ctx, "b", "export", "service", "only-b", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	if err := serviceImportedFrom(ctx, "a", "only-b", "b"); err != nil {
		t.Fatal(err)
	}
	if err := serves(ctx, "only-b"); err != nil {
		t.Fatal(err)
	}
	addrs, err := vipsOf(ctx, "only-b")
	if err != nil {
		t.Fatal(err)
	}
	return addrs[slices.IndexFunc(addrs, netip.Addr.Is4)]
}

// TestSilentMemberIsDrained: all packets from a to b die while b's control plane lives and renews its Lease. New
// connections of a pod in a go to a's own servers within 3 s, those to a Service that b alone has are refused at
// once, the node says so in its report, and when packets live again b serves again.
func TestSilentMemberIsDrained(t *testing.T) {
	needBed(t)
	cuts := 1
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		cuts = 30
	}
	onlyVIP := exportOnlyB(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	vip := addrs[slices.IndexFunc(addrs, netip.Addr.Is4)]
	if err := reaches(t.Context(), podClient, "a", "b"); err != nil {
		t.Fatal(err)
	}
	var took, back []time.Duration // for the log; how long they are depends on the machine
	for range cuts {
		drained, healed := cutOnce(t, vip, onlyVIP)
		took, back = append(took, drained), append(back, healed)
	}
	slices.Sort(took)
	slices.Sort(back)
	at := func(all []time.Duration, percent int) time.Duration {
		return all[len(all)*percent/100].Round(time.Millisecond)
	}
	t.Logf("%d cuts: the last connection that failed began after %s p50, %s p99, %s at most; b served again after %s p50, %s at most",
		cuts, at(took, 50), at(took, 99), took[len(took)-1], at(back, 50), back[len(back)-1])
}

// cutOnce returns for how long after the cut connections to vip began that failed, and how long after the healing b
// was taken back.
func cutOnce(t *testing.T, vip, onlyVIP netip.Addr) (drained, healed time.Duration) {
	t.Helper()
	ctx := t.Context()
	// A connection that waits in vain takes its whole timeout, in which more must begin.
	s := flow(t, podClient, "--rate", "20", "--concurrency", "100", "--timeout", "4s", "--tcp", netip.AddrPortFrom(vip, 7).String())
	nodes, pods := addressesOf(t, "a")
	since, open := wall(t, append(nodes, pods...), nil)
	if err := drains(ctx, "b"); err != nil {
		t.Error(err)
	}
	known := time.Now()
	refused, err := client(podClient).run(ctx, "--connections", "20", "--timeout", "2s", "--tcp", netip.AddrPortFrom(onlyVIP, 80).String())
	if err != nil {
		t.Fatal(err)
	}
	if refused.Errors["connection refused"] != 20 {
		t.Errorf("b alone serves and its packets die: %d of 20 failed: %v, want all refused", refused.Failures, refused.Errors)
	}
	if err := reports(ctx, clientNode, "{.spec.silent}", `["b"]`); err != nil {
		t.Error(err)
	}
	<-time.After(2 * time.Second) // in which connections begin that must not fail
	r, err := s.end()
	if err != nil {
		t.Fatal(err)
	}
	if !r.LastFailure.After(since) {
		t.Errorf("no connection failed after the cut: %+v", r)
	}
	if r.LastFailure.After(known) {
		t.Errorf("a connection that began %s after b was drained failed", r.LastFailure.Sub(known))
	}
	began := time.Now()
	open()
	if err := drains(ctx); err != nil {
		t.Error(err)
	}
	healed = time.Since(began)
	if err := reaches(ctx, podClient, "a", "b"); err != nil {
		t.Error(err)
	}
	return r.LastFailure.Sub(since), healed
}

// reports waits until the NodeReport of a node of a says so.
func reports(ctx context.Context, node, field, want string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		have, err := bed.Kubectl(ctx, "a", "get", "nodereport", node, "--namespace", testbed.Namespace, "--output", "jsonpath="+field)
		if err != nil {
			return err
		}
		if have != want {
			return fmt.Errorf("the report of %s has %s %s, want %s", node, field, have, want)
		}
		return nil
	})
}

// TestProbesMayBeBlocked: the network lets nothing of a's nodes themselves through to b, as a NetworkPolicy might, and
// one of b's servers is silent to everybody, so that there is reason to probe. The other one answers pods: b is not
// drained.
func TestProbesMayBeBlocked(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	addrs, err := vips(ctx)
	if err != nil {
		t.Fatal(err)
	}
	said, err := bed.Kubectl(ctx, "b", "get", "pods", "--namespace", namespace, "--selector", "app=echo",
		"--output", "jsonpath={.items[0].status.podIPs[*].ip}")
	if err != nil {
		t.Fatal(err)
	}
	if err := reaches(ctx, podClient, "a", "b"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := drains(context.WithoutCancel(ctx)); err != nil { // when the clients had ended there was nothing but silence
			t.Error(err)
		}
	})
	nodes, _ := addressesOf(t, "a")
	wall(t, nodes, strings.Fields(said))
	vip := addrs[slices.IndexFunc(addrs, netip.Addr.Is4)]
	const busy = 8 * time.Second
	began := time.Now()
	// So many that no second passes in which chance, or a busy machine, gives the one that answers none of them.
	s := flow(t, podClient, "--rate", "60", "--concurrency", "300", "--timeout", "3s", "--tcp", netip.AddrPortFrom(vip, 7).String())
	err = testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		agent, err := bed.AgentStatus(ctx, "a", clientNode)
		if err != nil {
			return err
		}
		if len(agent.Dataplane.Drained) > 0 {
			t.Errorf("%v is drained although a server of it answers", agent.Dataplane.Drained)
			return nil
		}
		if past := time.Since(began); past < busy {
			return fmt.Errorf("the client has run for %s", past)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.end()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(r.clusters(), []string{"a", "b"}) || r.Failures == 0 || r.Errors["timeout"] != r.Failures {
		t.Errorf("answers from %v, failures %v, want some that waited in vain", r.clusters(), r.Errors)
	}
	t.Logf("%d of %d connections waited in vain, and b stayed", r.Failures, r.Connections)
}

// inBoth does something in both members at a time.
func inBoth(t *testing.T, do func(member string) error) {
	t.Helper()
	var all sync.WaitGroup
	for _, member := range testbed.Members() {
		all.Go(func() {
			if err := do(member); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// scaleTimes makes the controllers of both members measure time by a factor until the test ends.
func scaleTimes(t *testing.T, factor string) {
	t.Helper()
	chart, err := filepath.Abs("../deploy/helm/isthmus")
	if err != nil {
		t.Fatal(err)
	}
	set := func(ctx context.Context, args string) {
		t.Helper()
		inBoth(t, func(member string) error {
			_, err := bed.Helm(ctx, member, "upgrade", "isthmus", chart, "--namespace", testbed.Namespace, "--reuse-values", "--set-json", "controller.extraArgs="+args)
			return err
		})
		inBoth(t, func(member string) error {
			_, err := bed.Isthmusctl(ctx, member, "status", "--wait", "--timeout", "3m")
			return err
		})
	}
	set(t.Context(), `["--time-scale=`+factor+`"]`)
	t.Cleanup(func() { set(context.WithoutCancel(t.Context()), "[]") })
}

// thinks waits until a's controller thinks that b is in a state.
func thinks(ctx context.Context, want string) error {
	return testbed.Eventually(ctx, 2*patience, func(ctx context.Context) error {
		said, failed := bed.Isthmusctl(ctx, "a", "status", "--output", "json") // it fails while something is not ready
		var s struct {
			Controller struct {
				Members []struct{ ID, State string }
			}
		}
		if err := json.Unmarshal([]byte(said), &s); err != nil {
			return fmt.Errorf("read the status of a: %w: %w", err, failed)
		}
		for _, m := range s.Controller.Members {
			if m.ID == "b" && m.State == want {
				return nil
			}
		}
		return fmt.Errorf("a thinks %+v, want b %s", s.Controller.Members, want)
	})
}

// TestControlPlaneDies: b's control plane is cut off, so that its Lease grows old, and a's controller cannot probe b
// either. Pods of b serve pods of a for longer than the hard TTL and none of their connections fails, because a's
// nodes hear from them. When packets die too, b's endpoints go, long before anybody is told about Leases.
func TestControlPlaneDies(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	const hardTTL = 30 * time.Second // by this factor
	scaleTimes(t, "0.1")
	if err := thinks(ctx, "live"); err != nil {
		t.Fatal(err)
	}
	controllers, err := bed.Kubectl(ctx, "a", "get", "pods", "--namespace", testbed.Namespace, "--selector", "app.kubernetes.io/name=isthmus-controller",
		"--output", "jsonpath={.items[*].status.podIPs[*].ip}")
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := vips(ctx)
	if err != nil {
		t.Fatal(err)
	}
	vip := addrs[slices.IndexFunc(addrs, netip.Addr.Is4)]
	s := flow(t, podClient, "--rate", "40", "--timeout", "5s", "--tcp", netip.AddrPortFrom(vip, 7).String())
	if err := reports(ctx, clientNode, "{.spec.answering}", `["a","b"]`); err != nil {
		t.Error(err)
	}
	_, open := wall(t, strings.Fields(controllers), nil)
	if err := bed.Lab.Cut(ctx, "b"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Kubernetes would start b's controller again after a while; that of scaleTimes starts another one.
		if err := bed.Lab.Heal(context.WithoutCancel(ctx), "b"); err != nil {
			t.Error(err)
		}
	})
	if err := thinks(ctx, "stale"); err != nil {
		t.Error(err)
	}
	stale := time.Now()
	gone := func(ctx context.Context) (bool, error) {
		said, err := bed.Kubectl(ctx, "a", "get", "endpointslices", "--namespace", namespace,
			"--selector", "multicluster.kubernetes.io/service-name=echo,multicluster.kubernetes.io/source-cluster=b",
			"--output", "jsonpath={.items[*].endpoints[*].addresses[0]}")
		return said == "", err
	}
	err = testbed.Eventually(ctx, 2*hardTTL, func(ctx context.Context) error {
		none, err := gone(ctx)
		if err != nil {
			return err
		}
		if none {
			t.Fatalf("b's endpoints went %s after it became stale", time.Since(stale))
		}
		if past := time.Since(stale); past < 7*hardTTL/6 {
			return fmt.Errorf("stale for %s", past)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	r, err := s.end()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d connections in %s after the Lease had grown old, %d failed", r.Connections, time.Since(stale).Round(time.Second), r.Failures)
	if r.Failures > 0 || !slices.Equal(r.clusters(), []string{"a", "b"}) {
		t.Errorf("%d of %d connections failed: %v; answers from %v", r.Failures, r.Connections, r.Errors, r.clusters())
	}

	open()
	nodes, pods := addressesOf(t, "a")
	_, open = wall(t, append(nodes, pods...), nil)
	s = flow(t, podClient, "--rate", "40", "--concurrency", "100", "--timeout", "4s", "--tcp", netip.AddrPortFrom(vip, 7).String())
	began := time.Now()
	err = testbed.Eventually(ctx, 2*patience, func(ctx context.Context) error {
		none, err := gone(ctx)
		if err == nil && !none {
			err = fmt.Errorf("b's endpoints are still there")
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	t.Logf("b's endpoints went %s after its packets died", time.Since(began).Round(time.Second))
	if _, err := s.end(); err != nil {
		t.Error(err)
	}
	open()
}

// TestAgentsReportTheirOwnNodes: what has the rights of the agents and a token of one node cannot write the report of
// another one, nor tie one to anything but its Node.
func TestAgentsReportTheirOwnNodes(t *testing.T) {
	needBed(t)
	own := "ownerReferences: [{apiVersion: v1, kind: Node, name: a1, uid: u}]"
	for name, tc := range map[string]struct {
		node, report, metadata string
		says                   string // "" it is written
	}{
		"its own":                {"a1", "a1", own, ""},
		"another one's":          {"a1", "a2", "", "bound to node 'a1'"},
		"a token of no node":     {"", "a1", "", "bound to node ''"},
		"one that a Pod owns":    {"a1", "a1", "ownerReferences: [{apiVersion: v1, kind: Pod, name: a1, uid: u}]", "its Node as its only owner"},
		"one of another Node":    {"a1", "a1", "ownerReferences: [{apiVersion: v1, kind: Node, name: a2, uid: u}]", "its Node as its only owner"},
		"one with its own terms": {"a1", "a1", "finalizers: [isthmus.dev/keep]", "its Node as its only owner"},
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{
				"apply", "--server-side", "--force-conflicts", "--dry-run=server", "--filename", "-",
				"--as", "system:serviceaccount:" + testbed.Namespace + ":isthmus-agent",
			}
			if tc.node != "" {
				args = append(args, "--as-user-extra", "authentication.kubernetes.io/node-name="+tc.node)
			}
			cmd := bed.Lab.Kubectl(t.Context(), "a", args...)
			cmd.Stdin = strings.NewReader(fmt.Sprintf("apiVersion: isthmus.dev/v1alpha1\nkind: NodeReport\nmetadata:\n  namespace: %s\n  name: %s\n  %s\nspec: {silent: [b]}\n",
				testbed.Namespace, tc.report, tc.metadata))
			_, err := process.Output(cmd)
			if tc.says == "" && err != nil || tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("got %v, want an error that says %q", err, tc.says)
			}
		})
	}
}
