package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// onNodes are the chart's values for the controller and a gateway on a node. Other gateways of the cluster are in other
// groups.
const onNodes = `
gateway:
  enabled: true
  cluster: nodes
  minReadySeconds: READY
gatewayController:
  enabled: true
  settings:
    cluster: nodes
    pools: [{name: nodes, group: nodes, announce: vrrp, return: snat, addresses: [10.200.0.240/29]}]
`

const noneOnNodes = "gateway: {enabled: false}\ngatewayController: {enabled: false}\n"

// gatewayNode is a node as a gateway.
const gatewayNode = `
apiVersion: gateway.isthmus.dev/v1alpha1
kind: GatewayNode
metadata: {name: NAME}
spec:
  url: https://ADDRESS:9479
  group: nodes
  balancer: ebpf
  vrrp: {interface: eth0, source: ADDRESS, peers: [PEER], routerID: 52, priority: 100}
`

// onNode is a Service before servers of testdata/dataplane.yaml.
const onNode = `
apiVersion: v1
kind: Service
metadata:
  name: onnode
  namespace: e2e
spec:
  type: LoadBalancer
  loadBalancerClass: isthmus.dev/gateway
  selector: {app: onnode}
  ports: [{name: http, port: 80, targetPort: 8080}]
`

// gatewaysOnNodes installs gateways by the chart, as in docs/gateway-install.md: one or two nodes of a become gateways, with the
// image, the certificates and the few privileges that they get there. The test's end removes them.
func gatewaysOnNodes(t *testing.T, nodes ...string) {
	t.Helper()
	ctx := t.Context()
	if err := bed.LoadImages(ctx, "gateway", "gateway-controller"); err != nil {
		t.Fatal(err)
	}
	certs := []string{"gateway", "certs", "--dir", t.TempDir(), "--secret", "isthmus-gateway-certs", "--gateways-secret", "isthmus-gateways", "-n", testbed.Namespace}
	for _, node := range nodes {
		certs = append(certs, "--gateway", node)
	}
	if _, err := bed.Isthmusctl(ctx, "a", certs...); err != nil {
		t.Fatal(err)
	}
	of := func(verb string, args ...string) []string {
		return slices.Concat([]string{verb}, args[:1], nodes, args[1:])
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		_, gone := bed.Kubectl(ctx, "a", of("delete", "gatewaynode", "--ignore-not-found", "--timeout", patience.String())...)
		_, label := bed.Kubectl(ctx, "a", of("label", "node", "isthmus.dev/gateway-")...)
		if err := errors.Join(gone, bed.SetValues(ctx, "a", noneOnNodes), label); err != nil {
			t.Error(err)
		}
	})
	if _, err := bed.Kubectl(ctx, "a", of("label", "node", "isthmus.dev/gateway=", "--overwrite")...); err != nil {
		t.Fatal(err)
	}
	ready := "5" // longer than a backup of VRRP waits for its master; the default also suits routers with BFD
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		ready = "15"
	}
	if err := bed.SetValues(ctx, "a", strings.ReplaceAll(onNodes, "READY", ready)); err != nil {
		t.Fatal(err)
	}
	peer := "10.200.0.239" // unused
	for _, name := range nodes {
		all := clusterOf(t, "a").Nodes
		address := all[slices.IndexFunc(all, func(n topology.Node) bool { return n.Name == name })].IPv4.String()
		if other := slices.IndexFunc(all, func(n topology.Node) bool { return n.Name != name && slices.Contains(nodes, n.Name) }); other >= 0 {
			peer = all[other].IPv4.String()
		}
		if err := bed.Apply(ctx, "a", strings.NewReplacer("NAME", name, "ADDRESS", address, "PEER", peer).Replace(gatewayNode)); err != nil {
			t.Fatal(err)
		}
	}
}

// gatewayOnNode: node a1 is a gateway, and answers at the address of a Service whose servers run on the other node. It
// answers again after its pod was replaced. When the DaemonSet is deleted, the node no longer has the address.
func gatewayOnNode(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	gatewaysOnNodes(t, "a1")
	serve(t, "onnode", onNode, "    spec:\n", "    spec:\n      nodeName: a2\n")
	vip := answersOn(t, "onnode", "a1")
	pod := func(args ...string) {
		t.Helper()
		if _, err := bed.Kubectl(ctx, "a", append(args, "--namespace", testbed.Namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	pod("delete", "pod", "--selector", "app.kubernetes.io/name=isthmus-gateway", "--timeout", patience.String())
	pod("rollout", "status", "daemonset/isthmus-gateway", "--timeout", patience.String())
	if again := answersOn(t, "onnode", "a1"); again != vip {
		t.Errorf("it had %s and has %s", vip, again)
	}
	pod("delete", "daemonset", "isthmus-gateway", "--cascade=foreground", "--timeout", patience.String())
	if has, err := nodeHas(ctx, "a1", vip); err != nil || has {
		t.Errorf("no gateway runs, and the node has %s: %t, %v", vip, has, err)
	}
}

// answersOn returns a Service's address when one of the gateways, nodes of a, has it and it answers.
func answersOn(t *testing.T, service string, gateways ...string) (vip netip.Addr) {
	t.Helper()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := says(ctx, service)
		if err != nil {
			return err
		}
		if vip, err = netip.ParseAddr(said); err != nil {
			return fmt.Errorf("the Service has the address %q", said)
		}
		have := 0
		for _, node := range gateways {
			has, err := nodeHas(ctx, node, vip)
			if err != nil {
				return err
			}
			if has {
				have++
			}
		}
		if have != 1 {
			return fmt.Errorf("%d nodes of %v have %s", have, gateways, vip)
		}
		_, err = process.Output(bed.Lab.FabricCommand(ctx, "curl", "-sS", "--max-time", "2", "http://"+vip.String()))
		return err
	}); err != nil {
		logs, _ := bed.Kubectl(t.Context(), "a", "logs", "--namespace", testbed.Namespace, "--selector", "app.kubernetes.io/name in (isthmus-gateway, isthmus-gateway-controller)", "--prefix", "--tail", "15")
		nodes, _ := bed.Kubectl(t.Context(), "a", "describe", "gatewaynodes")
		t.Fatalf("%v\n%s\n%s", err, logs, nodes)
	}
	return vip
}

// nodeHas reports whether a node's device has an address.
func nodeHas(ctx context.Context, node string, vip netip.Addr) (bool, error) {
	said, err := bed.Node(ctx, node, "ip", "-o", "address", "show", "dev", "eth0")
	return strings.Contains(said, " "+vip.String()+"/"), err
}
