package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
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
}

func (c *clusters) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "path of a kubeconfig with an administrator's access to all clusters (default: that of kubectl)")
	f.StringArrayVar(&c.supervisors, "supervisor", nil, "a supervisor and its context, ID=CONTEXT, repeatable")
	f.StringArrayVar(&c.children, "child", nil, "another member and its context, ID=CONTEXT, repeatable")
	f.StringVarP(&c.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed in all clusters")
	f.DurationVar(&c.timeout, "timeout", defaultTimeout, "timeout of a request to an API server")
}

// bindServers binds the flag of members' URLs.
func (c *clusters) bindServers(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&c.servers, "server", nil,
		"URL at which supervisors reach a member's API server, ID=URL, repeatable (default: the known one, initially that of the kubeconfig)")
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
		cluster.Supervisor, cluster.Server = supervisor, servers[id]
		delete(servers, id)
		all = append(all, cluster)
	}
	if len(errs) == 0 || errors.Join(errs...) == nil {
		for id := range servers {
			errs = append(errs, fmt.Errorf("--server %s=%s: no --supervisor or --child names cluster %s", id, servers[id], id))
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
	var clusterSet string
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Form a federation of clusters",
		Long: `Form a federation of clusters: each cluster gets an id and, for every supervisor, an account with a leader's rights.
Supervisors get the tokens of these accounts and a Federation that names all members.

The command writes only after it has read and checked all clusters. Run it again to complete an interrupted run, and
to update the clusters after an upgrade.`,
		Example: `  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --supervisor b=ctx-b --child c=ctx-c
  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --server a=https://192.0.2.11:6443`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return form(cmd, &c, clusterSet) },
	}
	c.bind(cmd)
	c.bindServers(cmd)
	cmd.Flags().StringVar(&clusterSet, "clusterset", "", "name of the ClusterSet (default: the one in the clusters)")
	return cmd
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
		RunE:    func(cmd *cobra.Command, _ []string) error { return form(cmd, &c, "") },
	}
	c.bind(cmd)
	c.bindServers(cmd)
	return cmd
}

func form(cmd *cobra.Command, c *clusters, clusterSet string) error {
	all, err := c.reach()
	if err != nil {
		return err
	}
	formed, err := bootstrap.Form(cmd.Context(), bootstrap.Formation{ClusterSet: clusterSet, Namespace: c.namespace, Clusters: all})
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
