package e2e

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// TestDeclinedAddress: b exports a Service that declines a ClusterSetIP. Where the network routes b's Service CIDRs, its name leads
// clients of a to the ClusterIPs that it has in b, and from there to its pods.
func TestDeclinedAddress(t *testing.T) {
	needBed(t)
	t.Parallel()
	ctx := t.Context()
	routeServices(t, "a", "b")
	export := `
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: declined, namespace: ` + namespace + `, annotations: {` + v1alpha1.AnnotationUseClusterSetIP + `: "false"}}
`
	if err := bed.Apply(ctx, "b", behind("declined", ports42)+"---"+export); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := bed.Kubectl(context.WithoutCancel(ctx), "b", "delete", "serviceexport/declined", "service/declined", "--namespace", namespace); err != nil {
			t.Error(err)
		}
	})
	for _, m := range testbed.Members() {
		leadsToClusterIPs(t, m, "b", "declined")
	}
	for _, m := range testbed.Members() {
		answers(t, m, "b", "--tcp", fqdn("declined", 42))
		answers(t, m, "b", "--udp", fqdn("declined", 42))
	}
}

// clusterIPs returns the ClusterIPs of a member's Service, in the order of strings.
func clusterIPs(t *testing.T, member, service string) []string {
	t.Helper()
	said, err := bed.Kubectl(t.Context(), member, "get", "service", service, "--namespace", namespace, "--output", "jsonpath={.spec.clusterIPs[*]}")
	if err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(strings.FieldsSeq(said))
}

// leadsToClusterIPs checks that a Service without a VIP, exported by exporter alone, has exporter's ClusterIPs in member's DNS.
func leadsToClusterIPs(t *testing.T, member, exporter, service string) {
	t.Helper()
	for _, text := range clusterIPs(t, exporter, service) {
		qtype := "A"
		if netip.MustParseAddr(text).Is6() {
			qtype = "AAAA"
		}
		resolvesTo(t, member, qtype, service+"."+namespace+".svc.clusterset.local", text)
	}
}

// routeServices routes the Service CIDRs of one cluster through its first node, from the nodes of another one, until the test ends.
func routeServices(t *testing.T, from, to string) {
	t.Helper()
	target := clusterOf(t, to)
	via := map[bool]netip.Addr{true: target.Nodes[0].IPv4, false: target.Nodes[0].IPv6}
	for _, cidr := range target.ServiceCIDRs() {
		for _, node := range clusterOf(t, from).Nodes {
			route := []string{cidr.String(), "via", via[cidr.Addr().Is4()].String()}
			if _, err := bed.Node(t.Context(), node.Name, append([]string{"ip", "route", "add"}, route...)...); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := bed.Node(context.WithoutCancel(t.Context()), node.Name, append([]string{"ip", "route", "del"}, route...)...); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
