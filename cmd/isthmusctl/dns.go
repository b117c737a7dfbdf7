package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
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
		Short: "Let the cluster's DNS ask the agents for clusterset.local",
		Long: `Let the cluster's DNS ask the agents for clusterset.local.

Names of the ClusterSet are answered by the agent of each node. Pods ask the cluster's DNS, CoreDNS or NodeLocal
DNSCache in front of it, which must know where to ask: by a server block in its Corefile.`,
		Example: `  isthmusctl dns install --dry-run
  isthmusctl dns status`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(dnsInstallCommand(), dnsUninstallCommand(), dnsStatusCommand())
	return cmd
}

// dnsFlags are what all commands of this group take.
type dnsFlags struct {
	target    target
	namespace string
	names     siteNames
	upstreams []string
}

func (d *dnsFlags) bind(f *pflag.FlagSet) {
	d.target.bind(f)
	f.StringVarP(&d.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVar(&d.names.coreDNS, "coredns", usualCoreDNS, "NAMESPACE/NAME of the ConfigMap with CoreDNS's Corefile")
	f.StringVar(&d.names.nodeLocal, "node-local-dns", usualNodeLocal, "NAMESPACE/NAME of the ConfigMap with NodeLocal DNSCache's Corefile")
}

func (d *dnsFlags) bindUpstreams(f *pflag.FlagSet) {
	f.StringSliceVar(&d.upstreams, "upstream", nil, "address[:port] that is asked, in this order, repeatable (default: the node's agent, the Service isthmus-dns, two nodes)")
}

// open validates and connects.
func (d *dnsFlags) open() (*collector, []site, error) {
	sites, err := d.names.sites()
	if err != nil {
		return nil, nil, err
	}
	for _, u := range d.upstreams {
		_, addrErr := netip.ParseAddr(u)
		if _, err := netip.ParseAddrPort(u); err != nil && addrErr != nil {
			return nil, nil, fmt.Errorf("--upstream=%s is not an address with an optional port, such as 169.254.20.53", u)
		}
	}
	cfg, _, err := d.target.config()
	if err != nil {
		return nil, nil, err
	}
	c, err := newCollector(cfg, d.namespace)
	return c, sites, err
}

// asked returns the upstreams that a person named, or those of the cluster as it is.
func (d *dnsFlags) asked(ctx context.Context, c *collector, sites []*configured) ([]string, error) {
	if len(d.upstreams) > 0 {
		return d.upstreams, nil
	}
	var named []string
	for _, s := range sites {
		named = append(named, strings.Fields(s.parts.own)...)
	}
	return c.upstreams(ctx, named)
}

// changeFlags are how carefully something is changed.
type changeFlags struct {
	dryRun, yes, wait bool
	timeout           time.Duration
}

func (f *changeFlags) bind(flags *pflag.FlagSet) {
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would change, and change nothing")
	flags.BoolVarP(&f.yes, "yes", "y", false, "do not ask")
}

func dnsInstallCommand() *cobra.Command {
	var d dnsFlags
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Add a server block for clusterset.local to CoreDNS and NodeLocal DNSCache",
		Long: `Add a server block for clusterset.local to the Corefile of CoreDNS, and to that of NodeLocal DNSCache where the
cluster has it. It shows the difference and asks before it changes anything, keeps what others change meanwhile,
waits until every server has read the change, and lets the agents of all nodes ask them for a name. Where it is
done already nothing changes; run it again when nodes that the block names have gone.

It refuses where somebody else's block has clusterset.local, and where a Corefile has no plugin reload.`,
		Example: `  isthmusctl dns install --dry-run
  isthmusctl dns install
  isthmusctl dns install --yes --coredns kube-system/rke2-coredns`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, sites, err := d.open()
			if err != nil {
				return err
			}
			found, err := readSites(cmd.Context(), c.client, sites)
			if err != nil {
				return err
			}
			upstreams, err := d.asked(cmd.Context(), c, found)
			if err != nil {
				return err
			}
			changed, err := f.change(cmd, c, found, installing(upstreams))
			if err != nil || f.dryRun {
				return err
			}
			if f.wait {
				if err := c.awaitAnswers(cmd.Context(), cmd.ErrOrStderr(), found, upstreams, f.timeout); err != nil {
					return err
				}
			}
			return finish(cmd, changed, "the cluster's DNS answers for clusterset.local")
		},
	}
	d.bind(cmd.Flags())
	d.bindUpstreams(cmd.Flags())
	f.bind(cmd.Flags())
	cmd.Flags().BoolVar(&f.wait, "wait", true, "wait until every server answers")
	cmd.Flags().DurationVar(&f.timeout, "timeout", 3*time.Minute, "how long to wait at most: the kubelet hands a changed file on within a minute or so, and CoreDNS looks at it every 30 seconds")
	return cmd
}

func dnsUninstallCommand() *cobra.Command {
	var d dnsFlags
	var f changeFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take the server block for clusterset.local out of CoreDNS and NodeLocal DNSCache",
		Long: `Take out what isthmusctl dns install has put into the Corefiles, and nothing else. It shows the difference and asks
before it changes anything. From then on pods do not find names of clusterset.local.`,
		Example: `  isthmusctl dns uninstall --dry-run
  isthmusctl dns uninstall --yes`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, sites, err := d.open()
			if err != nil {
				return err
			}
			found, err := readSites(cmd.Context(), c.client, sites)
			if err != nil {
				return err
			}
			changed, err := f.change(cmd, c, found, uninstalling)
			if err != nil || f.dryRun {
				return err
			}
			for _, s := range found {
				if changed && !s.parts.reloads() {
					if err := tell(cmd, fmt.Sprintf("%s has no plugin reload: what runs it goes on with the old one until it is restarted, see kubectl rollout restart", s)); err != nil {
						return err
					}
				}
			}
			return finish(cmd, changed, "the cluster's DNS knows nothing of clusterset.local any more, as soon as it has read its Corefile again")
		},
	}
	d.bind(cmd.Flags())
	d.target.bindTimeout(cmd.Flags())
	f.bind(cmd.Flags())
	return cmd
}

