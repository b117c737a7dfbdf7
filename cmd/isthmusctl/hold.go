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
		Short: "Release held withdrawals of a member",
		Long: `Release the held withdrawals of member SOURCE, so that this cluster removes their imports.

When many exports of a member vanish together without being withdrawn, the other members keep their imports for
up to an hour, because a mistake is more likely than an intention. isthmusctl status shows the held exports. This
command ends the present hold in this cluster; later withdrawals may be held again.`,
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
				note := fmt.Sprintf("the controller of cluster %s reports no hold; %s status shows the present state", self, cmd.Root().DisplayName())
				if err := printNotes(cmd, note); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s releases its hold on member %s\n", self, args[0])
			return err
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	cmd.Flags().StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of the cluster in which Isthmus is installed")
	return cmd
}
