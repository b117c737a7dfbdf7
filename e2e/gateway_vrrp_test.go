package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// shared is a Service whose address gateways share by VRRP, before servers of testdata/dataplane.yaml.
const shared = `
apiVersion: v1
kind: Service
metadata:
  name: shared
  namespace: e2e
  annotations: {gateway.isthmus.dev/pool: shared}
spec:
  type: LoadBalancer
  loadBalancerClass: isthmus.dev/gateway
  selector: {app: shared}
  ports: [{name: http, port: 80, targetPort: 8080}]
`

// masterDies gives a Service an address of the gateways' own network, from a real Neutron. No router learns a route:
// the VRRP master has the address and answers ARP for it. The master dies under open connections, and the other gateway
// takes the address and continues them.
func masterDies(t *testing.T, e *gateways.Edge, dir string) {
	t.Helper()
	ctx := t.Context()
	g, err := gateways.Install(ctx, e, bed.Lab, "a", dir, desired.NFTables)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(g.Close(), e.Mend(0)); err != nil {
			t.Error(err)
		}
	})
	serve(t, "shared", shared)
	vip := sharedAddress(t, g)
	killMaster(t, g, vip)
}

// sharedAddress returns the Service's address when the first gateway has it and answers for it.
func sharedAddress(t *testing.T, g *gateways.Installation) (vip netip.Addr) {
	t.Helper()
	network := netip.PrefixFrom(edge.Router[0], 24).Masked()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := bed.Kubectl(ctx, "a", "get", "service", "shared", "--namespace", namespace, "--output", "jsonpath={.status.loadBalancer.ingress[0].ip}")
		if err != nil {
			return err
		}
		if vip, err = netip.ParseAddr(said); err != nil || !network.Contains(vip) {
			return fmt.Errorf("the Service has the address %q", said)
		}
		if err := masterIs(g, vip, 0); err != nil {
			return err
		}
		_, err = g.FromClient(ctx, "curl", "-sS", "--max-time", "2", "http://"+vip.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	routes, err := g.Router.Routes(t.Context(), vip)
	if err != nil {
		t.Fatal(err)
	}
	if len(routes) > 0 {
		t.Errorf("%s is announced by VRRP, and the router has a route to it, too: %v", vip, routes)
	}
	return vip
}

// masterIs returns an error unless a gateway has an address and the other one does not.
func masterIs(g *gateways.Installation, vip netip.Addr, gateway int) error {
	for i := range g.Agents {
		has, err := g.Has(i, vip)
		if err != nil {
			return err
		}
		if has != (i == gateway) {
			return fmt.Errorf("%s has %s: %t", gateways.Name(i), vip, has)
		}
	}
	return nil
}

// killMaster kills the master under open connections.
func killMaster(t *testing.T, g *gateways.Installation, vip netip.Addr) {
	t.Helper()
	ctx := t.Context()
	const some = 8 // open connections of each kind
	open, err := g.Open(ctx, vip, some)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	short := flow(t, edgeClient(g), "--url", "http://"+vip.String(), "--rate", "100", "--concurrency", "50")
	cut := g.Cut(0)
	death := time.Now() // cutting takes a moment on a busy machine
	if err := errors.Join(cut, g.Agents[0].Kill()); err != nil {
		t.Fatal(err)
	}
	if err := open.GoOn(time.Now(), patience); err != nil {
		t.Error(err)
	}
	has, err := g.Has(1, vip)
	if err != nil || !has {
		t.Errorf("the other gateway has %s: %t, %v", vip, has, err)
	}
	r, err := short.end()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d open connections: all continue; %d short ones, %d lost", 3*some, r.Connections, r.Failures)
	if err := gateways.OnlyYoung(r.Failures, r.FirstFailure, r.LastFailure, death); err != nil {
		t.Error(err)
	}
}
