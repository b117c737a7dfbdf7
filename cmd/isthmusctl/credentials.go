package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// patience is how long the controller may need to come back with new credentials.
const patience = 3 * time.Minute

func rotateCommand() *cobra.Command {
	var t, broker target
	var namespace string
	cmd := &cobra.Command{
		Use:   "rotate [ID]",
		Short: "Give a member new credentials for its broker",
		Long: `Give a member new credentials for its broker, and make the old ones worthless.

The new ones are put into the cluster, its controller is restarted with them, and when it is ready the old
ones are deleted; until then both are good, so nothing is lost, whenever it is cut off. A member that was
revoked gets its rights back. ID, if given, must be the cluster's.`,
		Example: "  isthmusctl rotate --kubeconfig a.kubeconfig --broker-kubeconfig broker.kubeconfig",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("rotate takes one argument, a member's id; it got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			b, err := broker.broker(cmd, t)
			if err != nil {
				return err
			}
			member, err := t.connect()
			if err != nil {
				return err
			}
			id := ""
			if len(args) == 1 {
				id = args[0]
			}
			r, err := membership.Rotate(cmd.Context(), b, member, namespace, id, patience)
			if err != nil {
				return explainBroker(err, broker)
			}
			if !r.Restarted {
				note := fmt.Sprintf("namespace %s has no Deployment isthmus-controller; a controller elsewhere must read Secret %s/%s again", namespace, namespace, v1alpha1.BrokerSecret)
				if err := tell(cmd, note); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s has new credentials; the old ones are worthless (%d)\n", r.ClusterID, r.Revoked)
			return err
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	broker.bindBroker(f)
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of the cluster in which Isthmus is installed")
	return cmd
}

func revokeCommand() *cobra.Command {
	var t target
	var namespace string
	cmd := &cobra.Command{
		Use:   "revoke ID",
		Short: "Take a member's credentials away",
		Long: `Take a member's credentials away: it can neither read nor write anything on the broker any more, and keeps
what it has imported. What it has published stays on the broker. The other members take it for dead when it
has been silent for long enough. isthmusctl rotate gives it new credentials, leave --force removes it.`,
		Example: "  isthmusctl revoke a --kubeconfig broker.kubeconfig",
		Args:    oneID("revoke"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := t.connect()
			if err != nil {
				return err
			}
			if err := membership.Revoke(cmd.Context(), c, namespace, args[0]); err != nil {
				return explainBroker(err, t)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), `revoked the credentials of member %s; its token may be remembered for 10 seconds, without any rights
what it has published stays; to remove it: %s leave --force %s
`, args[0], cmd.Root().DisplayName(), args[0])
			return err
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	bindBrokerNamespace(cmd, &namespace)
	return cmd
}
