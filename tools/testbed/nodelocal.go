package testbed

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
)

// NodeLocalDNSAddress is where NodeLocal DNSCache answers, besides the address of the cluster's DNS.
const NodeLocalDNSAddress = "169.254.20.10"

//go:embed testdata/node-local-dns.yaml
var nodeLocalDNS string

// nodeLocalDNSNode does to a node what the program node-cache does besides being CoreDNS: the addresses stand on the
// node, and packets to and from them are neither tracked nor translated.
const nodeLocalDNSNode = `
ip address replace LOCAL/32 dev lo
ip address replace SERVICE/32 dev lo
nft -f - <<END
table ip nodelocaldns
delete table ip nodelocaldns
table ip nodelocaldns {
	chain prerouting {
		type filter hook prerouting priority raw
		ip daddr { LOCAL, SERVICE } notrack
		ip saddr { LOCAL, SERVICE } notrack
	}
	chain output {
		type filter hook output priority raw
		ip daddr { LOCAL, SERVICE } notrack
		ip saddr { LOCAL, SERVICE } notrack
	}
}
END`

// startNodeLocalDNS puts NodeLocal DNSCache on all nodes of a member, as its own manifest does: CoreDNS in the node's
// network, at an address of its own and at that of the cluster's DNS, which pods go on asking.
func (tb *Testbed) startNodeLocalDNS(ctx context.Context, member string) error {
	tb.Step("start NodeLocal DNSCache in %s", member)
	service, err := tb.Kubectl(ctx, member, "get", "service", "kube-dns", "--namespace", "kube-system", "--output", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return err
	}
	fill := strings.NewReplacer("LOCAL", NodeLocalDNSAddress, "SERVICE", service)
	if err := tb.Apply(ctx, member, nodeLocalDNSUpstream); err != nil {
		return err
	}
	upstream, err := tb.Kubectl(ctx, member, "get", "service", "kube-dns-upstream", "--namespace", "kube-system", "--output", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return err
	}
	nodes, err := tb.Kubectl(ctx, member, "get", "nodes", "--output", "jsonpath={.items[*].metadata.name}")
	if err != nil {
		return err
	}
	for node := range strings.FieldsSeq(nodes) {
		if _, err := tb.Node(ctx, node, "sh", "-ec", fill.Replace(nodeLocalDNSNode)); err != nil {
			return fmt.Errorf("prepare node %s: %w", node, err)
		}
	}
	if err := tb.Apply(ctx, member, strings.ReplaceAll(fill.Replace(nodeLocalDNS), "UPSTREAM", upstream)); err != nil {
		return err
	}
	_, err = tb.Kubectl(ctx, member, "rollout", "status", "daemonset/node-local-dns", "--namespace", "kube-system", "--timeout", "60s")
	return err
}

// nodeLocalDNSUpstream is CoreDNS under an address that is not NodeLocal DNSCache's.
const nodeLocalDNSUpstream = `
apiVersion: v1
kind: Service
metadata: {name: kube-dns-upstream, namespace: kube-system}
spec:
  selector: {k8s-app: kube-dns}
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
`
