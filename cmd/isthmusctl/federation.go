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
		Short: "Make clusters a federation, which needs no broker",
		Long: `Make clusters a federation, which needs no broker: supervisors reach all members and elect a leader for each, which
writes federated Services and policies there. Children need to reach nobody.

Clusters are given by their ids and contexts of the kubeconfig. docs/federation.md says who may do what with which
token.`,
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

// clusters are those that a command of the federation works on.
type clusters struct {
	kubeconfig                     string
	timeout                        time.Duration
	namespace                      string
	supervisors, children, servers []string // each ID=VALUE
}

func (c *clusters) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "path of a kubeconfig with an administrator's access to all clusters (default: as kubectl finds it)")
	f.StringArrayVar(&c.supervisors, "supervisor", nil, "a supervisor and its context, ID=CONTEXT, repeatable")
	f.StringArrayVar(&c.children, "child", nil, "another member and its context, ID=CONTEXT, repeatable")
	f.StringVarP(&c.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed in all clusters")
	f.DurationVar(&c.timeout, "timeout", defaultTimeout, "how long to wait for an answer of an API server")
}

// bindServers is for commands that tell supervisors where members are.
func (c *clusters) bindServers(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&c.servers, "server", nil,
		"URL at which supervisors reach a member's API server, ID=URL, repeatable (default: as they know it, at first that of the kubeconfig)")
}

// reach returns a way into each of the clusters.
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
			errs = append(errs, fmt.Errorf("--server %s=%s: no cluster %s is given by --supervisor or --child", id, servers[id], id))
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

// pair takes ID=VALUE apart.
func pair(flag, text string) (id, value string, err error) {
	id, value, ok := strings.Cut(text, "=")
	if !ok || id == "" || value == "" {
		return "", "", fmt.Errorf("--%s %s: give it a cluster's id, = and the value, such as --%s a=VALUE", flag, text, flag)
	}
	return id, value, nil
}

func federationCreateCommand() *cobra.Command {
	var c clusters
	var clusterSet string
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Make clusters a federation",
		Long: `Make clusters a federation: each says who it is, gives every supervisor an account with a leader's rights, and
supervisors get the tokens of these and a Federation that names all members.

Nothing is written before all clusters were read and suit each other. A run that was cut off is finished by another
one; so are clusters brought up to date after an upgrade.`,
		Example: `  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --supervisor b=ctx-b --child c=ctx-c
  isthmusctl federation create --clusterset prod --supervisor a=ctx-a --server a=https://192.0.2.11:6443`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return form(cmd, &c, clusterSet) },
	}
	c.bind(cmd)
	c.bindServers(cmd)
	cmd.Flags().StringVar(&clusterSet, "clusterset", "", "name of the ClusterSet (default: what the clusters say already)")
	return cmd
}

func federationAddCommand() *cobra.Command {
	var c clusters
	cmd := &cobra.Command{
		Use:   "add",
		Short: "Take clusters into a federation",
		Long: `Take clusters into a federation. Give the new ones and every supervisor, which have to learn of them; with a new
supervisor give every member, since it gets an account in each.`,
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
		role, was := "child", "as before"
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
		Short: "Take a cluster out of its federation",
		Long: `Take a cluster out of its federation. Give it and every supervisor; for a supervisor that leaves give every member,
in which it has an account. Leaders can write nothing there any more, the others forget it, and what leaders wrote in
it is removed, as is all that isthmusctl federation made. Everybody else's objects stay.

With --gone the cluster is not asked, because it does not exist any more or cannot be reached.`,
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
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "cluster %s is no member any more; %d objects that leaders wrote in it were removed\n", args[0], removed.Objects)
			return err
		},
	}
	c.bind(cmd)
	cmd.Flags().BoolVar(&gone, "gone", false, "the cluster cannot be reached any more")
	return cmd
}

func federationRotateCommand() *cobra.Command {
	var c clusters
	var overlap time.Duration
	var format string
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Give supervisors new tokens, and make the old ones worthless",
		Long: `Give supervisors new tokens, and make the old ones worthless: each supervisor that is given, for each cluster that
is given. Old and new ones are both good for as long as --overlap says, in which controllers take the new ones up; what
was cut off before is finished by running it again.`,
		Example: `  isthmusctl federation rotate --supervisor a=ctx-a --supervisor b=ctx-b --child c=ctx-c
  isthmusctl federation rotate --supervisor a=ctx-a --overlap 5m -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			if overlap <= 0 {
				return fmt.Errorf("--overlap=%s is not more than 0; give controllers time to take the new tokens up, such as 1m", overlap)
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
	cmd.Flags().DurationVar(&overlap, "overlap", time.Minute, "how long old and new tokens are both good")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// rotatedTable is what federation rotate prints.
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
func (rotatedTable) Nothing() string { return "no token was renewed" }
