package e2e

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/dataplane.yaml
var dataplaneWorkload string

// offer puts testdata/dataplane.yaml into members under a name, with pods that keep serving for some seconds after they
// were told to end, exports the Service from all of them and returns its IPv4 VIP once it answers in a. All goes with the
// test.
func offer(t *testing.T, service, preStop string, members ...string) netip.Addr {
	t.Helper()
	ctx := t.Context()
	for _, m := range members {
		manifest := strings.NewReplacer("NAME", service, "CLUSTER_ID", m, "PRE_STOP", preStop).Replace(dataplaneWorkload)
		if err := bed.Apply(ctx, m, manifest); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := bed.Kubectl(context.WithoutCancel(ctx), m, "delete", "deployment/"+service, "service/"+service, "--namespace", namespace, "--wait=false"); err != nil {
				t.Error(err)
			}
		})
	}
	for _, m := range members {
		if _, err := bed.Kubectl(ctx, m, "rollout", "status", "deployment/"+service, "--namespace", namespace, "--timeout", patience.String()); err != nil {
			t.Fatal(err)
		}
	}
	vip := publish(t, service, members...)
	allServe(t, vip, members...)
	return vip
}

// allServe waits until both servers of each member answer a pod of a.
func allServe(t *testing.T, vip netip.Addr, members ...string) {
	t.Helper()
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		r, err := sample(ctx, vip)
		if err != nil {
			return err
		}
		if r.Failures > 0 || !slices.Equal(r.clusters(), members) || len(r.Backends) != 2*len(members) {
			return fmt.Errorf("%s leads to %v, want two servers of each of %v: %v", vip, r.Backends, members, r.Errors)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// sample lets a pod of a make connections to a VIP, enough to meet each of a few servers.
func sample(ctx context.Context, vip netip.Addr) (report, error) {
	return client(podClient).run(ctx, "--connections", "40", "--timeout", "2s", "--url", "http://"+netip.AddrPortFrom(vip, 80).String())
}

// publish exports a Service from members, the first of them first, until the test ends. It returns the IPv4 VIP once
// all members import the Service from these.
func publish(t *testing.T, service string, members ...string) netip.Addr {
	t.Helper()
	ctx := t.Context()
	t.Cleanup(func() {
		for _, m := range members {
			if _, err := bed.Isthmusctl(context.WithoutCancel(ctx), m, "unexport", "service", service, "--namespace", namespace); err != nil {
				t.Error(err)
			}
		}
	})
	for _, m := range members {
		if _, err := bed.Isthmusctl(ctx, m, "export", "service", service, "--namespace", namespace); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range testbed.Members() {
		if err := serviceImportedFrom(ctx, m, service, strings.Join(members, " ")); err != nil {
			t.Fatal(err)
		}
	}
	addrs, err := vipsOf(ctx, service)
	if err != nil {
		t.Fatal(err)
	}
	return addrs[slices.IndexFunc(addrs, netip.Addr.Is4)]
}

// TestRollingUpdateLosesNothing: all servers of a Service in b are replaced while a pod of a makes 200 connections a
// second to it. They keep serving after they were told to end, as servers behind any load balancer must, and no connection
// fails. Ten seconds suffice on a machine that is as slow as it may be; at full length it is three.
func TestRollingUpdateLosesNothing(t *testing.T) {
	needBed(t)
	t.Parallel()
	times, preStop := 1, "10"
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		times, preStop = 10, "3"
	}
	vip := offer(t, "rolling", preStop, "b")
	for i := range times {
		r := replaceUnderLoad(t, "rolling", vip)
		if r.Failures != 0 || len(r.Backends) < 4 {
			t.Errorf("update %d of %d: %d of %d connections failed: %v; answered by %v", i+1, times, r.Failures, r.Connections, r.Errors, r.Backends)
		}
	}
}

// TestRollingUpdateOfImpatientServers is the same with servers that end at once: connections fail until a knows of the new
// ones, and none later. It says how many, and where.
func TestRollingUpdateOfImpatientServers(t *testing.T) {
	needBed(t)
	t.Parallel()
	vip := offer(t, "impatient", "0", "b")
	r := replaceUnderLoad(t, "impatient", vip)
	t.Logf("%d of %d connections failed: %v", r.Failures, r.Connections, r.Errors)
	if len(r.Backends) < 4 {
		t.Errorf("not all were replaced: answered by %v", r.Backends)
	}
}

// replaceUnderLoad restarts the Deployment of b behind vip and returns what became of the connections meanwhile.
func replaceUnderLoad(t *testing.T, name string, vip netip.Addr) report {
	t.Helper()
	s := flow(t, podClient, "--rate", "200", "--timeout", "3s", "--url", "http://"+netip.AddrPortFrom(vip, 80).String())
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error { // a may know one of the old servers only
		r, err := sample(ctx, vip)
		if err == nil && len(r.Backends) != 2 {
			err = fmt.Errorf("%s leads to %v, want 2 servers", vip, r.Backends)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	for _, args := range [][]string{
		{"rollout", "restart", "deployment/" + name},
		{"rollout", "status", "deployment/" + name, "--timeout", patience.String()},
	} {
		if _, err := bed.Kubectl(t.Context(), "b", append(args, "--namespace", namespace)...); err != nil {
			t.Error(err)
		}
	}
	// The rollout is over before the old pods are, and both before anybody else knows the new ones.
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := bed.Kubectl(ctx, "b", "get", "pods", "--selector", "app="+name, "--namespace", namespace, "--output", "name")
		if err != nil {
			return err
		}
		pods := strings.Fields(strings.ReplaceAll(said, "pod/", "b/"))
		slices.Sort(pods)
		if len(pods) != 2 {
			return fmt.Errorf("there are %v, want the 2 new ones", pods)
		}
		r, err := sample(ctx, vip)
		if err != nil {
			return err
		}
		if met := slices.Sorted(maps.Keys(r.Backends)); r.Failures > 0 || !slices.Equal(met, pods) {
			return fmt.Errorf("%s leads to %v, want %v: %v", vip, met, pods, r.Errors)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	served := time.Now()
	<-time.After(time.Second) // so that the flow meets a server that came last, too
	r, err := s.end()
	if err != nil {
		t.Error(err)
	}
	if r.LastFailure.After(served) {
		t.Errorf("a connection failed %v after the new servers were known", r.LastFailure.Sub(served))
	}
	return r
}

// TestClientsStay: with session affinity a pod meets one server of all clusters, over TCP and over UDP and on either
// path, and an agent that is started anew does not change that.
func TestClientsStay(t *testing.T) {
	needBed(t)
	for _, m := range testbed.Members() {
		sticky := behind("sticky", "{name: http, port: 80, targetPort: 8080}, {name: udp, port: 7, targetPort: 8081, protocol: UDP}")
		if err := bed.Apply(t.Context(), m, sticky); err != nil {
			t.Fatal(err)
		}
		patch(t, m, "service", "sticky", `{"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}}`)
	}
	vip := publish(t, "sticky", testbed.Members()...)
	http, udp := netip.AddrPortFrom(vip, 80).String(), netip.AddrPortFrom(vip, 7).String()
	before := map[string]report{}
	for path, c := range paths() {
		if err := answersOnce(t.Context(), c, "http://"+http); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		first, err := c.run(t.Context(), "--connections", "200", "--url", "http://"+http)
		if err != nil {
			t.Fatal(err)
		}
		if first.Failures > 0 || len(first.Backends) != 1 {
			t.Fatalf("%s, 200 connections: %d failed, answered by %v", path, first.Failures, first.Backends)
		}
		datagrams, err := c.run(t.Context(), "--connections", "50", "--udp", udp)
		if err != nil {
			t.Fatal(err)
		}
		if datagrams.Failures > 0 || len(datagrams.Backends) != 1 {
			t.Errorf("%s, 50 datagrams: %d failed, answered by %v", path, datagrams.Failures, datagrams.Backends)
		}
		before[path] = first
	}
	if err := bed.KillAgent(t.Context(), "a", clientNode); err != nil {
		t.Fatal(err)
	}
	if err := bed.ReviveAgent(t.Context(), "a", clientNode); err != nil {
		t.Fatal(err)
	}
	for path, c := range paths() {
		after, err := c.run(t.Context(), "--connections", "100", "--url", "http://"+http)
		if err != nil {
			t.Fatal(err)
		}
		for server := range after.Backends {
			if before[path].Backends[server] == 0 {
				t.Errorf("%s: after a restart of the agent %s answers, and it was %v before", path, server, before[path].Backends)
			}
		}
	}
}

// TestNobodyServes: a VIP whose servers are all gone refuses at once, and so do a port that it has not and an address
// of the ClusterSet without a Service, on either path. When servers come back, it serves.
func TestNobodyServes(t *testing.T) {
	needBed(t)
	t.Parallel()
	ctx := t.Context()
	vip := offer(t, "nobody", "0", "b")
	refused := func(where, protocol, target string) {
		t.Helper()
		for path, c := range paths() {
			if err := refuses(ctx, c, protocol, target); err != nil {
				t.Errorf("%s, %s: %v", where, path, err)
			}
		}
	}
	for _, protocol := range []string{"--tcp", "--udp"} {
		refused("a port that the Service has not", protocol, netip.AddrPortFrom(vip, 4444).String())
		refused("an address without a Service", protocol, "243.255.255.254:80")
	}
	scale := func(replicas string) {
		t.Helper()
		if _, err := bed.Kubectl(ctx, "b", "scale", "deployment/nobody", "--replicas", replicas, "--namespace", namespace); err != nil {
			t.Fatal(err)
		}
	}
	scale("0")
	refused("no servers", "--tcp", netip.AddrPortFrom(vip, 7).String())
	scale("2")
	err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		for path, c := range paths() {
			r, err := c.run(ctx, "--connections", "20", "--timeout", "2s", "--tcp", netip.AddrPortFrom(vip, 7).String())
			if err != nil {
				return err
			}
			if r.Failures > 0 {
				return fmt.Errorf("%s: servers are back, and %d of 20 connections fail: %v", path, r.Failures, r.Errors)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// answersOnce waits until a server answers at a URL.
func answersOnce(ctx context.Context, c client, url string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		r, err := c.run(ctx, "--connections", "1", "--timeout", "2s", "--url", url)
		if err == nil && r.Failures > 0 {
			err = fmt.Errorf("%v", r.Errors)
		}
		return err
	})
}

// refuses waits until every connection to a target ends with "connection refused". protocol is the client's flag.
func refuses(ctx context.Context, c client, protocol, target string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		r, err := c.run(ctx, "--connections", "20", "--timeout", "2s", protocol, target)
		if err != nil {
			return err
		}
		if r.Errors["connection refused"] != 20 {
			return fmt.Errorf("of 20 connections to %s %d failed, so: %v", target, r.Failures, r.Errors)
		}
		return nil
	})
}
