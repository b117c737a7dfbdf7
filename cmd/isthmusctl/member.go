package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func memberCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "member",
		Short:   "Show and change the registrations of members on the broker",
		Example: "  isthmusctl member list --kubeconfig broker.kubeconfig",
		Args:    usage.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(memberListCommand(), memberSetCommand())
	return cmd
}

func bindBrokerNamespace(cmd *cobra.Command, namespace *string) {
	cmd.Flags().StringVar(namespace, "broker-namespace", v1alpha1.DefaultBrokerNamespace, "namespace that is the broker")
}

// oneArgument requires one argument, which is what.
func oneArgument(command, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("%s needs one argument, %s; it got %d", command, what, len(args))
		}
		return nil
	}
}

// oneID requires one argument, the id of a member.
func oneID(command string) cobra.PositionalArgs {
	return cobra.MatchAll(oneArgument(command, "a member's id"), func(_ *cobra.Command, args []string) error {
		return clusterset.ClusterID(args[0]).Validate()
	})
}

// memberListed is one member, as printed by -o json and, in another form, as text.
type memberListed struct {
	v1alpha1.MemberSpec
	Seen    *time.Time            `json:"seen,omitempty"` // the last renewal of its Lease
	Revoked bool                  `json:"revoked,omitempty"`
	Quotas  []membership.QuotaUse `json:"quotas,omitempty"`
	// OverQuota are the quotas that it exceeds on the broker, which refuses new objects of these kinds.
	OverQuota []v1alpha1.OverQuota `json:"overQuota,omitempty"`
	// ExtendedPodCIDRs are pod CIDRs of its nodes inside of its supernets, OutsidePodCIDRs those that other members ignore.
	ExtendedPodCIDRs []netip.Prefix `json:"extendedPodCIDRs,omitempty"`
	OutsidePodCIDRs  []netip.Prefix `json:"outsidePodCIDRs,omitempty"`
	// RefusedServices is the number of its exported Services with endpoints that other members ignore.
	RefusedServices int `json:"refusedServices,omitempty"`
}

// unboundedNote tells that no quota controller runs.
const unboundedNote = "no quota controller runs: nothing bounds what a member stores on the broker; run isthmusctl deploy-broker --quota-controller IMAGE, or isthmus-controller --quota-controller elsewhere"

