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
	"github.com/spf13/pflag"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/cli/values"
	"helm.sh/helm/v4/pkg/getter"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/cmd/isthmusctl/internal/installation"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	gatewaycrds "github.com/isthmus-net/isthmus/gateway/api/crds"
)

// Steps of an upgrade before those of the chart.
const (
	stepBroker      = "broker"
	stepDefinitions = "definitions"
)

// busyTimeout bounds each request of an upgrade: an API server that gets new definitions, on a busy machine, answers late.
const busyTimeout = time.Minute

// upgradeFlags are the flags of upgrade.
type upgradeFlags struct {
	target, broker             target
	namespace, brokerNamespace string
	release, chart, format     string
	values                     values.Options
	plan, apply, plain         bool
	yes, force                 bool
	timeout                    time.Duration
}

func upgradeCommand() *cobra.Command {
	var u upgradeFlags
	cmd := &cobra.Command{
		Use:   "upgrade --chart CHART {--plan | --apply}",
		Short: "Upgrade Isthmus in a cluster, step by step",
		Long: `Upgrade Isthmus in a cluster to the version of this isthmusctl, step by step: the broker, definitions and admission policies,
controllers, agents, gateways. The last three wait until their pods are ready. --plan shows what every step would change, and what is
skipped and why. --apply shows it, asks, and does it. Traffic continues: the kernel forwards while an agent is replaced.

Give --broker-kubeconfig for the first member of a ClusterSet; the other members share that broker. Settings, members and invitations stay,
and so do the values of the Helm release; --set and --values change them, and KEY=null removes one.

A release works with the minor versions directly before and after it. A chart of the version before goes back in the reverse order, with the
isthmusctl of that version; the broker and the definitions then stay as they are. After a failure, run the command again to continue, or
"helm rollback" to the revision that it names.`,
		Example: `  isthmusctl upgrade --chart oci://registry.example.org/team/charts/isthmus --broker-kubeconfig broker.kubeconfig --plan
  isthmusctl upgrade --chart oci://registry.example.org/team/charts/isthmus --broker-kubeconfig broker.kubeconfig --apply
  isthmusctl upgrade --chart isthmus-0.2.0.tgz --apply --yes --context west`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return u.run(cmd) },
	}
	u.bind(cmd.Flags())
	return cmd
}

