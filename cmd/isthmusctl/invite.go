package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// inviteFlags are the flags of invite.
type inviteFlags struct {
	target         target
	blocks         []string
	server, output string
	invitation     membership.Invitation
}

func inviteCommand() *cobra.Command {
	var i inviteFlags
	cmd := &cobra.Command{
		Use:   "invite ID",
		Short: "Write the file with which one cluster joins the ClusterSet",
		Long: `Write the file with which one cluster joins the ClusterSet, or joins again.

The command reserves the id and its ClusterSetIP blocks on the broker, and creates the cluster's account. With the
file that cluster registers itself and gets its first credentials, and nothing else: it changes no other member and
reads no Secret. It ends when the cluster has joined, and after a day at the latest; a new one for the same id
ends the earlier one. isthmusctl leave --force ID withdraws an invitation that was not used.

A member whose credentials have ended, because it did not reach the broker for longer than they live, joins again
with an invitation for its id. It keeps its block, its ClusterSetIPs and its place in conflicts.`,
		Example: `  isthmusctl invite a --kubeconfig broker.kubeconfig -o invitation-a.yaml
  isthmusctl invite a --kubeconfig broker.kubeconfig --valid-for 1h --clusterset-ip-cidr 243.7.0.0/16`,
		Args: oneID("invite"),
		RunE: func(cmd *cobra.Command, args []string) error {
			i.invitation.ClusterID = clusterset.ClusterID(args[0])
			return i.run(cmd)
		},
	}
	f := cmd.Flags()
	i.target.bind(f)
	i.target.bindTimeout(f)
	bindBrokerNamespace(cmd, &i.invitation.Namespace)
	f.DurationVar(&i.invitation.TTL, "valid-for", 24*time.Hour, "lifetime of the invitation")
	f.StringSliceVar(&i.blocks, "clusterset-ip-cidr", nil, "blocks of the cluster's ClusterSetIPs, one per family (default: those that it had, or the lowest free ones)")
	f.StringVar(&i.server, "broker-server", "", "URL at which the cluster reaches the broker (default: that of the kubeconfig)")
	f.StringVarP(&i.output, "output", "o", "", "file to write, readable by its owner only (default: invitation-ID.yaml)")
	return cmd
}

func (i *inviteFlags) run(cmd *cobra.Command) error {
	if err := checkURL("broker-server", i.server); err != nil {
		return err
	}
	if err := parse(cmd, &i.invitation.Blocks, "clusterset-ip-cidr", i.blocks); err != nil {
		return err
	}
	cfg, _, err := i.target.config()
	if err != nil {
		return err
	}
	inv := i.invitation
	if inv.CA, err = authority(cfg); err != nil {
		return fmt.Errorf("%s: %w", i.target.source(), err)
	}
	inv.Server = strings.TrimSuffix(cmp.Or(i.server, cfg.Host), "/")
	c, err := connect(cfg)
	if err != nil {
		return err
	}
	info, err := membership.Invite(cmd.Context(), c, inv)
	if err != nil {
		return explainBroker(err, i.target)
	}
	output := cmp.Or(i.output, "invitation-"+info.ClusterID+".yaml")
	if err := info.Write(output); err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), `invited cluster %s to ClusterSet %s at %s
wrote %s, valid until %s or until the cluster has joined; keep it secret
next: %s join %s --kubeconfig FILE
`,
		info.ClusterID, info.ClusterSetID, info.Server, output, info.Expires.Format(time.RFC3339), cmd.Root().DisplayName(), output)
	return err
}
