package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
)

func federationCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "federation",
		Short: "Manage a federation of clusters, which needs no broker",
		Long: `Manage a federation of clusters, which needs no broker. Supervisors reach all members and elect a leader for each; the
leader writes federated Services and policies there. Children need no access to other clusters.

Name each cluster by its id and a context of the kubeconfig, such as a=ctx-a. docs/federation.md describes the rights of each token.`,
		Example: `  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --supervisor b=ctx-b --child c=ctx-c
  isthmusctl federation status --context ctx-a`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		federationCreateCommand(), federationAddCommand(), federationRemoveCommand(), federationRotateCommand(),
		federationStatusCommand(), federationPoliciesCommand(), federationReleaseCommand(),
	)
	return cmd
}

// clusters are the clusters of a federation command.
type clusters struct {
	kubeconfig                     string
	timeout                        time.Duration
	namespace                      string
	supervisors, children, servers []string // each ID=VALUE
	external                       []string // each ID=CIDR
}

func (c *clusters) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "path of a kubeconfig with an administrator's access to all clusters (default: that of kubectl)")
	f.StringArrayVar(&c.supervisors, "supervisor", nil, "a supervisor and its context, ID=CONTEXT, repeatable")
	f.StringArrayVar(&c.children, "child", nil, "another member and its context, ID=CONTEXT, repeatable")
	f.StringVarP(&c.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed in all clusters")
	f.DurationVar(&c.timeout, "timeout", defaultTimeout, "timeout of a request to an API server")
}

// bindMembers binds the flags of members.
func (c *clusters) bindMembers(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&c.servers, "server", nil,
		"URL at which supervisors reach a member's API server, ID=URL, repeatable (default: the known one, initially that of the kubeconfig)")
	cmd.Flags().StringArrayVar(&c.external, "external-cidr", nil,
		"network of a member's own addresses outside of it, for spec.externalIPs of its Services, ID=CIDR, repeatable (default: the known ones)")
}

// reach connects to each of the clusters.
func (c *clusters) reach() ([]bootstrap.Cluster, error) {
	servers := map[string]string{}
	var errs []error
	for _, text := range c.servers {
		id, server, err := pair("server", text)
		errs = append(errs, err, checkURL("server", server))
		servers[id] = server
	}
	external := map[string][]string{}
	for _, text := range c.external {
		id, network, err := pair("external-cidr", text)
		if p, parseErr := netip.ParsePrefix(network); err == nil && (parseErr != nil || p != p.Masked()) {
			err = fmt.Errorf("--external-cidr %s: %q is not a CIDR without host bits; give one such as %s=192.0.2.0/24", text, network, id)
		}
		errs = append(errs, err)
		external[id] = append(external[id], network)
	}
	var all []bootstrap.Cluster
	for i, text := range slices.Concat(c.supervisors, c.children) {
		supervisor := i < len(c.supervisors)
		flag := "child"
		if supervisor {
			flag = "supervisor"
		}
		id, context, err := pair(flag, text)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		cluster, err := c.open(id, context)
		if err != nil {
			errs = append(errs, fmt.Errorf("--%s %s: %w", flag, text, err))
			continue
		}
		cluster.Supervisor, cluster.Server, cluster.ExternalCIDRs = supervisor, servers[id], external[id]
		delete(servers, id)
		delete(external, id)
		all = append(all, cluster)
	}
	if len(errs) == 0 || errors.Join(errs...) == nil {
		for id := range servers {
			errs = append(errs, fmt.Errorf("--server %s=%s: no --supervisor or --child names cluster %s", id, servers[id], id))
		}
		for id, networks := range external {
			errs = append(errs, fmt.Errorf("--external-cidr %s=%s: no --supervisor or --child names cluster %s", id, networks[0], id))
		}
	}
	return all, errors.Join(errs...)
}