func (u *upgradeFlags) bind(f *pflag.FlagSet) {
	u.target.bind(f)
	u.broker.bindBroker(f)
	f.StringVarP(&u.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVar(&u.brokerNamespace, "broker-namespace", v1alpha1.DefaultBrokerNamespace, "namespace that is the broker")
	f.StringVar(&u.release, "release", "isthmus", "name of the Helm release")
	f.StringVar(&u.chart, "chart", "", "chart of this version: a file, a folder, or oci://REGISTRY/charts/isthmus")
	f.BoolVar(&u.plain, "plain-http", false, "the chart's registry has no TLS")
	f.StringArrayVar(&u.values.Values, "set", nil, "value of the chart to change, such as agent.maxUnavailable=2, repeatable")
	f.StringSliceVar(&u.values.ValueFiles, "values", nil, "file with values of the chart to change, repeatable")
	f.BoolVar(&u.plan, "plan", false, "show what would change, and change nothing")
	f.BoolVar(&u.apply, "apply", false, "show what changes, ask for confirmation, and upgrade")
	f.BoolVarP(&u.yes, "yes", "y", false, "do not ask for confirmation")
	f.BoolVar(&u.force, "force-conflicts", false, "take over fields of the chart's objects that others have changed")
	f.DurationVar(&u.timeout, "timeout", 10*time.Minute, "the longest time that a step waits without another pod becoming ready, and, up to a minute, a request for its answer")
	f.StringVarP(&u.format, "output", "o", "text", "format of the plan: text or json")
}

func (u *upgradeFlags) run(cmd *cobra.Command) error {
	if u.plan == u.apply {
		return errors.New("give one of --plan, which only shows what would change, and --apply")
	}
	if err := tables.CheckFormat(u.format); err != nil {
		return err
	}
	u.target.timeout = min(u.timeout, busyTimeout)
	up, err := u.prepare(cmd)
	if err != nil {
		return err
	}
	write := up.writeText
	if u.format == "json" {
		write = func(out io.Writer) error { return writeJSON(out, up) }
	}
	if err := write(cmd.OutOrStdout()); err != nil || u.plan {
		return err
	}
	if up.nothing() {
		return nil
	}
	if err := confirm(cmd, u.yes, "Upgrade?"); err != nil {
		return err
	}
	return up.run(cmd.Context(), cmd.ErrOrStderr(), u.timeout)
}

// upgrade is a planned upgrade, as printed by -o json and, in another form, as text.
type upgrade struct {
	Release   string         `json:"release"`
	Namespace string         `json:"namespace"`
	Back      int            `json:"back,omitempty"` // revision of the Helm release to roll back to
	From      []string       `json:"from,omitempty"` // versions that are installed
	To        string         `json:"to"`
	Steps     []*upgradeStep `json:"steps"`
	helmFlags string         // those that name the cluster to helm
}

// upgradeStep is a step of an upgrade.
type upgradeStep struct {
	installation.Step
	Skipped string `json:"skipped,omitempty"` // why nothing is done
	do      func(context.Context, time.Duration) error
}

// prepare reads the cluster and the chart, and plans. It changes nothing.
func (u *upgradeFlags) prepare(cmd *cobra.Command) (*upgrade, error) {
	member, err := u.target.connect()
	if err != nil {
		return nil, err
	}
	cfg, _, err := u.target.config()
	if err != nil {
		return nil, err
	}
	up := &upgrade{Release: u.release, Namespace: u.namespace, To: version.String(), helmFlags: u.target.helmFlags()}
	installed, err := installation.Open(cfg, u.namespace, u.release)
	switch {
	case errors.Is(err, installation.ErrNotFound):
		up.Steps = append(up.Steps, skip("chart", fmt.Sprintf("there is no Helm release %s in namespace %s; if Isthmus was installed from isthmus.yaml, apply that of this version after this command", u.release, u.namespace)))
	case err != nil:
		return nil, err
	default:
		up.From, up.Back = installed.Versions(), installed.Before(up.To)
	}
	if err := checkDistance(up.From, up.To); err != nil {
		return nil, err
	}
	var plan *installation.Plan
	if installed != nil {
		running, err := installed.Running(cmd.Context())
		if err == nil {
			err = checkRunning(running, up.To)
		}
		if err != nil {
			return nil, err
		}
		if plan, err = u.planChart(cmd.Context(), up, installed); err != nil {
			return nil, err
		}
	}
	broker, err := u.planBroker(cmd, plan, up.older())
	if err != nil {
		return nil, err
	}
	definitions, err := planDefinitions(cmd.Context(), member, u.namespace, plan, up.older())
	if err != nil {
		return nil, err
	}
	up.Steps = append([]*upgradeStep{broker, definitions}, up.Steps...)
	federation := &federationv1alpha1.Federation{}
	if err := member.Get(cmd.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, federation); err == nil {
		up.Steps = append(up.Steps, skip("federation", "isthmusctl federation create, with the same clusters as before, writes the rights of its members anew"))
	}
	return up, nil
}

// older reports whether the upgrade goes back to an older version.
func (up *upgrade) older() bool { return older(up.To, up.From) }

// planChart plans the steps of the chart. Without a chart they are skipped.
func (u *upgradeFlags) planChart(ctx context.Context, up *upgrade, installed *installation.Installation) (*installation.Plan, error) {
	if u.chart == "" {
		up.Steps = append(up.Steps, skip("chart", "no --chart"))
		return nil, nil //nolint:nilnil // documented
	}
	to, err := loadChart(u.chart, u.plain)
	if err != nil {
		return nil, fmt.Errorf("--chart: %w", err)
	}
	if err := checkChart(up.To, to); err != nil {
		return nil, err
	}
	changed, err := u.values.MergeValues(getter.Providers{})
	if err != nil {
		return nil, fmt.Errorf("--set or --values: %w", err)
	}
	plan, err := installed.Plan(ctx, to, installation.Options{Values: changed, Back: up.older(), Force: u.force})
	if err != nil {
		return nil, err
	}
	for _, s := range plan.Steps {
		step := &upgradeStep{Step: s}
		switch {
		case s.Empty() && !plan.Installs(s.Name):
			step.Skipped = "not installed"
		case s.Empty():
			step.Skipped = "nothing changes"
		default:
			step.do = func(ctx context.Context, timeout time.Duration) error { return plan.Apply(ctx, s.Name, timeout) }
		}
		up.Steps = append(up.Steps, step)
	}
	return plan, nil
}

// planBroker plans the step of the broker.
func (u *upgradeFlags) planBroker(cmd *cobra.Command, plan *installation.Plan, back bool) (*upgradeStep, error) {
	if u.broker.kubeconfig == "" && u.broker.context == "" {
		return skip(stepBroker, "no --broker-kubeconfig; a ClusterSet's broker is upgraded once, with its first member"), nil
	}
	if back {
		return skip(stepBroker, "members of the version before work with it"), nil
	}
	broker, err := u.broker.broker(cmd, u.target)
	if err != nil {
		return nil, err
	}
	image := ""
	if plan != nil {
		image = plan.Image("isthmus-controller")
	}
	planned, err := membership.PlanBroker(cmd.Context(), broker, u.brokerNamespace, image)
	if err != nil {
		return nil, explainBroker(err, u.broker)
	}
	return stepOf(stepBroker, planned), nil
}

// planDefinitions plans the step of definitions and admission policies in the cluster itself. plan may be nil.
func planDefinitions(ctx context.Context, member client.Client, namespace string, plan *installation.Plan, back bool) (*upgradeStep, error) {
	if back {
		return skip(stepDefinitions, "programs of the version before work with them"), nil
	}
	var more []*apiextensionsv1.CustomResourceDefinition
	gateways, err := gatewaycrds.GatewayNodes()
	if err != nil {
		return nil, err
	}
	err = member.Get(ctx, client.ObjectKeyFromObject(gateways), &apiextensionsv1.CustomResourceDefinition{})
	if err == nil || plan != nil && plan.Has("isthmus-gateway-controller") {
		more = append(more, gateways)
	}
	planned, err := membership.PlanMember(ctx, member, namespace, more...)
	if err != nil {
		return nil, err
	}
	return stepOf(stepDefinitions, planned), nil
}

func skip(name, why string) *upgradeStep {
	return &upgradeStep{Step: installation.Step{Name: name}, Skipped: why}
}

// stepOf returns the step that does a planned upgrade.
func stepOf(name string, planned membership.Upgrade) *upgradeStep {
	s := &upgradeStep{Step: installation.Step{Name: name}}
	if len(planned.Objects) == 0 {
		s.Skipped = "nothing changes"
		return s
	}
	for _, o := range planned.Objects {
		s.Changes = append(s.Changes, installation.ObjectChange{Object: o.Object, Change: installation.Change(o.Change)})
	}
	s.do = func(ctx context.Context, _ time.Duration) error { return planned.Apply(ctx) }
	return s
}

// nothing reports whether all steps are skipped.
func (up *upgrade) nothing() bool {
	return !slices.ContainsFunc(up.Steps, func(s *upgradeStep) bool { return s.do != nil })
}

// run does the steps, and says what stands after a failure.
func (up *upgrade) run(ctx context.Context, out io.Writer, timeout time.Duration) error {
	var done []string
	for _, s := range up.Steps {
		if s.do == nil {
			continue
		}
		start := time.Now()
		fmt.Fprintf(out, "%s: ...\n", s.Name)
		if err := s.do(ctx, timeout); err != nil {
			return fmt.Errorf("%s: %w; %s", s.Name, err, up.remedy(done))
		}
		fmt.Fprintf(out, "%s: done in %s\n", s.Name, time.Since(start).Round(time.Second))
		done = append(done, s.Name)
	}
	fmt.Fprintf(out, "upgraded to %s: %s%s; next: isthmusctl status --wait\n", up.To, strings.Join(done, ", "), up.wayBack())
	return nil
}

// remedy says how to go on after a failure.
func (up *upgrade) remedy(done []string) string {
	before := "no step was done before"
	if len(done) > 0 {
		before = strings.Join(done, ", ") + " are of " + up.To + " already, which works with the rest"
	}
	return before + "; run the command again to continue" + up.wayBack()
}

// wayBack returns the command that undoes the steps of the chart, after a comma, or nothing.
func (up *upgrade) wayBack() string {
	if up.Back == 0 {
		return ""
	}
	return fmt.Sprintf(", or go back: helm rollback %s %d --namespace %s%s", up.Release, up.Back, up.Namespace, up.helmFlags)
}

// writeText prints the plan for people.
func (up *upgrade) writeText(out io.Writer) error {
	from := "no Helm release"
	if len(up.From) > 0 {
		from = strings.Join(up.From, " and ")
	}
	fmt.Fprintf(out, "Helm release %s in namespace %s: %s -> %s\n", up.Release, up.Namespace, from, up.To)
	for _, s := range up.Steps {
		if s.Skipped != "" {
			fmt.Fprintf(out, "\n%s: skipped: %s\n", s.Name, s.Skipped)
			continue
		}
		fmt.Fprintf(out, "\n%s:\n", s.Name)
		for _, c := range s.Changes {
			fmt.Fprintf(out, "  %s %s\n", c.Change, c.Object)
			if len(c.Images) == 2 {
				fmt.Fprintf(out, "    %s -> %s\n", strings.Join(c.Images[0], " "), strings.Join(c.Images[1], " "))
			}
		}
		if s.VersionOnly > 0 {
			fmt.Fprintf(out, "  and %d objects in nothing but the label with the version\n", s.VersionOnly)
		}
		for _, name := range s.Stopped {
			fmt.Fprintf(out, "  %s was stopped by isthmusctl uninstall, and starts again\n", name)
		}
		for _, state := range s.Unfinished {
			fmt.Fprintf(out, "  %s, as an earlier upgrade left it: wait for them\n", state)
		}
		for _, name := range s.ByHand {
			fmt.Fprintf(out, "  %s has the updateStrategy OnDelete: delete its pods yourself, this command does not wait for them\n", name)
		}
	}
	_, err := fmt.Fprintln(out)
	return err
}

// checkChart refuses a chart that is not of this isthmusctl's version.
func checkChart(to string, c *chart.Chart) error {
	if c.Name() != "isthmus" {
		return fmt.Errorf("--chart: it is %s, not the chart of Isthmus", c.Name())
	}
	if c.AppVersion() != to {
		return fmt.Errorf("--chart: it is of version %s, and this isthmusctl of %s, with the definitions and policies of that version; use both of one version", c.AppVersion(), to)
	}
	return nil
}

// checkDistance refuses a version that is too far from what is installed.
func checkDistance(from []string, to string) error {
	for _, have := range from {
		if far, ok := farApart(have, to); ok && far {
			return fmt.Errorf("%s is installed, which is more than one minor version from %s: upgrade by one minor version at a time", have, to)
		}
	}
	return nil
}

// checkRunning refuses a version that is too far from that of a pod. running has the name of a pod for each version.
func checkRunning(running map[string]string, to string) error {
	for _, have := range slices.Sorted(maps.Keys(running)) {
		if far, ok := farApart(have, to); ok && far {
			return fmt.Errorf("pod %s still runs %s, which is more than one minor version from %s: delete it, so that one of the installed version takes its place, and so each pod that an updateStrategy OnDelete kept",
				running[have], have, to)
		}
	}
	return nil
}
