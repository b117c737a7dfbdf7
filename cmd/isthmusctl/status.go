package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

func statusCommand() *cobra.Command {
	var t target
	var namespace, format string
	var wait bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of Isthmus in a cluster",
		Long: `Show the state of Isthmus in a cluster: its membership, the controller and its broker, the agent of every
node, and the exported and imported Services. The exit code is 0 if everything is ready, and 1 if not or if the
API server does not answer. With --wait it waits until everything is ready, and fails after --timeout. A Service
in conflict is shown, but does not make Isthmus unready.

To ask the controller and the agents, the command needs the rights to reach pods through the API server (get
pods/proxy) and to create a token of ServiceAccount isthmus-observer, in the namespace of Isthmus.`,
		Example: `  isthmusctl status
  isthmusctl status --wait --timeout 5m
  isthmusctl status -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			t.timeout = min(defaultTimeout, timeout)
			c, err := t.collector(namespace)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			var r *report
			if wait {
				r, err = c.await(ctx, cmd.ErrOrStderr(), timeout)
			} else {
				r, err = c.collect(ctx)
				if err == nil {
					err = r.unready()
				}
			}
			if r == nil {
				return err
			}
			if format == "json" {
				return errors.Join(writeJSON(cmd.OutOrStdout(), r), err)
			}
			return errors.Join(r.writeText(cmd.OutOrStdout()), err)
		},
	}
	f := cmd.Flags()
	t.bind(f)
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVarP(&format, "output", "o", "text", "text or json")
	f.BoolVar(&wait, "wait", false, "wait until everything is ready")
	f.DurationVar(&timeout, "timeout", 2*time.Minute, "the longest time to wait")
	return cmd
}

// await collects reports until everything is ready, and prints what it waits for at each change. With an error it returns
// the last report, if there was one.
func (c *collector) await(ctx context.Context, progress io.Writer, limit time.Duration) (*report, error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last *report
	var told string
	for {
		r, err := c.collect(ctx)
		var waiting string
		switch {
		case ctx.Err() != nil: // an interrupted report proves nothing
		case err != nil:
			waiting = sentence(err)
		case r.Ready:
			return r, nil
		default:
			last, waiting = r, strings.Join(r.Waiting, "\n  ")
		}
		if waiting != "" && waiting != told {
			told = waiting
			if _, err := fmt.Fprintf(progress, "waiting for:\n  %s\n", waiting); err != nil {
				return last, err
			}
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return last, ctx.Err()
			}
			return last, fmt.Errorf("not ready after %s:\n  %s", limit, told)
		case <-tick.C:
		}
	}
}

// report is the state of one cluster, as printed by -o json and, in another form, as text.
type report struct {
	Ready     bool          `json:"ready"`
	Waiting   []string      `json:"waiting,omitempty"` // reasons why it is not ready, one sentence each
	Namespace string        `json:"namespace"`
	Member    *memberReport `json:"member,omitempty"`
	// Federation is the cluster's federation, nil without one. With a federation and no Member it needs no broker.
	Federation *federationReport `json:"federation,omitempty"`
	Controller controllerReport  `json:"controller"`
	Agents     agentsReport      `json:"agents"`
	Services   servicesReport    `json:"services"`
}

// unready returns the error of a report that is not ready, or nil.
func (r *report) unready() error {
	switch n := len(r.Waiting); n {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("not ready: %s", r.Waiting[0])
	default:
		return fmt.Errorf("not ready: %s, and %d more", r.Waiting[0], n-1)
	}
}

type memberReport struct {
	ClusterID     string    `json:"clusterID"`
	ClusterSetID  string    `json:"clusterSetID"`
	ClusterSetIPs []string  `json:"clusterSetIPs"`
	Joined        time.Time `json:"joined"`
}

type federationReport struct {
	ClusterID  string `json:"clusterID"`
	ClusterSet string `json:"clusterSet"`
	Members    int    `json:"members"` // 0 in a child
}

type servicesReport struct {
	Exports    int               `json:"exports"`
	Imports    int               `json:"imports"`
	Conditions []conditionReport `json:"conditions,omitempty"` // conditions that need attention
	// Foreign are ServiceImports of another controller in a member, as namespace/name: neither imported nor served.
	Foreign []string `json:"foreign,omitempty"`
}

type conditionReport struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"` // namespace/name
	Type    string `json:"type"`
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message,omitempty"`
}

