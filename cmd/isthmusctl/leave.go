package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func leaveCommand() *cobra.Command {
	var t, broker target
	var namespace, brokerNamespace, gone string
	cmd := &cobra.Command{
		Use:   "leave",
		Short: "End the membership of a cluster",
		Long: `End the membership of a cluster.

The command stops the controller, withdraws this cluster's exports, and deletes its objects on the broker and
the imports in this cluster. ServiceExports and objects of other software stay. Run it again to complete an
interrupted run.

With --force ID it ends the membership of a cluster that no longer exists, and changes only the broker.`,
		Example: `  isthmusctl leave --kubeconfig a.kubeconfig --broker-kubeconfig broker.kubeconfig
  isthmusctl leave --force a --broker-kubeconfig broker.kubeconfig`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("force") {
				if cmd.Flags().Changed("broker-namespace") {
					return errors.New("--broker-namespace requires --force; without it the cluster's Member names the broker")
				}
				return leave(cmd, t, broker, namespace)
			}
			if err := clusterset.ClusterID(gone).Validate(); err != nil {
				return fmt.Errorf("--force: %w", err)
			}
			c, err := broker.broker(cmd, t)
			if err != nil {
				return err
			}
			left, err := membership.ForceLeave(cmd.Context(), c, brokerNamespace, gone)
			if err != nil {
				return explainBroker(err, broker)
			}
			return printLeft(cmd, left, "")
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	broker.bindBroker(f)
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of the cluster in which Isthmus is installed")
	f.StringVar(&gone, "force", "", "id of a member whose cluster no longer exists")
	f.StringVar(&brokerNamespace, "broker-namespace", v1alpha1.DefaultBrokerNamespace, "namespace that is the broker, with --force")
	return cmd
}

func leave(cmd *cobra.Command, t, b target, namespace string) error {
	broker, err := b.broker(cmd, t)
	if err != nil {
		return err
	}
	member, err := t.connect()
	if err != nil {
		return err
	}
	left, err := membership.Leave(cmd.Context(), broker, member, namespace)
	if err != nil {
		return explainBroker(err, b)
	}
	return printLeft(cmd, left, fmt.Sprintf("next: %s uninstall --namespace %s, which also cleans the kernels of the nodes\n", cmd.Root().DisplayName(), namespace))
}

// explainBroker adds the kubeconfig to an error about a wrong broker.
func explainBroker(err error, b target) error {
	if errors.Is(err, membership.ErrNoBroker) {
		return fmt.Errorf("%s: %w", b.source(), err)
	}
	return err
}

func printLeft(cmd *cobra.Command, left membership.Left, next string) error {
	if err := printNotes(cmd, left.Notes...); err != nil {
		return err
	}
	verb := "left"
	if left.AlreadyLeft {
		verb = "had already left"
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "cluster %s %s ClusterSet %s: %d exports withdrawn, %d imports removed\n%s",
		left.ClusterID, verb, left.ClusterSetID, left.Exports, left.Imports, next)
	return err
}
