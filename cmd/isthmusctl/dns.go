package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

func dnsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Forward clusterset.local from the cluster's DNS to the agents",
		Long: `Forward clusterset.local from the cluster's DNS to the agents.

The agent of each node answers names of the ClusterSet. Pods query the cluster's DNS, CoreDNS or NodeLocal DNSCache in
front of it, which needs a server block in its Corefile that forwards these names.`,
		Example: `  isthmusctl dns install --dry-run
  isthmusctl dns status`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(dnsInstallCommand(), dnsUninstallCommand(), dnsStatusCommand())
	return cmd
}

// dnsFlags are the flags of all dns commands.
type dnsFlags struct {
	target    target
	namespace string
	names     configNames
	upstreams []string
}

func (d *dnsFlags) bind(f *pflag.FlagSet) {
	d.target.bind(f)
	f.StringVarP(&d.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVar(&d.names.coreDNS, "coredns", usualCoreDNS, "NAMESPACE/NAME of the ConfigMap with CoreDNS's Corefile")
	f.StringVar(&d.names.nodeLocal, "node-local-dns", usualNodeLocal, "NAMESPACE/NAME of the ConfigMap with NodeLocal DNSCache's Corefile")
}

func (d *dnsFlags) bindUpstreams(f *pflag.FlagSet) {
	f.StringSliceVar(&d.upstreams, "upstream", nil, "address[:port] to forward to, in this order, repeatable (default: the node's agent, the Service isthmus-dns, two nodes)")
}

// open validates the flags, connects to the cluster, and reads the Corefiles.
func (d *dnsFlags) open(ctx context.Context) (*collector, []*loadedConfig, error) {
	configs, err := d.names.configs()
	if err != nil {
		return nil, nil, err
	}
	for _, u := range d.upstreams {
		_, addrErr := netip.ParseAddr(u)
		if _, err := netip.ParseAddrPort(u); err != nil && addrErr != nil {
			return nil, nil, fmt.Errorf("--upstream=%s is not an address with an optional port, such as 169.254.20.53", u)
		}
	}
	c, err := d.target.collector(d.namespace)
	if err != nil {
		return nil, nil, err
	}
	found, err := readConfigs(ctx, c.client, configs)
	return c, found, err
}

// upstreamsOf returns the upstreams of the flag, or else those of the cluster.
func (d *dnsFlags) upstreamsOf(ctx context.Context, c *collector, configs []*loadedConfig) ([]string, error) {
	if len(d.upstreams) > 0 {
		return d.upstreams, nil
	}
	var named []string
	for _, s := range configs {
		named = append(named, strings.Fields(s.parts.own)...)
	}
	return c.upstreams(ctx, named)
}

// changeFlags are the flags of commands that change Corefiles.
type changeFlags struct {
	dryRun, yes, wait bool
	timeout           time.Duration
}

func (f *changeFlags) bind(flags *pflag.FlagSet) {
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would change, and change nothing")
	flags.BoolVarP(&f.yes, "yes", "y", false, "do not ask for confirmation")
	flags.BoolVar(&f.wait, "wait", true, "wait until every server has reloaded its Corefile")
	flags.DurationVar(&f.timeout, "timeout", 3*time.Minute, "the longest time to wait: the kubelet updates a changed file within about a minute, and CoreDNS checks it every 30 seconds")
}

func dnsInstallCommand() *cobra.Command {
	var d dnsFlags
	var f changeFlags
	var replace bool
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Add a server block for clusterset.local to CoreDNS and NodeLocal DNSCache",
		Long: `Add a server block for clusterset.local to the Corefile of CoreDNS, and to that of NodeLocal DNSCache where the
cluster has it. The command shows the difference and asks for confirmation, keeps concurrent changes of other writers,
and waits until every server answers queries from the agents of all nodes. A block that is up to date stays; run the
command again when nodes that the block names were removed.

It refuses a Corefile without the plugin reload, and one in which a foreign block has clusterset.local. With --replace it takes the
place of that block in one write, so that pods always get answers, and keeps it as a comment for isthmusctl dns uninstall.`,
		Example: `  isthmusctl dns install --dry-run
  isthmusctl dns install
  isthmusctl dns install --replace    # instead of the name server of another implementation
  isthmusctl dns install --yes --coredns kube-system/rke2-coredns`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, found, err := d.open(cmd.Context())
			if err != nil {
				return err
			}
			upstreams, err := d.upstreamsOf(cmd.Context(), c, found)
			if err != nil {
				return err
			}
			changed, err := f.change(cmd, c, found, installing(upstreams, replace))
			if err != nil || f.dryRun {
				return err
			}
			if f.wait {
				if err := c.awaitReload(cmd.Context(), cmd.ErrOrStderr(), found, upstreams, f.timeout, unanswering); err != nil {
					return err
				}
			}
			return finish(cmd, changed, "the cluster's DNS answers for clusterset.local")
		},
	}
	d.bind(cmd.Flags())
	d.bindUpstreams(cmd.Flags())
	f.bind(cmd.Flags())
	cmd.Flags().BoolVar(&replace, "replace", false, "take the place of a foreign server block for clusterset.local, which isthmusctl dns uninstall puts back")
	return cmd
}

