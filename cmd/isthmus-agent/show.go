package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
)

// showCommand is `isthmus-agent show`. It reads what is pinned, so it works beside an agent and without one.
func showCommand(cfg *Config) *cobra.Command {
	var format string
	show := &cobra.Command{
		Use:   "show",
		Short: "Show what stands in this node's kernel",
		Long: `Show what stands in this node's kernel, read from the kernel itself: beside a running agent, and also
when none runs. It needs the same rights as the agent, and changes nothing. Only records are asked of the agent.`,
		Example: `  isthmus-agent show services
  isthmus-agent show drops -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("show what? one of services, backends, connections, hooks, drops, records; see %s --help", cmd.CommandPath())
		},
	}
	show.PersistentFlags().StringVarP(&format, "output", "o", "text", "text or json")
	limit := defaultLimit
	add := func(name, short, example string) *cobra.Command {
		c := &cobra.Command{
			Use: name, Short: short, Example: example, Args: usage.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				if err := tables.CheckFormat(format); err != nil {
					return err
				}
				t, err := readTable(cmd.Context(), cfg, name, limit)
				if err != nil {
					return err
				}
				return tables.Write(cmd.OutOrStdout(), t, format)
			},
		}
		show.AddCommand(c)
		return c
	}
	add("services", "Show every VIP and how it is balanced", "  isthmus-agent show services")
	add("backends", "Show every backend, its cluster and the Services that use it", "  isthmus-agent show backends -o json")
	add("connections", "Show the connections that the packet path translates", "  isthmus-agent show connections --limit=50").
		Flags().IntVar(&limit, "limit", limit, "how many at most")
	add("hooks", "Show where the programs are attached, and how long they take", `  isthmus-agent show hooks

  # With times, which the kernel measures only on demand:
  sysctl -w kernel.bpf_stats_enabled=1`)
	add("drops", "Show how many clients were refused, by Service and reason", "  isthmus-agent show drops")
	show.AddCommand(recordsCommand(cfg, &format))
	return show
}

// defaultLimit is how many connections are shown where nobody says it.
const defaultLimit = 1000

// readTable reads one of status.ShowTables from the kernel.
func readTable(ctx context.Context, cfg *Config, name string, limit int) (tables.Table, error) {
	r, err := datapath.Read(datapath.Config{CgroupRoot: cfg.CgroupRoot, BPFFS: cfg.BPFFS})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	switch name {
	case "services":
		return showServices(ctx, r)
	case "backends":
		return showBackends(ctx, r)
	case "connections":
		return showConnections(r, limit)
	case "hooks":
		return showHooks(r, cfg.CgroupRoot)
	default:
		return showDrops(ctx, r)
	}
}
