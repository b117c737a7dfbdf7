package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// showOptions are the flags of all subcommands of show.
type showOptions struct {
	target    target
	namespace string
	format    string
	nodes     []string
	limit     int
}

func showCommand() *cobra.Command {
	s := &showOptions{}
	show := &cobra.Command{
		Use:   "show",
		Short: "Show Services, backends, clusters, nodes, and the state of their kernels",
		Long: `Show the ClusterSet as a cluster sees it (services, backends, clusters), the state of its nodes (nodes), and the
state of their kernels (frontends, connections, hooks, drops). The latter need the right to create a token of
ServiceAccount isthmus-observer, in the namespace of Isthmus.`,
		Example: `  isthmusctl show services
  isthmusctl show backends demo
  isthmusctl show drops --node worker-1 -o json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage.NoArgs(cmd, args)
			}
			return fmt.Errorf("show needs one of services, backends, clusters, nodes, frontends, connections, hooks, drops; see %s --help", cmd.CommandPath())
		},
		Args: usage.NoArgs,
	}
	f := show.PersistentFlags()
	s.target.bind(f)
	s.target.bindTimeout(f)
	f.StringVarP(&s.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVarP(&s.format, "output", "o", "text", "text or json")
	show.AddCommand(
		s.ofNamespace("services", "Show every imported Service", (*collector).showServices),
		s.ofNamespace("backends", "Show every endpoint of imported Services, from all clusters", (*collector).showBackends),
		s.command("clusters", "Show this member and the other members", func(ctx context.Context, c *collector) (tables.Table, error) { return c.showClusters(ctx) }),
		s.command("nodes", "Show the state of the agent of every node", func(ctx context.Context, c *collector) (tables.Table, error) { return c.showNodes(ctx) }),
	)
	for _, k := range []struct{ name, table, short string }{
		{"frontends", "services", "Show every VIP in the kernel with its balancing"},
		{"connections", "connections", "Show the connections that the packet path translates"},
		{"hooks", "hooks", "Show the hooks of the programs and their run times"},
		{"drops", "drops", "Show the numbers of refused connections, by Service and reason"},
	} {
		cmd := s.command(k.name, k.short, func(ctx context.Context, c *collector) (tables.Table, error) {
			return c.showKernels(ctx, k.table, s.nodes, s.limit)
		})
		cmd.Flags().StringSliceVar(&s.nodes, "node", nil, "node to query, repeatable (default: all)")
		if k.name == "connections" {
			cmd.Flags().IntVar(&s.limit, "limit", 1000, "the largest number per node")
		}
		show.AddCommand(cmd)
	}
	return show
}

// command returns a subcommand without arguments.
func (s *showOptions) command(name, short string, read func(context.Context, *collector) (tables.Table, error)) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Example: "  isthmusctl show " + name, Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd, read) },
	}
}

// ofNamespace returns a subcommand with an optional namespace.
func (s *showOptions) ofNamespace(name, short string, read func(*collector, context.Context, string) (tables.Table, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " [NAMESPACE]", Short: short, Example: fmt.Sprintf("  isthmusctl show %s\n  isthmusctl show %[1]s demo -o json", name),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("show %s takes one argument at most, a namespace; it got %d", name, len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			namespace := ""
			if len(args) > 0 {
				namespace = args[0]
			}
			return s.run(cmd, func(ctx context.Context, c *collector) (tables.Table, error) { return read(c, ctx, namespace) })
		},
	}
}

func (s *showOptions) run(cmd *cobra.Command, read func(context.Context, *collector) (tables.Table, error)) error {
	if err := tables.CheckFormat(s.format); err != nil {
		return err
	}
	c, err := s.target.collector(s.namespace)
	if err != nil {
		return err
	}
	t, err := read(cmd.Context(), c)
	if t == nil {
		return err
	}
	return errors.Join(tables.Write(cmd.OutOrStdout(), t, s.format), err)
}

// kernels holds a table of every node.
type kernels struct {
	empty tables.Table
	nodes []kernel
}

// kernel is the table of one node.
type kernel struct {
	Node  string       `json:"node"`
	Rows  tables.Table `json:"rows"`
	Error string       `json:"error,omitempty"` // the reason for missing rows
}

// MarshalJSON encodes k as a list of nodes.
func (k kernels) MarshalJSON() ([]byte, error) { return json.Marshal(k.nodes) }

// Header is part of tables.Table.
func (k kernels) Header() []string { return append([]string{"NODE"}, k.empty.Header()...) }

// Rows is part of tables.Table.
func (k kernels) Rows() [][]string {
	var all [][]string
	for _, n := range k.nodes {
		for _, row := range n.Rows.Rows() {
			all = append(all, append([]string{n.Node}, row...))
		}
	}
	return all
}

// Nothing is part of tables.Table.
func (k kernels) Nothing() string { return k.empty.Nothing() }

// showKernels reads a table of nodes' kernels. It returns an error for nodes that do not answer, with the rows of the others.
func (c *collector) showKernels(ctx context.Context, table string, nodes []string, limit int) (tables.Table, error) {
	pods, err := c.agentPods(ctx, nodes)
	if err != nil {
		return nil, err
	}
	token, err := c.observerToken(ctx)
	if err != nil {
		return nil, err
	}
	params := map[string]string{}
	if limit > 0 {
		params["limit"] = strconv.Itoa(limit)
	}
	empty, err := status.DecodeTable(table, []byte("[]"))
	if err != nil {
		return nil, err
	}
	k := kernels{empty: empty, nodes: make([]kernel, len(pods))}
	errs := make([]error, len(pods))
	var group errgroup.Group
	group.SetLimit(maxConcurrent)
	for i, pod := range pods {
		k.nodes[i] = kernel{Node: pod.Spec.NodeName, Rows: empty}
		group.Go(func() error {
			body, err := fetch[json.RawMessage](ctx, c, pod, status.AgentPort, withToken(token, status.ShowPath+table, params))
			var rows tables.Table
			if err == nil {
				rows, err = status.DecodeTable(table, *body)
			}
			if err != nil {
				errs[i] = fmt.Errorf("node %s: %w", pod.Spec.NodeName, err)
				k.nodes[i].Error = sentence(err)
				return nil
			}
			k.nodes[i].Rows = rows
			return nil
		})
	}
	_ = group.Wait() // errors are in errs
	return k, errors.Join(errs...)
}
