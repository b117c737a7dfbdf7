package e2e

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/shoppers.yaml
var shoppers string

//go:embed testdata/vault-policy.yaml
var vaultPolicy string

// kubeRouter starts the firewall of kube-router on the nodes of a and b until the test ends. Without a built kube-router it starts none, and
// returns false (make test-policies builds it).
func kubeRouter(t *testing.T) bool {
	t.Helper()
	program, ok := bed.Lab.Built(cluster.KubeRouter)
	if !ok {
		t.Logf("%s is not built, so nobody judges packets by policies; make test-policies builds it", cluster.KubeRouter)
		return false
	}
	ctx := context.WithoutCancel(t.Context())
	for _, m := range testbed.Members() {
		c := clusterOf(t, m)
		for _, node := range c.Nodes {
			t.Cleanup(func() {
				if out, err := bed.Node(ctx, node.Name, "sh", "-c", withoutKubeRouter); err != nil {
					t.Errorf("rules of kube-router on %s stay: %v\n%s", node.Name, err, out)
				}
			})
			background(t, "kube-router on "+node.Name, bed.Lab.NodeCommand(ctx, node.Name, program, "--kubeconfig", bed.Lab.Kubeconfig(m), "--hostname-override", node.Name,
				"--run-firewall", "--run-router=false", "--run-service-proxy=false", "--run-loadbalancer=false", "--enable-cni=false", "--health-port=0",
				"--service-cluster-ip-range", c.ServiceCIDRs()[0].String(), "--iptables-sync-period", "1m"))
		}
	}
	return true
}

// withoutKubeRouter removes the rules and sets of kube-router's firewall. Its own --cleanup-config needs IPVS.
const withoutKubeRouter = `
for hook in INPUT FORWARD OUTPUT; do
	iptables -w -S $hook | sed -n "s/^-A \($hook .*KUBE-ROUTER.*\)/\1/p" | while read rule; do eval "iptables -w -D $rule"; done
done
chains=$(iptables -w -S | sed -n 's/^-N \(KUBE-\(ROUTER\|NWPLCY\|POD-FW\)[^ ]*\)$/\1/p')
for c in $chains; do iptables -w -F $c; done
for c in $chains; do iptables -w -X $c; done
ipset list -n | grep '^\(inet6:\)\?\(KUBE-\|kube-router\)' | while read s; do ipset destroy $s; done
if { iptables -w -S; ipset list -n; } | grep -i 'kube-\(router\|nwplcy\|pod-fw\|src\|dst\)'; then exit 1; fi
`

// answeredByNobody waits until no connection of a client succeeds.
func answeredByNobody(ctx context.Context, c client, target string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		r, err := c.run(ctx, "--connections", "12", "--concurrency", "12", "--timeout", "2s", "--url", target)
		if err == nil && r.Failures < r.Connections {
			err = fmt.Errorf("%s is answered by %v", target, r.Backends)
		}
		return err
	})
}

// policiesHold: federated policies whose peers are federated Services admit and drop packets between a and b, as kube-router judges them.
func policiesHold(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, m := range testbed.Members() {
		manifest := strings.NewReplacer("CLUSTER_ID", m, "CLIENT_NODE", clientNodes[m]).Replace(shoppers)
		t.Cleanup(func() {
			if err := deleteAll(context.WithoutCancel(ctx), m, manifest); err != nil {
				t.Error(err)
			}
		})
		if err := bed.Apply(ctx, m, manifest); err != nil {
			t.Fatal(err)
		}
	}
	vault, elsewhere := map[string]string{}, map[string]string{}
	for _, m := range testbed.Members() {
		vault[m], elsewhere[m] = "http://"+federatedIP(t, m, namespace, "vault"), "http://"+federatedIP(t, m, testbed.Namespace, "pods")
	}
	reached := func(when string, c client, target string, by ...string) {
		t.Helper()
		err := answeredByNobody
		if len(by) > 0 {
			err = func(ctx context.Context, c client, target string) error {
				return answeredBy(ctx, c, "--url", target, by...)
			}
		}
		if err := err(ctx, c, target); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	for _, m := range testbed.Members() {
		reached("before the policies a shopper in "+m, in(m, "shopper"), vault[m], testbed.Members()...)
		reached("before the policies a shopper in "+m, in(m, "shopper"), elsewhere[m], everywhere...)
		reached("before the policies another client in "+m, clientIn(m), vault[m], testbed.Members()...)
	}

	if err := bed.Apply(ctx, testbed.Guest, vaultPolicy); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, m := range everywhere {
			if _, err := bed.Kubectl(context.WithoutCancel(ctx), m, "delete", "--ignore-not-found", "networkpolicy", "shoppers", "vaults", "--namespace", namespace); err != nil {
				t.Error(err)
			}
		}
	})
	for _, m := range testbed.Members() {
		reached("another client in "+m, clientIn(m), vault[m])
		reached("a shopper, elsewhere, in "+m, in(m, "shopper"), elsewhere[m])
		reached("a shopper in "+m, in(m, "shopper"), vault[m], testbed.Members()...)
		reached("a shopper, to the machine, in "+m, in(m, "shopper"), "http://"+federatedIP(t, m, namespace, "machine"), "machine")
		reached("another client, elsewhere, in "+m, clientIn(m), elsewhere[m], everywhere...)
	}

	// A shopper with a new address.
	if _, err := bed.Kubectl(ctx, "a", "delete", "pod", "shopper", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	if err := bed.Apply(ctx, "a", strings.NewReplacer("CLUSTER_ID", "a", "CLIENT_NODE", clientNodes["a"]).Replace(shoppers)); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Kubectl(ctx, "a", "wait", "pod/shopper", "--for", "condition=Ready", "--namespace", namespace, "--timeout", patience.String()); err != nil {
		t.Fatal(err)
	}
	reached("the next shopper in a", in("a", "shopper"), vault["a"], testbed.Members()...)

	// The copy in b is removed, and the policy goes everywhere.
	if _, err := bed.Kubectl(ctx, "b", "delete", "networkpolicy", "vaults", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	for _, m := range testbed.Members() {
		reached("after its removal in b another client in "+m, clientIn(m), vault[m], testbed.Members()...)
	}
}

// federatedIP returns the ClusterIP of a federated Service in a cluster, once it is there.
func federatedIP(t *testing.T, member, namespace, name string) string {
	t.Helper()
	var svc corev1.Service
	if err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		return bed.Get(ctx, member, "/api/v1/namespaces/"+namespace+"/services/"+name, &svc)
	}); err != nil {
		t.Fatal(err)
	}
	return svc.Spec.ClusterIP
}