// open connects to the cluster of a context.
func (c *clusters) open(id, context string) (bootstrap.Cluster, error) {
	cluster := bootstrap.Cluster{ID: clusterset.ClusterID(id), Context: context}
	t := target{kubeconfig: c.kubeconfig, context: context, timeout: c.timeout, one: true}
	cfg, _, err := t.config()
	if err != nil {
		return cluster, err
	}
	cluster.Host = cfg.Host
	if cluster.CA, err = authority(cfg); err != nil {
		return cluster, err
	}
	cluster.Client, err = connect(cfg)
	return cluster, err
}

// pair splits ID=VALUE.
func pair(flag, text string) (id, value string, err error) {
	id, value, ok := strings.Cut(text, "=")
	if !ok || id == "" || value == "" {
		return "", "", fmt.Errorf("--%s %s: give a cluster's id, = and the value, such as --%s a=VALUE", flag, text, flag)
	}
	return id, value, nil
}

func federationCreateCommand() *cobra.Command {
	var c clusters
	var f formation
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Form a federation of clusters",
		Long: `Form a federation of clusters: each cluster gets an id and, for every supervisor, an account with a leader's rights.
Supervisors get the tokens of these accounts and a Federation that names all members.

If the Federation has no grants, the command proposes those for what takes part now, and asks before it writes them: nothing else
may join a federated Service or be replicated then, until you change spec.grants. With --open-grants the annotation of any Service or
policy suffices.

The command writes only after it has read and checked all clusters. Run it again to complete an interrupted run, and
to update the clusters after an upgrade.`,
		Example: `  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --supervisor b=ctx-b --child c=ctx-c
  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --server a=https://192.0.2.11:6443`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !f.open {
				f.grants = func(proposed []federationv1alpha1.Grant) error { return askGrants(cmd, f.yes, proposed) }
			}
			return form(cmd, &c, f)
		},
	}
	c.bind(cmd)
	c.bindMembers(cmd)
	cmd.Flags().StringVar(&f.clusterSet, "clusterset", "", "name of the ClusterSet (default: the one in the clusters)")
	cmd.Flags().BoolVar(&f.open, "open-grants", false, "write no grants: any annotated Service or policy takes part")
	cmd.Flags().BoolVar(&f.yes, "yes", false, "write the proposed grants without asking")
	return cmd
}

// formation is how federation create forms a federation.
type formation struct {
	clusterSet string
	open, yes  bool
	grants     func(proposed []federationv1alpha1.Grant) error // see bootstrap.Formation
}

// askGrants shows the proposed grants and asks whether to write them.
func askGrants(cmd *cobra.Command, yes bool, proposed []federationv1alpha1.Grant) error {
	text, err := yaml.Marshal(map[string]any{"grants": proposed})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "only what takes part now may do so, by spec.grants of the Federation:\n%s", text); err != nil {
		return err
	}
	return confirm(cmd, yes, "Write these grants? (--open-grants writes none, and anybody may take part)")
}

func federationAddCommand() *cobra.Command {
	var c clusters
	cmd := &cobra.Command{
		Use:   "add",
		Short: "Add clusters to a federation",
		Long: `Add clusters to a federation. Give the new clusters and every supervisor, which has to know them. With a new
supervisor give every member, because it gets an account in each.`,
		Example: `  isthmusctl federation add --child d=ctx-d --supervisor a=ctx-a --supervisor b=ctx-b`,
		Args:    usage.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return form(cmd, &c, formation{}) },
	}
	c.bind(cmd)
	c.bindMembers(cmd)
	return cmd
}