// finish says how a command ended.
func finish(cmd *cobra.Command, changed bool, done string) error {
	if !changed {
		done = "nothing to change: " + done
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), done)
	return err
}

// change shows what an edit does to sites and, when it may, does it. It returns whether there is a difference.
func (f *changeFlags) change(cmd *cobra.Command, c *collector, sites []*configured, e edit) (bool, error) {
	changed := false
	for _, s := range sites {
		want, err := e(s)
		if err != nil {
			return false, err // before anything is written
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
	if err := f.confirm(cmd); err != nil {
		return true, err
	}
	for _, s := range sites {
		if err := s.apply(cmd.Context(), c.client, e); err != nil {
			return true, err
		}
	}
	return true, nil
}

// confirm asks the person whether to go on, unless that was said already.
func (f *changeFlags) confirm(cmd *cobra.Command) error {
	if f.yes {
		return nil
	}
	if _, err := fmt.Fprint(cmd.ErrOrStderr(), "Write this? [y/N] "); err != nil {
		return err
	}
	said, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	switch strings.ToLower(strings.TrimSpace(said)) {
	case "y", "yes":
		return nil
	}
	return errors.New("nothing was written; answer y, or give --yes where nobody can answer")
}

// dnsReport is how the cluster's DNS does with clusterset.local. It is what -o json prints; the text is made of it.
type dnsReport struct {
	OK        bool         `json:"ok"`
	Upstreams []string     `json:"upstreams"` // what a stub should ask now
	Sites     []siteReport `json:"sites"`
	Answers   []answered   `json:"answers"`
	Problems  []string     `json:"problems,omitempty"` // each with what to do
}

type siteReport struct {
	Name      string `json:"name"`
	ConfigMap string `json:"configMap"` // namespace/name
	State     string `json:"state"`     // "installed", "outdated", "not installed" or "somebody else's"
	Reload    bool   `json:"reload"`
}

func dnsStatusCommand() *cobra.Command {
	var d dnsFlags
	var format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say whether the cluster's DNS answers for clusterset.local",
		Long: `Say in which Corefiles the server block for clusterset.local stands, and whether every server of the cluster's DNS
answers for it, as the agents of all nodes hear. It exits 0 when all do, and 1 when one does not.`,
		Example: `  isthmusctl dns status
  isthmusctl dns status -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			c, sites, err := d.open()
			if err != nil {
				return err
			}
			found, err := readSites(cmd.Context(), c.client, sites)
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

// dnsReport looks at sites and asks their servers.
func (c *collector) dnsReport(ctx context.Context, d *dnsFlags, sites []*configured) (*dnsReport, error) {
	r := &dnsReport{}
	problem := func(format string, args ...any) { r.Problems = append(r.Problems, fmt.Sprintf(format, args...)) }
	var err error
	if r.Upstreams, err = d.asked(ctx, c, sites); err != nil {
		return nil, err
	}
	for _, s := range sites {
		is := siteReport{Name: s.name, ConfigMap: s.key.String(), State: "installed", Reload: s.parts.reloads()}
		want, err := s.parts.stub(r.Upstreams)
		switch refusal := s.parts.refusal(); {
		case refusal != nil:
			is.State = "somebody else's"
		case s.parts.own == "":
			is.State = "not installed"
			problem("%s does not ask the agents: run isthmusctl dns install", s)
		case err != nil || s.parts.with(&want) != s.text:
			is.State = "outdated"
			problem("%s does not ask as it should, or whom it should: run isthmusctl dns install", s)
		}
		if !is.Reload && is.State != "installed" {
			problem("%s has no plugin reload, so nobody reads a change: add it, and restart what runs it once", s)
		}
		r.Sites = append(r.Sites, is)
	}
	pods, servers, err := c.questions(ctx, sites, r.Upstreams)
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

// err is the error of a report that is not well, or nil.
func (r *dnsReport) err() error {
	if r.OK {
		return nil
	}
	return errors.New(r.Problems[0])
}

// writeText prints r as people read it.
func (r *dnsReport) writeText(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	line := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) } // Flush reports errors
	line("WHERE\tCONFIGMAP\tSTATE\tRELOADS")
	for _, s := range r.Sites {
		line("%s\t%s\t%s\t%s", s.Name, s.ConfigMap, s.State, yesNo(s.Reload))
	}
	line("\nNODE\tASKED\tANSWERS")
	for _, a := range r.Answers {
		line("%s\t%s\t%s", a.Node, a.Server, strings.TrimSuffix(yesNo(a.Answers)+": "+a.Reason, ": "))
	}
	line("\nasked are, in this order: %s", strings.Join(r.Upstreams, " "))
	for _, p := range r.Problems {
		line("\nproblem: %s", p)
	}
	return w.Flush()
}

func yesNo(b bool) string { return map[bool]string{true: "yes", false: "no"}[b] }
