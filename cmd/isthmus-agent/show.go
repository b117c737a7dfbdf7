package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
)

// showCommand returns `isthmus-agent show`. It reads pinned maps, so it works with and without a running agent.
func showCommand(cfg *Config) *cobra.Command {
	var format string
	show := &cobra.Command{
		Use:   "show",
		Short: "Show the state of this node's dataplane",
		Long: `Show the state of this node's dataplane. All but records is read from the kernel, so it works with and without a
running agent; records asks the agent. The command needs the privileges of the agent and changes nothing.`,
		Example: `  isthmus-agent show services
  isthmus-agent show drops -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("name one of services, backends, connections, hooks, drops, records; see %s --help", cmd.CommandPath())
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
	add("services", "Show every VIP and its load balancing", "  isthmus-agent show services")
	add("backends", "Show every backend, its cluster and its Services", "  isthmus-agent show backends -o json")
	add("connections", "Show the connections of the packet path", "  isthmus-agent show connections --limit=50").
		Flags().IntVar(&limit, "limit", limit, "maximum number of connections")
	add("hooks", "Show where the BPF programs are attached, and their run times", `  isthmus-agent show hooks

  # Let the kernel measure run times:
  sysctl -w kernel.bpf_stats_enabled=1`)
	add("drops", "Show the number of refused clients by Service and reason", "  isthmus-agent show drops")
	show.AddCommand(recordsCommand(cfg, &format))
	return show
}

// defaultLimit is the default number of connections to show.
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