func dnsUninstallCommand() *cobra.Command {
	var d dnsFlags
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the server block for clusterset.local from CoreDNS and NodeLocal DNSCache",
		Long: `Remove the server block of isthmusctl dns install from the Corefiles, put back the one that it replaced, and change nothing else.
The command shows the difference and asks for confirmation. Afterwards pods cannot resolve names of clusterset.local, unless a block
was put back: then the command waits until every server uses it.`,
		Example: `  isthmusctl dns uninstall --dry-run
  isthmusctl dns uninstall --yes`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, found, err := d.open(cmd.Context())
			if err != nil {
				return err
			}
			changed, err := d.uninstall(cmd, c, found, f)
			if err != nil || f.dryRun {
				return err
			}
			return finish(cmd, changed, "the cluster's DNS no longer asks the agents for clusterset.local after it reloads its Corefile")
		},
	}
	d.bind(cmd.Flags())
	f.bind(cmd.Flags())
	return cmd
}

// uninstall removes the server block, and reports whether there was one.
func (d *dnsFlags) uninstall(cmd *cobra.Command, c *collector, found []*loadedConfig, f changeFlags) (bool, error) {
	upstreams, upstreamsErr := d.upstreamsOf(cmd.Context(), c, found) // without agents nothing has to be waited for
	changed, err := f.change(cmd, c, found, uninstalling)
	if err != nil || f.dryRun {
		return changed, err
	}
	if f.wait && upstreamsErr == nil && slices.ContainsFunc(found, func(s *loadedConfig) bool { return s.parts.replaced != "" }) {
		if err := c.awaitReload(cmd.Context(), cmd.ErrOrStderr(), found, upstreams, f.timeout, answering); err != nil {
			return changed, err
		}
	}
	for _, s := range found {
		if changed && !s.parts.reloads() {
			if err := printNotes(cmd, fmt.Sprintf("%s has no plugin reload, so its server uses the old Corefile until it is restarted; see kubectl rollout restart", s)); err != nil {
				return changed, err
			}
		}
	}
	return changed, nil
}

// finish prints the result of a command.
func finish(cmd *cobra.Command, changed bool, done string) error {
	if !changed {
		done = "nothing to change: " + done
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), done)
	return err
}

// change prints the differences that an edit makes and, after confirmation, writes them. It reports whether there are any.
func (f *changeFlags) change(cmd *cobra.Command, c *collector, configs []*loadedConfig, e edit) (bool, error) {
	changed := false
	for _, s := range configs {
		want, err := e(s)
		if err != nil {
			return false, err // before any write
		}
		if want == s.text {
			continue
		}
		changed = true
		if _, err := io.WriteString(cmd.OutOrStdout(), diff("ConfigMap "+s.key.String()+" "+corefileKey, s.text, want)); err != nil {
			return false, err
		}
	}
	if !changed || f.dryRun {
		return changed, nil
	}
	if err := confirm(cmd, f.yes, "Write this?"); err != nil {
		return true, err
	}
	for _, s := range configs {
		if err := s.apply(cmd.Context(), c.client, e); err != nil {
			return true, err
		}
	}
	return true, nil
}

