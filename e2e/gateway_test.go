package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/neutron"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// outside is a Service for external clients, before servers of testdata/dataplane.yaml.
const outside = `
apiVersion: v1
kind: Service
metadata:
  name: outside
  namespace: e2e
  annotations: {gateway.isthmus.dev/floating-ip: allocate}
spec:
  type: LoadBalancer
  loadBalancerClass: isthmus.dev/gateway
  selector: {app: outside}
  ports: [{name: http, port: 80, targetPort: 8080}]
`

// TestGateways runs the tests of gateways one after the other, with one edge: a network outside of the lab with a real
// Neutron, a router and a client.
func TestGateways(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	edge, err := gateways.Up(ctx, gateways.Config{Lab: bed.Lab, Dir: t.TempDir(), Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := edge.Close(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	for _, balancer := range []desired.Balancer{desired.NFTables, desired.EBPF} {
		t.Run("gateway dies, "+string(balancer), func(t *testing.T) { gatewayDies(t, edge, dir, balancer) })
	}
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" { // it takes a quarter of an hour
		t.Run("operator's tour", func(t *testing.T) { operatorsTour(t, edge, t.TempDir()) })
	}
	t.Run("master dies", func(t *testing.T) { masterDies(t, edge, dir) })
	t.Run("gateway on node", gatewayOnNode)
}

// gatewayDies: a Service gets a floating IP of a real Neutron, and a client behind a router
// has connections to it: idle ones, downloads, uploads, and many short ones. After a server was added, the gateway with
// the traffic dies, and nothing breaks. The Service is also reached through node ports. Its address is the same after the
// controller, and Neutron, were killed while they allocated addresses for others. When it is deleted, Neutron has no
// object of it left.
func gatewayDies(t *testing.T, edge *gateways.Edge, dir string, balancer desired.Balancer) {
	t.Helper()
	ctx := t.Context()
	g, err := gateways.Install(ctx, edge, bed.Lab, "a", dir, balancer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(g.Close(), edge.Mend(0)); err != nil {
			t.Error(err)
		}
	})
	serve(t, "outside", outside)
	address := floatingIP(t, "outside")
	reached(t, g, address)
	if balancer == desired.NFTables { // the controller treats both alike
		controllerDies(t, g, address)
	}
	dieUnderTraffic(t, g, address)
	if balancer == desired.NFTables { // and so do nodes
		nodePorts(t, g, address)
	}
	if err := removeServed(ctx, "outside"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.FromClient(ctx, "curl", "-sS", "--max-time", "1", "http://"+address.String()); err == nil {
		t.Error("the Service was deleted, and its address answers")
	}
	has(t, g, "after the Service was deleted", gateways.Objects{})
}

// reached waits until an address answers the client.
func reached(t *testing.T, g *gateways.Installation, address netip.Addr) {
	t.Helper()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		_, err := g.FromClient(ctx, "curl", "-sS", "--max-time", "2", "http://"+address.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// says returns the address in a Service's status, "" for none.
func says(ctx context.Context, service string) (string, error) {
	return bed.Kubectl(ctx, "a", "get", "service", service, "--namespace", namespace, "--output", "jsonpath={.status.loadBalancer.ingress[0].ip}")
}

// floatingIP returns the address of a Service.
func floatingIP(t *testing.T, service string) (addr netip.Addr) {
	t.Helper()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := says(ctx, service)
		if err != nil {
			return err
		}
		if addr, err = netip.ParseAddr(said); err != nil || !gateways.External[0].Contains(addr) {
			return fmt.Errorf("the Service has the address %q", said)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return addr
}

// has verifies the number of our objects in Neutron.
func has(t *testing.T, g *gateways.Installation, when string, want gateways.Objects) {
	t.Helper()
	if is, err := g.Objects(t.Context()); err != nil || is != want {
		t.Errorf("%s Neutron has %+v of ours, %v, want %+v", when, is, err, want)
	}
}

// controllerDies kills the controller right after it created a port for a second Service, and Neutron right after it
// created one for a third. When both run again, each Service has one port and one floating IP, no others exist, and the
// first Service has kept its address. The other Services are deleted again.
func controllerDies(t *testing.T, g *gateways.Installation, address netip.Addr) {
	t.Helper()
	ctx := t.Context()
	want := gateways.Objects{Ports: 1, FloatingIPs: 1}
	has(t, g, "with one Service", want)
	dying := []death{
		{"second", func() error { return g.Controller.Kill() }, func() error { return g.StartController(ctx) }},
		{"third", func() error { return g.Cloud.Kill(ctx, neutron.Neutron) }, func() error { return g.Cloud.Start(ctx, neutron.Neutron) }},
	}
	for _, d := range dying {
		t.Cleanup(func() {
			if err := dismiss(context.WithoutCancel(ctx), d.service); err != nil {
				t.Error(err)
			}
		})
		tries := 1
		for ; !whileItWorks(t, g, d, want.Ports); tries++ {
			if err := dismiss(ctx, d.service); err != nil || tries == 3 {
				t.Fatalf("%d times it was done before it was killed; %v", tries, err)
			}
		}
		began := time.Now()
		reached(t, g, floatingIP(t, d.service))
		t.Logf("%s answers %s after the restart, killed at try %d", d.service, time.Since(began).Round(time.Second), tries)
		want.Ports, want.FloatingIPs = want.Ports+1, want.FloatingIPs+1
		has(t, g, "with another Service", want)
		if is := floatingIP(t, "outside"); is != address {
			t.Errorf("the first Service was reached at %s, and is at %s", address, is)
		}
	}
	for _, d := range dying {
		if err := dismiss(ctx, d.service); err != nil {
			t.Fatal(err)
		}
	}
	has(t, g, "with one Service again", gateways.Objects{Ports: 1, FloatingIPs: 1})
	reached(t, g, address)
}

// death is a program that is killed while it works on a Service, and restarted.
type death struct {
	service     string
	kill, start func() error
}

// whileItWorks creates the Service, kills the program as soon as Neutron has another port, and restarts it. It reports
// whether the Service had no address yet.
func whileItWorks(t *testing.T, g *gateways.Installation, d death, had int) bool {
	t.Helper()
	ctx := t.Context()
	if err := bed.Apply(ctx, "a", strings.Replace(outside, "name: outside", "name: "+d.service, 1)); err != nil {
		t.Fatal(err)
	}
	if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		now, err := g.Objects(ctx)
		if err == nil && now.Ports == had {
			err = fmt.Errorf("Neutron has %+v", now)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := d.kill(); err != nil {
		t.Fatal(err)
	}
	said, err := says(ctx, d.service)
	if err := errors.Join(err, d.start()); err != nil {
		t.Fatal(err)
	}
	return said == ""
}

// dismiss deletes a Service and waits for that.
func dismiss(ctx context.Context, service string) error {
	_, err := bed.Kubectl(ctx, "a", "delete", "service", service, "--namespace", namespace, "--ignore-not-found", "--timeout", patience.String())
	return err
}

// dieUnderTraffic kills the preferred gateway under open connections, after a change of servers.
func dieUnderTraffic(t *testing.T, g *gateways.Installation, address netip.Addr) {
	t.Helper()
	ctx := t.Context()
	const some = 8 // open connections of each kind
	open, err := g.Open(ctx, address, some)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	short := flow(t, edgeClient(g), "--url", "http://"+address.String(), "--rate", "100", "--concurrency", "50")
	for _, args := range [][]string{{"scale", "deployment/outside", "--replicas", "3"}, {"rollout", "status", "deployment/outside", "--timeout", patience.String()}} {
		if _, err := bed.Kubectl(ctx, "a", append(args, "--namespace", namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	cut := g.Cut(0)
	death := time.Now() // cutting takes a moment on a busy machine
	if err := errors.Join(cut, g.Agents[0].Kill()); err != nil {
		t.Fatal(err)
	}
	if err := open.GoOn(time.Now(), patience); err != nil {
		t.Error(err)
	}
	r, err := short.end()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d short connections, %d lost", r.Connections, r.Failures)
	if err := gateways.OnlyYoung(r.Failures, r.FirstFailure, r.LastFailure, death); err != nil {
		t.Error(err)
	}
	if !g.Agents[1].Runs() {
		t.Errorf("the other agent has ended:\n%s", g.Agents[1].Log())
	}
}

// nodePorts reaches the Service through node ports, with externalTrafficPolicy Local. When a node's kube-proxy ends, its
// rules stay and its Node stays ready, but its health check port no longer answers: new connections go to the other
// nodes.
func nodePorts(t *testing.T, g *gateways.Installation, address netip.Addr) {
	t.Helper()
	ctx := t.Context()
	patch(t, "a", "service", "outside", `{"metadata": {"annotations": {"gateway.isthmus.dev/backends": "nodeports"}}, "spec": {"externalTrafficPolicy": "Local"}}`)
	said, err := bed.Kubectl(ctx, "a", "get", "pods", "--namespace", namespace, "--selector", "app=outside", "--output", `jsonpath={range .items[*]}{.spec.nodeName} a/{.metadata.name}{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	on := map[string][]string{} // by node
	for line := range strings.Lines(said) {
		node, pod, _ := strings.Cut(strings.TrimSpace(line), " ")
		on[node] = append(on[node], pod)
	}
	if len(on) != 2 {
		t.Fatalf("the servers are on %v, want two nodes", on)
	}
	answer := func(nodes ...string) {
		t.Helper()
		var want []string
		for _, n := range nodes {
			want = append(want, on[n]...)
		}
		slices.Sort(want)
		began := time.Now()
		if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
			r, err := edgeClient(g).run(ctx, "--connections", "60", "--timeout", "2s", "--url", "http://"+address.String())
			if err != nil {
				return err
			}
			if have := slices.Sorted(maps.Keys(r.Backends)); r.Failures > 0 || !slices.Equal(have, want) {
				return fmt.Errorf("answers from %v, want %v: %v", have, want, r.Errors)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		t.Logf("node ports of %v after %s", nodes, time.Since(began).Round(time.Second))
	}
	answer("a1", "a2")
	if err := bed.Lab.Stop(ctx, "a1", "kube-proxy"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bed.Lab.Start(context.WithoutCancel(ctx), "a1", "kube-proxy"); err != nil {
			t.Error(err)
		}
	})
	answer("a2")
	if err := bed.Lab.Start(ctx, "a1", "kube-proxy"); err != nil {
		t.Fatal(err)
	}
	answer("a1", "a2")
}

// edgeClient is the echo client in the network of the edge's client.
func edgeClient(g *gateways.Installation) client {
	return func(ctx context.Context, args ...string) (*exec.Cmd, error) {
		return exec.CommandContext(ctx, "nsenter", slices.Concat([]string{"--net=" + g.Client.Path(), bed.Lab.EchoProgram(), "client"}, args)...), nil
	}
}
