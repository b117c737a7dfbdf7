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
		Short: "Say what becomes of a Service's name on every node, and what is broken first",
		Long: `Say what becomes of a Service's name: whether it is exported from this cluster and imported into it, which
ClusterSetIP and endpoints it has, and on every node what its name is, whether its ClusterSetIP is in the
kernel and who gets clients. The first link of this chain that is broken is named, with what to do about it.
It exits 0 when all links hold and 1 when one is broken. Links of one node are left out where they hold.

SERVICE is NAME.NAMESPACE, NAMESPACE/NAME, a name of clusterset.local, or a ClusterSetIP. It takes the rights
to read workloads and Services, to reach pods through the API server (get pods/proxy) and to make a token of
ServiceAccount isthmus-observer, in the namespace of Isthmus.`,
		Example: `  isthmusctl explain hello.demo
  isthmusctl explain hello.demo.svc.clusterset.local --node worker-1
  isthmusctl explain 243.0.0.5 -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("explain needs one argument, the Service; it got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			service, err := parseService(args[0])
			if err != nil {
				return err
			}
			cfg, _, err := t.config()
			if err != nil {
				return err
			}
			c, err := newCollector(cfg, namespace)
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
	f.StringSliceVar(&nodes, "node", nil, "node to ask, repeatable (default: all)")
	return cmd
}

// called is how somebody calls a Service: by its key, or by an address of it.
type called struct {
	key client.ObjectKey
	vip netip.Addr
}

// parseService reads one of the ways in which people call a Service.
func parseService(text string) (called, error) {
	if vip, err := netip.ParseAddr(text); err == nil {
		return called{vip: vip.Unmap()}, nil
	}
	var n called
	if namespace, name, ok := strings.Cut(text, "/"); ok {
		n.key = client.ObjectKey{Namespace: namespace, Name: name}
	} else {
		labels := strings.Split(text, ".")
		if full, ok := strings.CutSuffix(strings.TrimSuffix(text, "."), ".svc.clusterset.local"); ok {
			labels = strings.Split(full, ".")
			labels = labels[max(0, len(labels)-2):] // before it there may be a cluster, and a host or a port
		}
		if len(labels) != 2 {
			return n, fmt.Errorf("%q is no Service; use NAME.NAMESPACE, NAMESPACE/NAME, a name of clusterset.local or a ClusterSetIP", text)
		}
		n.key = client.ObjectKey{Namespace: labels[1], Name: labels[0]}
	}
	return n, checkNames(n.key)
}

// chain is what explain says. It is what -o json prints; the text is made of it.
type chain struct {
	Service string `json:"service"` // namespace/name
	Cluster string `json:"cluster,omitempty"`
	OK      bool   `json:"ok"`
	// Broken is the first link that does not hold, and BrokenOn its node where it is one of a node.
	Broken   *status.Link  `json:"broken,omitempty"`
	BrokenOn string        `json:"brokenOn,omitempty"`
	Links    []status.Link `json:"links"` // of the cluster
	Nodes    []nodeChain   `json:"nodes,omitempty"`
}

// nodeChain is the part of one node.
type nodeChain struct {
	Node        string              `json:"node"`
	Links       []status.Link       `json:"links"`
	Explanation *status.Explanation `json:"explanation,omitempty"` // nil when the agent does not answer
}

// explain follows a Service through the cluster and some of its nodes, all when none is named.
func (c *collector) explain(ctx context.Context, n called, nodes []string) (*chain, error) {
	if n.vip.IsValid() {
		var err error
		if n.key, err = c.ofAddress(ctx, n.vip); err != nil {
			return nil, err
		}
	}
	w, err := c.road(ctx, n.key)
	if err != nil {
		return nil, err
	}
	x := &chain{Service: n.key.String(), Cluster: w.cluster, Links: w.links()}
	if w.imported != nil { // else there is nothing that a node could know
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

// asked is how many agents are asked at once.
const asked = 16

// onNodes asks the agents of nodes. An agent that does not answer is a link that is broken.
func (c *collector) onNodes(ctx context.Context, key client.ObjectKey, nodes []string) ([]nodeChain, error) {
	pods, err := c.agentPods(ctx, nodes)
	if err != nil {
		return nil, err
	}
	token, err := c.observerToken(ctx)
	if err != nil {
		return nil, err
	}
	request := seeing(token, status.ExplainPath, map[string]string{"namespace": key.Namespace, "name": key.Name, "resolver": c.clusterDNS(ctx)})
	found := make([]nodeChain, len(pods))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(asked)
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

// clusterDNS returns the address of the cluster's DNS where it has the usual name, else "".
func (c *collector) clusterDNS(ctx context.Context) string {
	svc := &corev1.Service{}
	if err := c.client.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: "kube-dns"}, svc); err != nil {
		return "" // it is not everywhere, and not everybody may read it: then that link is left out
	}
	if _, err := netip.ParseAddr(svc.Spec.ClusterIP); err != nil {
		return ""
	}
	return svc.Spec.ClusterIP
}

// judge finds the first link that is broken: those of the cluster come before those of nodes.
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

// err is the error of a chain that is broken, or nil.
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

// ticks are how a link is shown.
var ticks = map[status.LinkState]string{status.LinkOK: "✓", status.LinkBroken: "✗", status.LinkNote: "·"}

// writeText prints x as people read it.
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
