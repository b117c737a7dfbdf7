package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/e2e/gateways"
	"github.com/isthmus-net/isthmus/e2e/testbed"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// outside is a Service for clients outside of the cluster, before servers of testdata/dataplane.yaml.
const outside = `
apiVersion: v1
kind: Service
metadata:
  name: outside
  namespace: road
  annotations: {gateway.isthmus.dev/floating-ip: allocate}
spec:
  type: LoadBalancer
  loadBalancerClass: isthmus.dev/gateway
  selector: {app: outside}
  ports: [{name: http, port: 80, targetPort: 8080}]
`

// TestGatewayDies: a Service gets a floating IP of a real Neutron, and a client behind a router downloads from it and makes
// connections beside that. The gateway that all of it goes through dies, after a server has been added; nothing breaks.
// When the Service goes, so does what was made for it.
func TestGatewayDies(t *testing.T) {
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
	g, err := gateways.Install(ctx, edge, bed.Lab, "a", t.TempDir(), desired.NFTables)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	servers := strings.NewReplacer("NAME", "outside", "CLUSTER_ID", "a", "PRE_STOP", "0").Replace(dataplaneWorkload)
	for _, manifest := range []string{servers, outside} { // which makes another Service of the servers' own
		if err := bed.Apply(ctx, "a", manifest); err != nil {
			t.Fatal(err)
		}
	}
	gone := func(ctx context.Context) error {
		_, err := bed.Kubectl(ctx, "a", "delete", "service/outside", "deployment/outside", "--namespace", namespace, "--ignore-not-found", "--timeout", "60s")
		return err
	}
	t.Cleanup(func() {
		if err := gone(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	url := "http://" + floatingIP(t).String()
	if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		_, err := g.FromClient(ctx, "curl", "-sS", "--max-time", "2", url)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	dieUnderTraffic(t, g, url)
	if err := gone(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := g.FromClient(ctx, "curl", "-sS", "--max-time", "1", url); err == nil {
		t.Error("the Service is gone, and its address answers")
	}
}

// floatingIP returns the address that the Service has got.
func floatingIP(t *testing.T) (addr netip.Addr) {
	t.Helper()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := bed.Kubectl(ctx, "a", "get", "service", "outside", "--namespace", namespace, "--output", "jsonpath={.status.loadBalancer.ingress[0].ip}")
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

// dieUnderTraffic lets the preferred gateway die in the middle of a download, beside other connections, after a change of
// servers.
func dieUnderTraffic(t *testing.T, g *gateways.Installation, url string) {
	t.Helper()
	ctx := t.Context()
	const seconds = 12
	var traffic errgroup.Group
	traffic.Go(func() error {
		said, err := g.FromClient(ctx, "curl", "-sS", "--max-time", "40", "--output", os.DevNull, "--write-out", "%{size_download} bytes in %{time_total} s",
			fmt.Sprintf("%s/stream?seconds=%d", url, seconds))
		t.Log("download: ", said)
		return err
	})
	traffic.Go(func() error {
		said, err := g.FromClient(ctx, bed.Lab.EchoProgram(), "client", "--url", url, "--rate", "100", "--concurrency", "50", "--timeout", "5s", "--duration", fmt.Sprintf("%ds", seconds))
		if err != nil {
			return err
		}
		r, err := readReport(said)
		if err == nil && r.Failures > 0 {
			err = fmt.Errorf("of %d connections %d failed: %v", r.Connections, r.Failures, r.Errors)
		}
		t.Logf("%d connections", r.Connections)
		return err
	})
	for _, args := range [][]string{{"scale", "deployment/outside", "--replicas", "3"}, {"rollout", "status", "deployment/outside", "--timeout", "60s"}} {
		if _, err := bed.Kubectl(ctx, "a", append(args, "--namespace", namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(g.Cut(0), g.Agents[0].Kill()); err != nil {
		t.Fatal(err)
	}
	if err := traffic.Wait(); err != nil {
		t.Error(err)
	}
	if !g.Agents[1].Runs() {
		t.Errorf("the other agent has ended:\n%s", g.Agents[1].Said())
	}
}
