package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func lighthouseCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lighthouse",
		Short: "Move a ClusterSet of Submariner to Isthmus, cluster by cluster",
		Long: `Move a ClusterSet of Submariner to Isthmus, cluster by cluster, and back.

Lighthouse is the service discovery of Submariner. While some clusters still run it, a bridge beside both brokers
shows them to the members of Isthmus, and the members of Isthmus to them. docs/migration-lighthouse.md has the order of steps.`,
		Example: `  isthmusctl lighthouse bridge --kubeconfig broker.kubeconfig --image registry.example.org/team/isthmus/controller:v0.1.0
  isthmusctl lighthouse adopt --kubeconfig a.kubeconfig`,
	}
	cmd.AddCommand(bridgeCommand(), removeBridgeCommand(), adoptCommand())
	return cmd
}

// bindSubmariner adds the flags of both brokers.
func bindSubmariner(cmd *cobra.Command, t *target, l *membership.LighthouseBridge) {
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	bindBrokerNamespace(cmd, &l.Namespace)
	cmd.Flags().StringVar(&l.Lighthouse, "submariner-namespace", "submariner-k8s-broker", "namespace of Submariner's broker")
}

func bridgeCommand() *cobra.Command {
	var t target
	var l membership.LighthouseBridge
	cmd := &cobra.Command{
		Use:   "bridge [ID ...]",
		Short: "Represent clusters that run Lighthouse in the ClusterSet of Isthmus",
		Long: `Represent clusters that run Lighthouse in the ClusterSet of Isthmus. Without arguments these are all clusters of
Submariner's broker that are no members of Isthmus.

The command registers each of them as a member, by the addresses that it has registered with Submariner, and runs the
bridge, which exports for them. A cluster that joins Isthmus later keeps its registration. A member that is named
runs Lighthouse again from now on: stop its isthmus-controller before, which the command checks by its Lease. Nothing of
Submariner is changed.

Both brokers must be namespaces of one cluster. Without --image, run isthmus-controller --lighthouse-bridge elsewhere,
with a token of ServiceAccount isthmus-lighthouse-bridge.`,
		Example: `  isthmusctl lighthouse bridge --kubeconfig broker.kubeconfig --image registry.example.org/team/isthmus/controller:v0.1.0
  isthmusctl lighthouse bridge east --kubeconfig broker.kubeconfig`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkPullSecrets(l.PullSecrets, "image", l.Image); err != nil {
				return err
			}
			for _, id := range args {
				l.Clusters = append(l.Clusters, clusterset.ClusterID(id))
			}
			c, err := t.connect()
			if err != nil {
				return err
			}
			if len(args) > 0 {
				if _, err := fmt.Fprintln(cmd.ErrOrStderr(), "waiting until no isthmus-controller of these clusters renews its Lease"); err != nil {
					return err
				}
			}
			bridged, err := membership.DeployLighthouseBridge(cmd.Context(), c, l)
			for _, b := range bridged {
				if err := printNotes(cmd, b.Notes...); err != nil {
					return err
				}
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "cluster %s runs Lighthouse and is a member of the ClusterSet, with pods in %s and Services in %s\n",
					b.Member.Name, strings.Join(b.Member.Spec.PodCIDRs, ", "), strings.Join(b.Member.Spec.ServiceCIDRs, ", ")); err != nil {
					return err
				}
			}
			return explainBroker(err, t)
		},
	}
	bindSubmariner(cmd, &t, &l)
	cmd.Flags().StringVar(&l.Image, "image", "", "image of isthmus-controller with which the broker's cluster runs the bridge (default: what is deployed stays)")
	bindPullSecrets(cmd.Flags(), &l.PullSecrets)
	return cmd
}

func removeBridgeCommand() *cobra.Command {
	var t target
	var l membership.LighthouseBridge
	cmd := &cobra.Command{
		Use:   "remove-bridge",
		Short: "Stop the bridge and remove its rights, after the last cluster has joined",
		Long: `Stop the bridge and remove its rights, after the last cluster has joined. It deletes nothing that the bridge has
written: remove Submariner's broker with subctl.`,
		Example: "  isthmusctl lighthouse remove-bridge --kubeconfig broker.kubeconfig",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := t.connect()
			if err != nil {
				return err
			}
			if err := membership.RemoveLighthouseBridge(cmd.Context(), c, l.Namespace, l.Lighthouse); err != nil {
				return explainBroker(err, t)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "removed the bridge")
			return err
		},
	}
	bindSubmariner(cmd, &t, &l)
	return cmd
}

func adoptCommand() *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use:   "adopt",
		Short: "Let Isthmus take over the ServiceImports that Lighthouse has written in a cluster",
		Long: `Let Isthmus take over the ServiceImports that Lighthouse has written in a cluster. Run it after isthmusctl join, when
lighthouse-agent does not run any more. The EndpointSlices of Lighthouse stay, so that its name server answers as before
until the cluster's DNS asks Isthmus.`,
		Example: "  isthmusctl lighthouse adopt --kubeconfig a.kubeconfig",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := t.connect()
			if err != nil {
				return err
			}
			adopted, err := membership.AdoptImports(cmd.Context(), c)
			for _, name := range adopted {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "took over ServiceImport %s\n", name); err != nil {
					return err
				}
			}
			if err == nil && len(adopted) == 0 {
				return printNotes(cmd, "this cluster has no ServiceImport of Lighthouse that is not taken over")
			}
			return err
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	return cmd
}