func memberListCommand() *cobra.Command {
	var t target
	var namespace, format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the members of a ClusterSet",
		Long: `List the members of a ClusterSet, with their addresses, the last renewal of their Leases, and their quotas: what each
member uses of each limit, and how many of its objects wait because a limit is reached. If a quota controller runs, a
member that stores more than its quota on the broker is shown, which creates no more objects of that kind there. Of
tombstones and aggregates it may have as many as services. A former member is shown for an hour.

A member whose nodes have pod CIDRs that it did not register is shown: those inside of its supernets count as registered,
and pods in the others are ignored by other members.`,
		Example: `  isthmusctl member list --kubeconfig broker.kubeconfig
  isthmusctl member list --kubeconfig broker.kubeconfig -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			c, err := t.connect()
			if err != nil {
				return err
			}
			members, running, err := listMembers(cmd.Context(), c, namespace)
			if err != nil {
				return explainBroker(err, t)
			}
			if !running {
				if err := printNotes(cmd, unboundedNote); err != nil {
					return err
				}
			}
			if format == "json" {
				return writeJSON(cmd.OutOrStdout(), members)
			}
			return writeMembers(cmd.OutOrStdout(), members, time.Now())
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	bindBrokerNamespace(cmd, &namespace)
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// listMembers returns the members of the broker in namespace with their quotas, and whether a quota controller runs.
func listMembers(ctx context.Context, c client.Client, namespace string) (members []memberListed, running bool, err error) {
	registered, err := membership.List(ctx, c, namespace)
	if err != nil {
		return nil, false, err
	}
	quotas, err := membership.Quotas(ctx, c, namespace)
	if err != nil {
		return nil, false, err
	}
	over, running, err := membership.OverQuota(ctx, c, namespace)
	if err != nil {
		return nil, false, err
	}
	members = []memberListed{}
	for _, r := range registered {
		id := r.Spec.ClusterID
		m := memberListed{
			MemberSpec: r.Spec, Revoked: r.Revoked, Quotas: quotas[id], OverQuota: over[id],
			ExtendedPodCIDRs: r.Extended, OutsidePodCIDRs: r.Outside, RefusedServices: r.RefusedServices,
		}
		if !r.Seen.IsZero() {
			m.Seen = &r.Seen
		}
		members = append(members, m)
	}
	return members, running, nil
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// writeMembers prints members for people.
func writeMembers(out io.Writer, members []memberListed, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "MEMBER\tSTATE\tSEEN\tPODS\tNODES\tSERVICES\tEXTRA\tCLUSTERSETIPS\tJOINED")
	for _, m := range members {
		state, seen := "member", "never"
		switch {
		case m.LeftAt != nil:
			state = "left"
		case m.Revoked:
			state = "revoked"
		}
		if m.Seen != nil {
			seen = ago(now, *m.Seen)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", m.ClusterID, state, seen, short(m.PodCIDRs), short(m.NodeCIDRs), short(m.ServiceCIDRs),
			short(m.ExtraCIDRs), short(m.ClusterSetIPCIDR), ago(now, m.JoinTime.Time))
	}
	if err := w.Flush(); err != nil { // the errors of all writes
		return err
	}
	if err := errors.Join(writePods(out, members), writeQuotas(out, members)); err != nil {
		return err
	}
	return writeOverQuota(out, members, now)
}

// writePods prints what members state of pods outside of the addresses that they registered.
func writePods(out io.Writer, members []memberListed) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	headed := false
	for _, m := range members {
		var lines []string
		if len(m.ExtendedPodCIDRs) > 0 {
			lines = append(lines, fmt.Sprintf("%s\tadded by the member, inside of %s", short(prefixTexts(m.ExtendedPodCIDRs)), short(m.PodSupernets)))
		}
		if len(m.OutsidePodCIDRs) > 0 {
			lines = append(lines, fmt.Sprintf("%s\tignored by other members; isthmusctl member set %s --pod-cidr registers all of its pod CIDRs", short(prefixTexts(m.OutsidePodCIDRs)), m.ClusterID))
		}
		if m.RefusedServices > 0 {
			lines = append(lines, fmt.Sprintf("in %d services\tendpoints ignored by other members; the conditions of their ServiceExports name them", m.RefusedServices))
		}
		for _, line := range lines {
			if !headed {
				fmt.Fprint(w, "\nLATER PODS\tPOD CIDRS\tSTATE\n")
				headed = true
			}
			fmt.Fprintf(w, "%s\t%s\n", m.ClusterID, line)
		}
	}
	return w.Flush()
}

// prefixTexts formats prefixes.
func prefixTexts(ps []netip.Prefix) (texts []string) {
	for _, p := range ps {
		texts = append(texts, p.String())
	}
	return texts
}

// writeOverQuota prints the quotas that members exceed on the broker.
func writeOverQuota(out io.Writer, members []memberListed, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	headed := false
	for _, m := range members {
		for _, o := range m.OverQuota {
			if !headed {
				fmt.Fprint(w, "\nOVER QUOTA\tSTORES\tLIMIT\tSINCE\n")
				headed = true
			}
			fmt.Fprintf(w, "%s\t%d %s\t%d\t%s; the broker refuses new ones\n", m.ClusterID, o.Used, o.Kind, o.Limit, ago(now, o.Since.Time))
		}
	}
	return w.Flush()
}

// writeQuotas prints what members use of their quotas, and what waits.
func writeQuotas(out io.Writer, members []memberListed) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	headed := false
	for _, m := range members {
		var kinds, uses []string
		for _, q := range m.Quotas {
			use := fmt.Sprintf("%d/%d", q.Used, q.Limit)
			if q.Waiting > 0 {
				use += fmt.Sprintf(" (%d wait)", q.Waiting)
			}
			kinds, uses = append(kinds, strings.ToUpper(q.Kind)), append(uses, use)
		}
		if len(kinds) == 0 {
			continue
		}
		if !headed {
			fmt.Fprintf(w, "\nQUOTAS\t%s\n", strings.Join(kinds, "\t"))
			headed = true
		}
		fmt.Fprintf(w, "%s\t%s\n", m.ClusterID, strings.Join(uses, "\t"))
	}
	return w.Flush()
}

// ago formats the time since t, as kubectl does.
func ago(now, t time.Time) string { return duration.HumanDuration(now.Sub(t)) + " ago" }

// short lists a few of items and the number of the others.
func short(items []string) string {
	const few = 3
	if len(items) > few {
		return fmt.Sprintf("%s and %d more", list(items[:few-1]), len(items)-few+1)
	}
	return list(items)
}

func memberSetCommand() *cobra.Command {
	var t target
	var namespace string
	var pods, nodes, services, extra, supernets, blocks []string
	cmd := &cobra.Command{
		Use:   "set ID",
		Short: "Change the registered addresses of a member",
		Long: `Change the registered addresses of a member: the CIDRs of its endpoints, and its blocks of ClusterSetIPs. Each flag
replaces the addresses of its kind. The other members use them at once; later joins of the cluster keep them.`,
		Example: `  isthmusctl member set a --pod-cidr 10.1.0.0/16,10.11.0.0/16 --kubeconfig broker.kubeconfig
  isthmusctl member set a --extra-cidr 192.0.2.0/24 --kubeconfig broker.kubeconfig
  isthmusctl member set a --pod-supernet 10.128.0.0/10 --kubeconfig broker.kubeconfig`,
		Args: oneID("member set"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var a membership.Addresses
			var vips []netip.Prefix
			err := errors.Join(
				parse(cmd, &a.Pods, "pod-cidr", pods),
				parse(cmd, &a.Nodes, "node-cidr", nodes),
				parse(cmd, &a.Services, "service-cidr", services),
				parse(cmd, &a.Extra, "extra-cidr", extra),
				parse(cmd, &a.Supernets, "pod-supernet", supernets),
				parse(cmd, &vips, "clusterset-ip-cidr", blocks),
			)
			if err != nil {
				return err
			}
			if a.Pods == nil && a.Nodes == nil && a.Services == nil && a.Extra == nil && a.Supernets == nil && vips == nil {
				return errors.New("member set needs a flag: give --pod-cidr, --node-cidr, --service-cidr, --extra-cidr, --pod-supernet or --clusterset-ip-cidr")
			}
			c, err := t.connect()
			if err != nil {
				return err
			}
			m, err := membership.Set(cmd.Context(), c, namespace, args[0], a, vips)
			if err != nil {
				return explainBroker(err, t)
			}
			if len(vips) > 0 {
				note := fmt.Sprintf("the controller of cluster %s uses its new block after the cluster joins again and its Deployment is restarted", args[0])
				if err := printNotes(cmd, note); err != nil {
					return err
				}
			}
			return writeRegistration(cmd.OutOrStdout(), m.Spec)
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	bindBrokerNamespace(cmd, &namespace)
	bindAddresses(f, &pods, &nodes, &services, &extra, &supernets, "unchanged")
	f.StringSliceVar(&blocks, "clusterset-ip-cidr", nil, "blocks of the cluster's ClusterSetIPs, one per family (default: unchanged)")
	return cmd
}

// writeRegistration prints the addresses of a member.
func writeRegistration(out io.Writer, spec v1alpha1.MemberSpec) error {
	var text strings.Builder
	fmt.Fprintf(&text, "member %s\n", spec.ClusterID)
	for _, kind := range []struct {
		name  string
		cidrs []string
	}{
		{"pods", spec.PodCIDRs},
		{"nodes", spec.NodeCIDRs},
		{"services", spec.ServiceCIDRs},
		{"extra", spec.ExtraCIDRs},
		{"supernets", spec.PodSupernets},
		{"ClusterSetIPs", spec.ClusterSetIPCIDR},
	} {
		if len(kind.cidrs) > 0 || kind.name != "supernets" {
			fmt.Fprintf(&text, "  %-13s  %s\n", kind.name, list(kind.cidrs))
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}
