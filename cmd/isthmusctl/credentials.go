package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// rotateTimeout bounds the restart of the controller with new credentials.
const rotateTimeout = 3 * time.Minute

func rotateCommand() *cobra.Command {
	var t, broker target
	var namespace string
	cmd := &cobra.Command{
		Use:   "rotate [ID]",
		Short: "Give a member new credentials for its broker",
		Long: `Give a member new credentials for its broker, and invalidate the old ones.

The command writes the new credentials into the cluster, restarts its controller, and deletes the old ones when
the controller is ready. Until then both are valid, so an interruption does no harm. A revoked member gets its
rights back. ID, if given, must be that of the cluster.`,
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
			r, err := membership.Rotate(cmd.Context(), b, member, namespace, id, rotateTimeout)
			if err != nil {
				return explainBroker(err, broker)
			}
			if !r.Restarted {
				note := fmt.Sprintf("namespace %s has no Deployment of the controller; restart a controller elsewhere, so that it reads Secret %s/%s", namespace, namespace, v1alpha1.BrokerSecret)
				if err := printNotes(cmd, note); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s has new credentials; %d old ones are revoked\n", r.ClusterID, r.Revoked)
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
		Short: "Revoke a member's credentials",
		Long: `Revoke a member's credentials: it can no longer read or write the broker, and keeps its imports. Its exports stay
on the broker. The other members declare it dead when it has not renewed its Lease for long enough. isthmusctl
rotate gives it new credentials, leave --force removes it.`,
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
			_, err = fmt.Fprintf(cmd.OutOrStdout(), `revoked the credentials of member %s; API servers may accept its token for 10 more seconds, without any rights
its exports stay on the broker; to remove them: %s leave --force %s
`, args[0], cmd.Root().DisplayName(), args[0])
			return err
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	bindBrokerNamespace(cmd, &namespace)
	return cmd
}