// textWriter writes aligned lines. Its Flush reports the errors of all of them.
type textWriter struct{ *tabwriter.Writer }

func newTextWriter(out io.Writer) textWriter {
	return textWriter{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
}

func (w textWriter) line(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }

// writeText prints r for people.
func (r *report) writeText(out io.Writer) error {
	w := newTextWriter(out)
	r.writeCluster(w)
	r.writeMembers(w)
	r.Agents.writeNodes(w)
	r.writeConditions(w)
	r.writeHolds(w)
	if len(r.Waiting) > 0 {
		w.line("\nNot ready:")
		for _, s := range r.Waiting {
			w.line("  %s", s)
		}
	} else {
		w.line("\nready")
	}
	return w.Flush()
}

// writeCluster prints the summary of the cluster, one line per component.
func (r *report) writeCluster(w textWriter) {
	if m := r.Member; m != nil {
		w.line("cluster\t%s of ClusterSet %s, ClusterSetIPs %s", m.ClusterID, m.ClusterSetID, list(m.ClusterSetIPs))
	} else if r.Federation == nil {
		w.line("cluster\tnot a member")
	}
	switch f := r.Federation; {
	case f == nil:
	case f.Members == 0:
		w.line("federation\t%s, %s is a child", f.ClusterSet, f.ClusterID)
	default:
		w.line("federation\t%s, %s is a supervisor of %d members", f.ClusterSet, f.ClusterID, f.Members)
	}
	w.line("controller\t%d of %d ready", r.Controller.Ready, r.Controller.Desired)
	if b := r.Controller.Broker; b != nil {
		w.line("broker\t%s, %s", b.Server, map[bool]string{true: "reachable", false: "not reachable"}[b.Reachable])
		if b.Credential != nil {
			w.line("credential\t%s", credentialText(*b.Credential))
		}
	}
	w.line("agents\t%d of %d ready", r.Agents.Ready, r.Agents.Desired)
	if dns := r.Agents.clusterDNS(); dns != "" {
		w.line("cluster DNS\t%s", dns)
	}
	w.line("services\t%d exported here, %d imported", r.Services.Exports, r.Services.Imports)
}

// credentialText describes the member's token for the broker.
func credentialText(c status.Credential) string {
	text := "does not expire"
	if !c.Expires.IsZero() {
		text = "valid until " + since(c.Expires)
	}
	if c.Error != "" {
		return text + ", not renewed: " + c.Error
	}
	return text
}

// writeMembers prints the table of the other members.
func (r *report) writeMembers(w textWriter) {
	if len(r.Controller.Members) == 0 {
		return
	}
	w.line("\nMEMBER\tSTATE\tSINCE\tHELD")
	for _, m := range r.Controller.Members {
		w.line("%s\t%s\t%s\t%d", m.ID, m.State, since(m.Since), m.Held)
	}
}

// writeNodes prints the table of nodes, and the optional capabilities that they lack.
func (a agentsReport) writeNodes(w textWriter) {
	if len(a.Nodes) > 0 {
		w.line("\nNODE\tREADY\tHOOKS\tFRONTENDS\tBACKENDS\tDNS\tVERSION")
	}
	for _, n := range a.Nodes {
		if n.Status == nil {
			w.line("%s\tno\t-\t-\t-\t-\t-", n.Node)
			continue
		}
		s := n.Status
		attached := 0
		for _, h := range s.Dataplane.Hooks {
			if h.Attached {
				attached++
			}
		}
		w.line("%s\t%s\t%d/%d\t%d\t%d\t%s\t%s", n.Node, yesNo(s.Ready),
			attached, len(s.Dataplane.Hooks), s.Dataplane.Frontends, s.Dataplane.Backends, list(s.DNS.Listening), s.Version)
	}
	if missing := a.missing(); len(missing) > 0 {
		w.line("\nMissing optional capabilities:")
		for _, m := range missing {
			w.line("  %s", m)
		}
	}
}

// writeConditions prints the table of conditions that need attention.
func (r *report) writeConditions(w textWriter) {
	if len(r.Services.Conditions) == 0 {
		return
	}
	w.line("\nKIND\tNAME\tCONDITION\tREASON\tMESSAGE")
	for _, c := range r.Services.Conditions {
		w.line("%s\t%s\t%s=%s\t%s\t%s", c.Kind, c.Name, c.Type, c.Status, c.Reason, strings.ReplaceAll(c.Message, "\n", " "))
	}
}

// writeHolds prints the drained members, the held exports and the imports that nobody serves.
func (r *report) writeHolds(w textWriter) {
	if n := len(r.Services.Foreign); n > 0 {
		w.line("\nnot imported: %s written by another controller, so agents do not serve %s: %s; isthmusctl explain SERVICE says what to do",
			map[bool]string{true: "1 ServiceImport is", false: strconv.Itoa(n) + " ServiceImports are"}[n == 1], map[bool]string{true: "it", false: "them"}[n == 1], fewOf(r.Services.Foreign))
	}
	for _, d := range r.Agents.drained() {
		w.line("\ndrained: member %s does not answer packets from %s; new connections there go to other clusters", d.member, d.nodes)
	}
	for _, m := range r.Controller.Members {
		if m.Held > 0 {
			w.line("\nheld: %d exports of member %s vanished together and stay imported; if this is intended, run isthmusctl release-hold %s", m.Held, m.ID, m.ID)
		}
	}
}

// since formats a time; "-" for the zero time.
func since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// drained returns the drained members with their nodes, sorted by member.
func (a agentsReport) drained() (all []drainedMember) {
	on := map[string][]string{}
	for _, n := range a.Nodes {
		if n.Status != nil {
			for _, member := range n.Status.Dataplane.Drained {
				on[member] = append(on[member], n.Node)
			}
		}
	}
	for _, member := range slices.Sorted(maps.Keys(on)) {
		all = append(all, drainedMember{member, nodesText(on[member])})
	}
	return all
}

// nodesText names a few nodes for a sentence.
func nodesText(nodes []string) string {
	return map[bool]string{true: "node ", false: "nodes "}[len(nodes) == 1] + fewOf(nodes)
}

// fewOf names the first ones and counts the rest.
func fewOf(names []string) string {
	const few = 3
	text := strings.Join(names[:min(len(names), few)], ", ")
	if more := len(names) - few; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// clusterDNS describes whether the cluster's DNS answers for clusterset.local; "" if no node knows.
func (a agentsReport) clusterDNS() string {
	var answers int
	var silent []string
	var reason string
	for _, n := range a.Nodes {
		if n.Status == nil || n.Status.DNS.Cluster == nil {
			continue
		}
		if is := n.Status.DNS.Cluster; is.Answers {
			answers++
		} else {
			silent, reason = append(silent, n.Node), is.Reason
		}
	}
	switch {
	case len(silent) > 0:
		return fmt.Sprintf("does not answer for clusterset.local on %s: %s", nodesText(silent), reason)
	case answers > 0:
		return "answers for clusterset.local"
	}
	return ""
}

// drainedMember is a member and a phrase that names its nodes.
type drainedMember struct{ member, nodes string }

// missing returns the optional capabilities that nodes lack, each with its nodes.
func (a agentsReport) missing() []string {
	nodes := map[string][]string{}
	for _, n := range a.Nodes {
		if n.Status != nil {
			for _, m := range n.Status.MissingCapabilities {
				nodes[m] = append(nodes[m], n.Node)
			}
		}
	}
	var lines []string
	for m, on := range nodes {
		lines = append(lines, fmt.Sprintf("%s (%s)", m, strings.Join(on, ", ")))
	}
	slices.Sort(lines)
	return lines
}
