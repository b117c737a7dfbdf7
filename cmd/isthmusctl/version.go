package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	semver "k8s.io/apimachinery/pkg/util/version"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// versions are those of this program and of what runs in a cluster.
type versions struct {
	Client     version.Info      `json:"client"`
	Controller map[string]string `json:"controller,omitempty"` // by pod; "": it does not answer
	Agents     map[string]string `json:"agents,omitempty"`     // by node; "": it does not answer
	Skew       []string          `json:"skew,omitempty"`       // versions that differ, one sentence each
}

func versionCommand() *cobra.Command {
	var t target
	var namespace, format string
	var client bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of isthmusctl, the controller and the agents",
		Long: `Print the version of isthmusctl, and those of the controller and the agents in a cluster. A release works with the
minor versions directly before and after it, so that a cluster can be upgraded step by step; other differences are named.

The command needs the same rights as isthmusctl status. With --client it asks no cluster.`,
		Example: `  isthmusctl version --client
  isthmusctl version --kubeconfig a.kubeconfig -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			v := versions{Client: version.Get()}
			var err error
			if !client {
				err = v.ask(cmd.Context(), &t, namespace)
			}
			if format == "json" {
				return errors.Join(writeJSON(cmd.OutOrStdout(), v), err)
			}
			return errors.Join(v.writeText(cmd.OutOrStdout()), err)
		},
	}
	t.bind(cmd.Flags())
	cmd.Flags().StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&client, "client", false, "print only the version of isthmusctl")
	return cmd
}

// ask reads the versions of what runs in a cluster.
func (v *versions) ask(ctx context.Context, t *target, namespace string) error {
	c, err := t.collector(namespace)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	r := &report{Namespace: namespace}
	if err := errors.Join(c.controller(ctx, r), c.agents(ctx, r)); err != nil {
		return err
	}
	v.Controller, v.Agents = map[string]string{}, map[string]string{}
	for _, p := range r.Controller.Pods {
		v.Controller[p.Pod] = ""
		if p.Status != nil {
			v.Controller[p.Pod] = p.Status.Version
		}
	}
	for _, n := range r.Agents.Nodes {
		v.Agents[n.Node] = ""
		if n.Status != nil {
			v.Agents[n.Node] = n.Status.Version
		}
	}
	v.Skew = skew(v.Client.Version, v.Controller, v.Agents)
	return nil
}

// writeText prints v for people.
func (v *versions) writeText(out io.Writer) error {
	w := newTextWriter(out)
	w.line("isthmusctl\t%s", version.Long())
	if v.Controller != nil {
		w.line("controller\t%s", countVersions(v.Controller))
		w.line("agents\t%s", countVersions(v.Agents))
	}
	for _, s := range v.Skew {
		w.line("\n%s", s)
	}
	return w.Flush()
}

// countVersions counts versions: "v0.1.0", or "v0.1.0 (2), v0.2.0 (1)" if they differ.
func countVersions(by map[string]string) string {
	count := map[string]int{}
	for _, v := range by {
		count[v]++
	}
	var all []string
	for _, v := range slices.Sorted(maps.Keys(count)) {
		switch {
		case v == "":
		case len(count) == 1:
			return v
		default:
			all = append(all, fmt.Sprintf("%s (%d)", v, count[v]))
		}
	}
	if len(all) == 0 {
		return "none answers"
	}
	if n := count[""]; n > 0 {
		all = append(all, fmt.Sprintf("no answer (%d)", n))
	}
	return strings.Join(all, ", ")
}

// skew names versions that do not work together: those of programs that are more than one minor version apart. Builds without a
// release have no version to compare.
func skew(client string, controllers, agents map[string]string) []string {
	newest, by := (*semver.Version)(nil), ""
	all := map[string]string{"isthmusctl": client}
	for pod, v := range controllers {
		all["pod "+pod] = v
	}
	for node, v := range agents {
		all["the agent of node "+node] = v
	}
	names := slices.Sorted(maps.Keys(all))
	for _, name := range names {
		if v, err := semver.ParseSemantic(all[name]); err == nil && (newest == nil || newest.LessThan(v)) {
			newest, by = v, name
		}
	}
	var said []string
	for _, name := range names {
		if far, ok := farApart(all[name], all[by]); ok && far {
			said = append(said, fmt.Sprintf("%s is of version %s, and %s of version %s: upgrade by one minor version at a time", name, all[name], by, all[by]))
		}
	}
	return said
}

// farApart reports whether two versions are more than one minor version apart. ok is false if one is not of a release.
func farApart(a, b string) (far, ok bool) {
	v, err1 := semver.ParseSemantic(a)
	w, err2 := semver.ParseSemantic(b)
	if err1 != nil || err2 != nil {
		return false, false
	}
	return v.Major() != w.Major() || max(v.Minor(), w.Minor())-min(v.Minor(), w.Minor()) > 1, true
}

// older reports whether v is older than the newest of versions. Builds without a release are older than none.
func older(v string, versions []string) bool {
	this, err := semver.ParseSemantic(v)
	return err == nil && slices.ContainsFunc(versions, func(other string) bool {
		o, err := semver.ParseSemantic(other)
		return err == nil && this.LessThan(o)
	})
}
