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
		Short: "Release held withdrawals of a member",
		Long: `Release the held withdrawals of member ID, so that supervisors delete the copies in other members. Give all supervisors.

When many Services or policies of a member vanish together without being withdrawn, supervisors keep their copies for
up to an hour, because a mistake is more likely than an intention. isthmusctl federation status shows them. This
command ends the present hold; later withdrawals may be held again.`,
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

// releasedTable is the output of federation release.
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
func (releasedTable) Nothing() string { return "no supervisor received the request" }
