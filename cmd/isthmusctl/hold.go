package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func releaseHoldCommand() *cobra.Command {
	var t target
	var namespace string
	cmd := &cobra.Command{
		Use:   "release-hold SOURCE",
		Short: "Believe that a member has withdrawn as much as it seems",
		Long: `Believe that member SOURCE has withdrawn as much as it seems.

When much of what a member offers vanishes at once and without a word, the other members keep it for a while:
it is more often a mistake than meant. isthmusctl status shows what is held here. This ends the hold in this
cluster, now; what vanishes later is held anew.`,
		Example: "  isthmusctl release-hold b --kubeconfig a.kubeconfig",
		Args:    oneID("release-hold"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := t.connect()
			if err != nil {
				return err
			}
			self, held, err := membership.ReleaseHold(cmd.Context(), c, namespace, clusterset.ClusterID(args[0]), time.Now())
			if err != nil {
				return err
			}
			if !held {
				note := fmt.Sprintf("the controller of cluster %s does not say that it holds anything; %s status shows whether it does", self, cmd.Root().DisplayName())
				if err := tell(cmd, note); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s believes now what member %s has withdrawn\n", self, args[0])
			return err
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	cmd.Flags().StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of the cluster in which Isthmus is installed")
	return cmd
}
