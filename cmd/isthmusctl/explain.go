package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

func explainCommand() *cobra.Command {
	var t target
	var namespace, format string
	var nodes []string
	cmd := &cobra.Command{
		Use:   "explain SERVICE",
		Short: "Follow a Service from its export to every node, and name the first fault",
		Long: `Follow a Service from its export to every node: its export from and import into this cluster, its ClusterSetIP and
endpoints, and for every node its DNS name, its ClusterSetIP in the kernel, and the backends of new connections. The
command names the first broken link of this chain with the remedy. The exit code is 0 if all links are fine, and 1 if
one is broken. Links of a node are shown only where they are broken.

SERVICE is NAME.NAMESPACE, NAMESPACE/NAME, a name of clusterset.local, or a ClusterSetIP. The command needs the
rights to read workloads and Services, to reach pods through the API server (get pods/proxy) and to create a token of
ServiceAccount isthmus-observer, in the namespace of Isthmus.`,
		Example: `  isthmusctl explain hello.demo
  isthmusctl explain hello.demo.svc.clusterset.local --node worker-1
  isthmusctl explain 243.0.0.5 -o json`,
		Args: oneArgument("explain", "the Service"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			service, err := parseService(args[0])
			if err != nil {
				return err
			}
			c, err := t.collector(namespace)
			if err != nil {
				return err
			}
			x, err := c.explain(cmd.Context(), service, nodes)
			if err != nil {
				return err
			}
			if format == "json" {
				return errors.Join(writeJSON(cmd.OutOrStdout(), x), x.err())
			}
			return errors.Join(x.writeText(cmd.OutOrStdout()), x.err())
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVarP(&format, "output", "o", "text", "text or json")
	f.StringSliceVar(&nodes, "node", nil, "node to query, repeatable (default: all)")
	return cmd
}

// serviceRef refers to a Service by its key, or by an address.
type serviceRef struct {
	key client.ObjectKey
	vip netip.Addr
}

// parseService parses a reference to a Service.
func parseService(text string) (serviceRef, error) {
	if vip, err := netip.ParseAddr(text); err == nil {
		return serviceRef{vip: vip.Unmap()}, nil
	}
	var n serviceRef
	if namespace, name, ok := strings.Cut(text, "/"); ok {
		n.key = client.ObjectKey{Namespace: namespace, Name: name}
	} else {
		labels := strings.Split(text, ".")
		if full, ok := strings.CutSuffix(strings.TrimSuffix(text, "."), ".svc.clusterset.local"); ok {
			labels = strings.Split(full, ".")
			labels = labels[max(0, len(labels)-2):] // a cluster, and a host or a port, may precede it
		}
		if len(labels) != 2 {
			return n, fmt.Errorf("%q is not a Service; use NAME.NAMESPACE, NAMESPACE/NAME, a name of clusterset.local or an address", text)
		}
		n.key = client.ObjectKey{Namespace: labels[1], Name: labels[0]}
	}
	return n, checkNames(n.key)
}

// chain is the result of explain, as printed by -o json and, in another form, as text.
type chain struct {
	Service string `json:"service"` // namespace/name
	Cluster string `json:"cluster,omitempty"`
	OK      bool   `json:"ok"`
	// Broken is the first broken link, and BrokenOn its node, if it is a link of a node.
	Broken   *status.Link  `json:"broken,omitempty"`
	BrokenOn string        `json:"brokenOn,omitempty"`
	Links    []status.Link `json:"links"` // of the cluster
	Nodes    []nodeChain   `json:"nodes,omitempty"`
}

// nodeChain is the part of one node.
type nodeChain struct {
	Node        string              `json:"node"`
	Links       []status.Link       `json:"links"`
	Explanation *status.Explanation `json:"explanation,omitempty"` // nil if the agent does not answer
}

// explain follows a Service through the cluster and the named nodes, or all nodes if none is named.
func (c *collector) explain(ctx context.Context, n serviceRef, nodes []string) (*chain, error) {
	if n.vip.IsValid() {
		var err error
		if n.key, err = c.ofAddress(ctx, n.vip); err != nil {
			return nil, err
		}
	}
	w, err := c.servicePath(ctx, n.key)
	if err != nil {
		return nil, err
	}
	x := &chain{Service: n.key.String(), Cluster: w.cluster, Links: w.links()}
	if w.imported != nil { // otherwise nodes know nothing of it
		if x.Nodes, err = c.onNodes(ctx, n.key, nodes); err != nil {
			return nil, err
		}
	}
	x.judge()
	return x, nil
}

// ofAddress finds the Service that has a ClusterSetIP.
func (c *collector) ofAddress(ctx context.Context, vip netip.Addr) (client.ObjectKey, error) {
	imports := &mcsv1beta1.ServiceImportList{}
	if err := c.client.List(ctx, imports); err != nil {
		return client.ObjectKey{}, fmt.Errorf("list ServiceImports: %w", err)
	}
	brokers, err := c.brokers(ctx)
	if err != nil {
		return client.ObjectKey{}, err
	}
	for i := range imports.Items {
		for _, ip := range imports.Items[i].Spec.IPs {
			if a, err := netip.ParseAddr(ip); err == nil && a.Unmap() == vip && !brokers[imports.Items[i].Namespace] {
				return client.ObjectKeyFromObject(&imports.Items[i]), nil
			}
		}
	}
	return client.ObjectKey{}, fmt.Errorf("no ServiceImport of this cluster has the address %s; see isthmusctl show services", vip)
}

// maxConcurrent bounds concurrent queries of agents.
const maxConcurrent = 16

// onNodes queries the agents of nodes. An agent that does not answer is a broken link.
func (c *collector) onNodes(ctx context.Context, key client.ObjectKey, nodes []string) ([]nodeChain, error) {
	pods, err := c.agentPods(ctx, nodes)
	if err != nil {
		return nil, err
	}
	token, err := c.observerToken(ctx)
	if err != nil {
		return nil, err
	}
	request := withToken(token, status.ExplainPath, map[string]string{"namespace": key.Namespace, "name": key.Name, "resolver": c.clusterDNS(ctx)})
	found := make([]nodeChain, len(pods))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrent)
	for i, pod := range pods {
		group.Go(func() error {
			found[i].Node = pod.Spec.NodeName
			said, err := fetch[status.Explanation](ctx, c, pod, status.AgentPort, request)
			if err != nil {
				found[i].Links = []status.Link{{Link: "agent", State: status.LinkBroken, Text: sentence(err), Fix: "see isthmusctl status"}}
				return ctx.Err()
			}
			found[i].Links, found[i].Explanation = said.Links, said
			return nil
		})
	}
	return found, group.Wait()
}

// clusterDNS returns the address of the cluster's DNS if it has the usual name, or else "".
func (c *collector) clusterDNS(ctx context.Context) string {
	svc := &corev1.Service{}
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: "kube-dns"}, svc); err != nil {
		return "" // some clusters lack it, and some users may not read it: the link is then omitted
	}
	if _, err := netip.ParseAddr(svc.Spec.ClusterIP); err != nil {
		return ""
	}
	return svc.Spec.ClusterIP
}

