package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// onNodes are the chart's values for the controller and a gateway on a node. Other gateways of the cluster are in other
// groups.
const onNodes = `
gateway:
  enabled: true
  cluster: nodes
gatewayController:
  enabled: true
  settings:
    cluster: nodes
    pools: [{name: nodes, group: nodes, announce: vrrp, return: masquerade, addresses: [10.200.0.240/29]}]
`

const noneOnNodes = "gateway: {enabled: false}\ngatewayController: {enabled: false}\n"

// nodeAndService are node a1 as a gateway, and a Service whose servers, of testdata/dataplane.yaml, run on the other node.
// The peer's address is unused.
const nodeAndService = `
apiVersion: gateway.isthmus.dev/v1alpha1
kind: GatewayNode
metadata: {name: a1}
spec:
  url: https://10.200.0.11:9479
  group: nodes
  balancer: ebpf
  vrrp: {interface: eth0, source: 10.200.0.11, peers: [10.200.0.239], routerID: 52, priority: 100}
---
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

// gatewayOnNode installs gateways by the chart, as in docs/gateway-install.md: a node becomes a gateway, with the
// image, the certificates and the few privileges that it gets there. The node answers at the address of a Service. It
// answers again after its pod was replaced. When the DaemonSet is deleted, the node no longer has the address.
func gatewayOnNode(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	if err := bed.LoadImages(ctx, "gateway", "gateway-controller"); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Isthmusctl(ctx, "a", "gateway", "certs", "--dir", t.TempDir(), "--gateway", "a1",
		"--secret", "isthmus-gateway-certs", "--gateways-secret", "isthmus-gateways", "-n", testbed.Namespace); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		_, services := bed.Kubectl(ctx, "a", "delete", "service/onnode", "deployment/onnode", "--namespace", namespace, "--ignore-not-found", "--timeout", "60s")
		_, nodes := bed.Kubectl(ctx, "a", "delete", "gatewaynode", "a1", "--ignore-not-found", "--timeout", "60s")
		_, label := bed.Kubectl(ctx, "a", "label", "node", "a1", "isthmus.dev/gateway-")
		if err := errors.Join(services, nodes, bed.SetValues(ctx, "a", noneOnNodes), label); err != nil {
			t.Error(err)
		}
	})
	if _, err := bed.Kubectl(ctx, "a", "label", "node", "a1", "isthmus.dev/gateway=", "--overwrite"); err != nil {
		t.Fatal(err)
	}
	if err := bed.SetValues(ctx, "a", onNodes); err != nil {
		t.Fatal(err)
	}
	servers := strings.NewReplacer("NAME", "onnode", "CLUSTER_ID", "a", "PRE_STOP", "0", "    spec:\n", "    spec:\n      nodeName: a2\n").Replace(dataplaneWorkload)
	for _, manifest := range []string{servers, nodeAndService} { // it creates another Service of the servers
		if err := bed.Apply(ctx, "a", manifest); err != nil {
			t.Fatal(err)
		}
	}
	vip := onNodeAnswers(t)
	pod := func(args ...string) {
		t.Helper()
		if _, err := bed.Kubectl(ctx, "a", append(args, "--namespace", testbed.Namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	pod("delete", "pod", "--selector", "app.kubernetes.io/name=isthmus-gateway", "--timeout", "60s")
	pod("rollout", "status", "daemonset/isthmus-gateway", "--timeout", "90s")
	if again := onNodeAnswers(t); again != vip {
		t.Errorf("it had %s and has %s", vip, again)
	}
	pod("delete", "daemonset", "isthmus-gateway", "--cascade=foreground", "--timeout", "60s")
	if has, err := nodeHas(ctx, vip); err != nil || has {
		t.Errorf("no gateway runs, and the node has %s: %t, %v", vip, has, err)
	}
}

// onNodeAnswers returns the Service's address when the node has it and it answers.
func onNodeAnswers(t *testing.T) (vip netip.Addr) {
	t.Helper()
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		said, err := bed.Kubectl(ctx, "a", "get", "service", "onnode", "--namespace", namespace, "--output", "jsonpath={.status.loadBalancer.ingress[0].ip}")
		if err != nil {
			return err
		}
		if vip, err = netip.ParseAddr(said); err != nil {
			return fmt.Errorf("the Service has the address %q", said)
		}
		if has, err := nodeHas(ctx, vip); err != nil || !has {
			return errors.Join(err, fmt.Errorf("node a1 does not have %s", vip))
		}
		_, err = process.Output(bed.Lab.FabricCommand(ctx, "curl", "-sS", "--max-time", "2", "http://"+vip.String()))
		return err
	}); err != nil {
		logs, _ := bed.Kubectl(t.Context(), "a", "logs", "--namespace", testbed.Namespace, "--selector", "app.kubernetes.io/name in (isthmus-gateway, isthmus-gateway-controller)", "--prefix", "--tail", "15")
		nodes, _ := bed.Kubectl(t.Context(), "a", "describe", "gatewaynode", "a1")
		t.Fatalf("%v\n%s\n%s", err, logs, nodes)
	}
	return vip
}

// nodeHas reports whether the node's device has an address.
func nodeHas(ctx context.Context, vip netip.Addr) (bool, error) {
	said, err := bed.Node(ctx, "a1", "ip", "-o", "address", "show", "dev", "eth0")
	return strings.Contains(said, " "+vip.String()+"/"), err
}
