package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
)

// table is what a command shows: rows of text for people, and the same as JSON for programs.
type table interface {
	header() []string
	rows() [][]string
	// nothing is what to say instead of a table without rows.
	nothing() string
}

// showCommand is `isthmus-agent show`. It reads what is pinned, so it works beside an agent and without one.
func showCommand(cfg *Config) *cobra.Command {
	var format string
	show := &cobra.Command{
		Use:   "show",
		Short: "Show what stands in this node's kernel",
		Long: `Show what stands in this node's kernel, read from the kernel itself: beside a running agent, and also
when none runs. It needs the same rights as the agent, and changes nothing.`,
		Example: `  isthmus-agent show services
  isthmus-agent show drops -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("show what? one of services, backends, connections, hooks, drops; see %s --help", cmd.CommandPath())
		},
	}
	show.PersistentFlags().StringVarP(&format, "output", "o", "text", "text or json")
	add := func(name, short, example string, read func(context.Context, *datapath.Reader) (table, error)) *cobra.Command {
		c := &cobra.Command{
			Use: name, Short: short, Example: example, Args: usage.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				if format != "text" && format != "json" {
					return fmt.Errorf("--output=%s is unknown; use text or json", format)
				}
				r, err := datapath.Read(datapath.Config{CgroupRoot: cfg.CgroupRoot, BPFFS: cfg.BPFFS})
				if err != nil {
					return err
				}
				defer r.Close()
				t, err := read(cmd.Context(), r)
				if err != nil {
					return err
				}
				return writeTable(cmd.OutOrStdout(), t, format)
			},
		}
		show.AddCommand(c)
		return c
	}
	add("services", "Show every VIP and how it is balanced", "  isthmus-agent show services", showServices)
	add("backends", "Show every backend, its cluster and the Services that use it", "  isthmus-agent show backends -o json", showBackends)
	limit := 1000
	add("connections", "Show the connections that the packet path translates", "  isthmus-agent show connections --limit=50",
		func(_ context.Context, r *datapath.Reader) (table, error) { return showConnections(r, limit) },
	).Flags().IntVar(&limit, "limit", limit, "how many at most")
	add("hooks", "Show where the programs are attached, and how long they take", `  isthmus-agent show hooks

  # With times, which the kernel measures only on demand:
  sysctl -w kernel.bpf_stats_enabled=1`,
		func(_ context.Context, r *datapath.Reader) (table, error) { return showHooks(r, cfg.CgroupRoot) })
	add("drops", "Show how many clients were refused, by Service and reason", "  isthmus-agent show drops", showDrops)
	return show
}

// writeTable writes a table in one of the two formats.
func writeTable(out io.Writer, t table, format string) error {
	if format == "json" {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(t)
	}
	rows := t.rows()
	if len(rows) == 0 {
		_, err := fmt.Fprintln(out, t.nothing())
		return err
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	for _, row := range append([][]string{t.header()}, rows...) {
		for i, cell := range row {
			if cell == "" {
				cell = "-"
			}
			if i > 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, cell)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}