// judge finds the first broken link: those of the cluster come before those of nodes.
func (x *chain) judge() {
	x.OK = true
	look := func(links []status.Link, node string) {
		i := slices.IndexFunc(links, func(l status.Link) bool { return l.State == status.LinkBroken })
		if i >= 0 && x.OK {
			x.OK, x.Broken, x.BrokenOn = false, &links[i], node
		}
	}
	look(x.Links, "")
	for _, n := range x.Nodes {
		look(n.Links, n.Node)
	}
}

// err returns the error of a broken chain, or nil.
func (x *chain) err() error {
	if x.OK {
		return nil
	}
	where := x.Broken.Link
	if x.BrokenOn != "" {
		where += " on node " + x.BrokenOn
	}
	return fmt.Errorf("service %s is broken at %s: %s; %s", x.Service, where, x.Broken.Text, x.Broken.Fix)
}

// ticks are the marks of links.
var ticks = map[status.LinkState]string{status.LinkOK: "✓", status.LinkBroken: "✗", status.LinkNote: "·"}

// writeText prints x for people.
func (x *chain) writeText(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Service %s", x.Service)
	if x.Cluster != "" {
		fmt.Fprintf(&b, " in cluster %s", x.Cluster)
	}
	b.WriteString("\n")
	write := func(links []status.Link) {
		for _, l := range links {
			fmt.Fprintf(&b, "  %s %-12s %s\n", ticks[l.State], l.Link, l.Text)
			if l.State == status.LinkBroken {
				fmt.Fprintf(&b, "    %-12s -> %s\n", "", l.Fix)
			}
		}
	}
	write(x.Links)
	for _, n := range x.Nodes {
		fmt.Fprintf(&b, "node %s\n", n.Node)
		write(n.Links)
	}
	_, err := io.WriteString(out, b.String())
	return err
}
