package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
)

func federationReleaseCommand() *cobra.Command {
	var c clusters
	var format string
	cmd := &cobra.Command{
		Use:   "release ID",
		Short: "Believe that a member has taken back as much as it seems",
		Long: `Believe that member ID has taken back as much as it seems. Give all supervisors.

When much of what a member offers vanishes at once and without a word, Services or policies, supervisors keep it for
an hour: it is more often a mistake than meant. isthmusctl federation status shows what is held. This ends the hold,
now; what vanishes later is held anew.`,
		Example: `  isthmusctl federation release c --supervisor a=ctx-a --supervisor b=ctx-b`,
		Args:    oneID("federation release"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			all, err := c.reach()
			if err != nil {
				return err
			}
			released, err := bootstrap.Release(cmd.Context(), c.namespace, all, clusterset.ClusterID(args[0]), time.Now())
			if err != nil {
				return err
			}
			return tables.Write(cmd.OutOrStdout(), releasedTable(released), format)
		},
	}
	c.bind(cmd)
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// releasedTable is what federation release prints.
type releasedTable []bootstrap.Released

// Header is part of tables.Table.
func (releasedTable) Header() []string { return []string{"SUPERVISOR", "HELD"} }

// Rows is part of tables.Table.
func (t releasedTable) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, r := range t {
		rows[i] = []string{string(r.Supervisor), fmt.Sprint(r.Held)}
	}
	return rows
}

// Nothing is part of tables.Table.
func (releasedTable) Nothing() string { return "no supervisor was told" }