// dnsReport is the state of the cluster's DNS for clusterset.local, as printed by -o json and, in another form, as text.
type dnsReport struct {
	OK        bool           `json:"ok"`
	Upstreams []string       `json:"upstreams"` // the current upstreams of a stub
	Configs   []configReport `json:"configs"`
	Answers   []answered     `json:"answers"`
	Problems  []string       `json:"problems,omitempty"` // each with its remedy
}

type configReport struct {
	Name      string `json:"name"`
	ConfigMap string `json:"configMap"` // namespace/name
	State     string `json:"state"`     // "installed", "outdated", "not installed" or "foreign"
	Reload    bool   `json:"reload"`
}

func dnsStatusCommand() *cobra.Command {
	var d dnsFlags
	var format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether the cluster's DNS answers for clusterset.local",
		Long: `Show the Corefiles with the server block for clusterset.local, and whether every server of the cluster's DNS answers
queries from the agents of all nodes. The exit code is 0 if all of them answer, and 1 if one does not.`,
		Example: `  isthmusctl dns status
  isthmusctl dns status -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			c, found, err := d.open(cmd.Context())
			if err != nil {
				return err
			}
			r, err := c.dnsReport(cmd.Context(), &d, found)
			if err != nil {
				return err
			}
			if format == "json" {
				return errors.Join(writeJSON(cmd.OutOrStdout(), r), r.err())
			}
			return errors.Join(r.writeText(cmd.OutOrStdout()), r.err())
		},
	}
	d.bind(cmd.Flags())
	d.bindUpstreams(cmd.Flags())
	d.target.bindTimeout(cmd.Flags())
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// dnsReport checks the configs and queries their servers.
func (c *collector) dnsReport(ctx context.Context, d *dnsFlags, configs []*loadedConfig) (*dnsReport, error) {
	r := &dnsReport{}
	problem := func(format string, args ...any) { r.Problems = append(r.Problems, fmt.Sprintf(format, args...)) }
	var err error
	if r.Upstreams, err = d.upstreamsOf(ctx, c, configs); err != nil {
		return nil, err
	}
	for _, s := range configs {
		is := configReport{Name: s.name, ConfigMap: s.key.String(), State: "installed", Reload: s.parts.reloads()}
		want, err := s.parts.stub(r.Upstreams)
		switch refusal := s.parts.refusal(); {
		case refusal != nil:
			is.State = "foreign"
		case s.parts.own == "":
			is.State = "not installed"
			problem("%s does not forward to the agents: run isthmusctl dns install", s)
		case err != nil || s.parts.with(&want) != s.text:
			is.State = "outdated"
			problem("%s has an outdated block: run isthmusctl dns install", s)
		}
		if !is.Reload && is.State != "installed" {
			problem("%s has no plugin reload, so its server ignores changes: add it, and restart the server once", s)
		}
		r.Configs = append(r.Configs, is)
	}
	pods, servers, err := c.questions(ctx, configs, r.Upstreams)
	if err != nil {
		return nil, err
	}
	if r.Answers, err = c.askAll(ctx, pods, servers); err != nil {
		return nil, err
	}
	if who := unanswering(r.Answers); who != "" {
		problem("no answer for clusterset.local from %s", who)
	}
	r.OK = len(r.Problems) == 0
	return r, nil
}

// err returns the first problem of a report, or nil.
func (r *dnsReport) err() error {
	if r.OK {
		return nil
	}
	return errors.New(r.Problems[0])
}

// writeText prints r for people.
func (r *dnsReport) writeText(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	line := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) } // Flush reports errors
	line("SERVER\tCONFIGMAP\tSTATE\tRELOADS")
	for _, s := range r.Configs {
		line("%s\t%s\t%s\t%s", s.Name, s.ConfigMap, s.State, yesNo(s.Reload))
	}
	line("\nNODE\tSERVER\tANSWERS")
	for _, a := range r.Answers {
		line("%s\t%s\t%s", a.Node, a.Server, strings.TrimSuffix(yesNo(a.Answers)+": "+a.Reason, ": "))
	}
	line("\nupstreams, in this order: %s", strings.Join(r.Upstreams, " "))
	for _, p := range r.Problems {
		line("\nproblem: %s", p)
	}
	return w.Flush()
}

func yesNo(b bool) string { return map[bool]string{true: "yes", false: "no"}[b] }