func form(cmd *cobra.Command, c *clusters, f formation) error {
	all, err := c.reach()
	if err != nil {
		return err
	}
	formed, err := bootstrap.Form(cmd.Context(), bootstrap.Formation{ClusterSet: f.clusterSet, Namespace: c.namespace, Clusters: all, Grants: f.grants})
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if _, err := fmt.Fprintf(out, "federation %s\n", formed.ClusterSet); err != nil {
		return err
	}
	var first string
	for _, m := range formed.Members {
		role, was := "child", "unchanged"
		if m.Supervisor {
			role = "supervisor"
		}
		if m.New {
			was = "new"
		}
		if m.Supervisor && first == "" {
			i := slices.IndexFunc(all, func(o bootstrap.Cluster) bool { return o.ID == m.ID })
			first = all[i].Context
		}
		if _, err := fmt.Fprintf(out, "  %-10s %s at %s, %s\n", role, m.ID, m.Server, was); err != nil {
			return err
		}
	}
	for _, l := range formed.LeftOut {
		if _, err := fmt.Fprintf(out, "  left out:  Service %s of %s: %v\n", l.Service, l.Member, l.Why); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(out, "next: run isthmus-controller --federation in the supervisors, and see %s federation status --context %s\n", cmd.Root().DisplayName(), first)
	return err
}

func federationRemoveCommand() *cobra.Command {
	var c clusters
	var gone bool
	cmd := &cobra.Command{
		Use:   "remove ID",
		Short: "Remove a cluster from its federation",
		Long: `Remove a cluster from its federation. Give it and every supervisor; to remove a supervisor give every member, because it
has an account in each. The command revokes the leaders' rights in the cluster, and deletes there the objects of leaders
and of isthmusctl federation. Objects of other software stay. The other members forget the cluster.

With --gone the command does not contact the cluster, which no longer exists or cannot be reached.`,
		Example: `  isthmusctl federation remove c --child c=ctx-c --supervisor a=ctx-a --supervisor b=ctx-b
  isthmusctl federation remove c --gone --supervisor a=ctx-a --supervisor b=ctx-b`,
		Args: oneID("federation remove"),
		RunE: func(cmd *cobra.Command, args []string) error {
			all, err := c.reach()
			if err != nil {
				return err
			}
			removed, err := bootstrap.Remove(cmd.Context(), bootstrap.Removal{
				ID: clusterset.ClusterID(args[0]), Namespace: c.namespace, Gone: gone, Clusters: all,
			})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s is no longer a member; %d objects of leaders were deleted in it\n", args[0], removed.Objects)
			return err
		},
	}
	c.bind(cmd)
	cmd.Flags().BoolVar(&gone, "gone", false, "the cluster no longer exists or cannot be reached")
	return cmd
}

func federationRotateCommand() *cobra.Command {
	var c clusters
	var overlap time.Duration
	var format string
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Rotate the tokens of supervisors",
		Long: `Give supervisors new tokens, and revoke the old ones: each given supervisor, for each given cluster. Both are valid
during --overlap, in which controllers switch to the new ones. Controllers renew their tokens themselves; rotation revokes stolen ones, and
those that were requested with them. Run it again to complete an interrupted run.`,
		Example: `  isthmusctl federation rotate --supervisor a=ctx-a --supervisor b=ctx-b --child c=ctx-c
  isthmusctl federation rotate --supervisor a=ctx-a --overlap 5m -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			if overlap <= 0 {
				return fmt.Errorf("--overlap=%s is not positive; give controllers time to switch to the new tokens, such as 1m", overlap)
			}
			all, err := c.reach()
			if err != nil {
				return err
			}
			rotated, err := bootstrap.Rotate(cmd.Context(), c.namespace, all, overlap)
			if err != nil {
				return err
			}
			return tables.Write(cmd.OutOrStdout(), rotatedTable(rotated), format)
		},
	}
	c.bind(cmd)
	cmd.Flags().DurationVar(&overlap, "overlap", time.Minute, "how long both old and new tokens are valid")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// rotatedTable is the output of federation rotate.
type rotatedTable []bootstrap.Rotated

// Header is part of tables.Table.
func (rotatedTable) Header() []string { return []string{"SUPERVISOR", "MEMBER", "REVOKED"} }

// Rows is part of tables.Table.
func (t rotatedTable) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, r := range t {
		rows[i] = []string{string(r.Supervisor), string(r.Member), fmt.Sprint(r.Revoked)}
	}
	return rows
}

// Nothing is part of tables.Table.
func (rotatedTable) Nothing() string { return "no token was rotated" }
