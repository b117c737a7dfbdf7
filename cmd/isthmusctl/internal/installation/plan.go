package installation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"helm.sh/helm/v4/pkg/action"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/cli"
	"helm.sh/helm/v4/pkg/kube"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The steps of an upgrade, in their order.
const (
	Controllers = "controllers"
	Agents      = "agents"
	Gateways    = "gateways"
)

// Change says what a step does with an object.
type Change string

// All changes.
const (
	Created Change = "created"
	Changed Change = "changed"
	Deleted Change = "deleted"
)

// ObjectChange is the change of one object.
type ObjectChange struct {
	Object string `json:"object"` // kind and name
	Change Change `json:"change"`
	// Images are those of a workload before and after, if they differ. Its pods are replaced.
	Images [][]string `json:"images,omitempty"`
}

// Step is a part of a plan: the objects of one or several components.
type Step struct {
	Name    string         `json:"name"`
	Changes []ObjectChange `json:"changes"`
	// VersionOnly counts objects that change in nothing but the label with the version.
	VersionOnly int `json:"versionOnly,omitempty"`
	// ByHand names DaemonSets of which somebody has to delete the pods (updateStrategy OnDelete).
	ByHand []string `json:"byHand,omitempty"`
	// Stopped names DaemonSets that an uninstallation has stopped. They start again.
	Stopped []string `json:"stopped,omitempty"`
	// Unfinished names workloads that are as wanted, but whose pods are not: an earlier upgrade was interrupted.
	Unfinished []string `json:"unfinished,omitempty"`
}

// Empty reports whether there is nothing to do in a step.
func (s Step) Empty() bool { return !s.writes() && len(s.Stopped) == 0 && len(s.Unfinished) == 0 }

// writes reports whether a step changes objects of the release.
func (s Step) writes() bool { return len(s.Changes) > 0 || s.VersionOnly > 0 }

// Plan is the way from an installation to a chart.
type Plan struct {
	Steps        []Step
	installation *Installation
	wanted       []object // of the chart
	chart        *chart.Chart
	values       map[string]any // those of the release and the new ones, complete
	force        bool
}

// Options are those of a plan.
type Options struct {
	Values map[string]any // changed ones; null removes one
	Back   bool           // the chart is older than what is installed: the steps are in the reverse order
	Force  bool           // take over fields that others have changed
}

// Plan renders a chart with the values of the installation, changed by those of o, and compares the result with what Helm installed. It
// changes nothing in the cluster.
func (i *Installation) Plan(ctx context.Context, to *chart.Chart, o Options) (*Plan, error) {
	if i.Pending != "" {
		return nil, errors.New(i.Pending)
	}
	p := &Plan{installation: i, chart: to, force: o.Force}
	u := p.upgrade()
	u.DryRunStrategy, u.ResetThenReuseValues = action.DryRunServer, true
	result, err := u.RunWithContext(ctx, i.Name, to, copied(o.Values))
	if err != nil {
		return nil, fmt.Errorf("render chart %s %s with the values of release %s: %w", to.Name(), to.Metadata.Version, i.Name, err)
	}
	r, err := v1(result)
	if err != nil {
		return nil, err
	}
	p.values = r.Config
	if err := checkPins(p.values, o.Values); err != nil {
		return nil, err
	}
	if p.wanted, err = split(r.Manifest); err != nil {
		return nil, err
	}
	names := []string{Controllers, Agents, Gateways}
	if o.Back {
		slices.Reverse(names)
	}
	notReady, err := countNotReady(ctx, i.cluster)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		s := compare(name, ofStep(i.objects, name), ofStep(p.wanted, name))
		if err := i.compareLive(ctx, &s, p.workloads(name), notReady); err != nil {
			return nil, err
		}
		p.Steps = append(p.Steps, s)
	}
	return p, nil
}

// checkPins refuses values of the release that pin images of another version. Those that the user gives now are meant.
func checkPins(values, given map[string]any) error {
	image, _ := values["image"].(map[string]any)
	now, _ := given["image"].(map[string]any)
	for _, key := range []string{"tag", "digests"} {
		pin, there := image[key]
		_, meant := now[key]
		if text := fmt.Sprint(pin); there && !meant && text != "" && text != "map[]" && pin != nil {
			return fmt.Errorf("the release's value image.%s is %s, so an upgrade would keep the old images: give --set image.%s=null for those of the chart, or another value for images of your own", key, text, key)
		}
	}
	return nil
}

// copied returns a copy of values, because Helm changes the maps of its arguments.
func copied(values map[string]any) map[string]any {
	out := make(map[string]any, len(values))
	for k, v := range values {
		if inner, ok := v.(map[string]any); ok {
			v = copied(inner)
		}
		out[k] = v
	}
	return out
}

// compareLive adds to a step what only the cluster knows, of which some nodes are not ready.
func (i *Installation) compareLive(ctx context.Context, s *Step, workloads []object, notReady int32) error {
	for _, o := range workloads {
		if o.GetKind() != "DaemonSet" {
			continue
		}
		d, err := i.cluster.AppsV1().DaemonSets(i.Namespace).Get(ctx, o.GetName(), metav1.GetOptions{})
		if err == nil && d.Spec.Template.Spec.NodeSelector[nowhere] != "" {
			s.Stopped = append(s.Stopped, o.String())
		}
	}
	if s.writes() {
		return nil
	}
	all, err := i.rollouts(ctx, workloads)
	if err != nil {
		return err
	}
	for _, r := range all {
		if !r.finished(notReady) {
			s.Unfinished = append(s.Unfinished, r.String())
		}
	}
	return nil
}

// workloads returns the workloads of a step.
func (p *Plan) workloads(name string) []object {
	return slices.DeleteFunc(ofStep(p.wanted, name), func(o object) bool { return !o.isWorkload() })
}

// upgrade returns an upgrade of the Helm release. It waits for hooks only: the steps wait for their own pods.
func (p *Plan) upgrade() *action.Upgrade {
	u := action.NewUpgrade(p.installation.config)
	u.Namespace = p.installation.Namespace
	u.MaxHistory = cli.New().MaxHistory
	u.WaitStrategy = kube.HookOnlyStrategy
	u.PostRenderStrategy = action.PostRenderStrategyNoHooks
	// A release of Helm 3 has no conflicts, and Helm refuses the option there.
	u.ForceConflicts = p.force && p.installation.history[0].ApplyMethod == string(releasev1.ApplyMethodServerSideApply)
	return u
}

// Apply does a step, after the earlier ones, and waits until its pods are available. timeout is the longest time without progress.
func (p *Plan) Apply(ctx context.Context, name string, timeout time.Duration) error {
	at := slices.IndexFunc(p.Steps, func(s Step) bool { return s.Name == name })
	if at < 0 {
		return fmt.Errorf("the plan has no step %q", name)
	}
	i := p.installation
	if p.Steps[at].writes() {
		var later []string
		for _, s := range p.Steps[at+1:] {
			later = append(later, s.Name)
		}
		u := p.upgrade()
		u.Timeout, u.ResetValues = timeout, true
		u.Description = fmt.Sprintf("isthmusctl upgrade to %s: %s", p.chart.Metadata.AppVersion, name)
		u.PostRenderer = keeper{i.objects, later}
		if _, err := u.RunWithContext(ctx, i.Name, p.chart, copied(p.values)); err != nil {
			return fmt.Errorf("%w %s", err, strings.TrimSpace(i.said.String()))
		}
	}
	for _, o := range p.workloads(name) {
		if !slices.Contains(p.Steps[at].Stopped, o.String()) {
			continue
		}
		if _, err := selectNowhere(ctx, i.cluster, i.Namespace, o.GetName(), false); err != nil {
			return err
		}
	}
	return i.await(ctx, p.workloads(name), timeout)
}

// Installs reports whether the chart has objects of a step.
func (p *Plan) Installs(name string) bool { return len(ofStep(p.wanted, name)) > 0 }

// Has reports whether the chart has objects of a component, by the label app.kubernetes.io/name.
func (p *Plan) Has(component string) bool {
	return slices.ContainsFunc(p.wanted, func(o object) bool { return o.GetLabels()[labelName] == component })
}

// Image returns the image of a component in the chart, by the label app.kubernetes.io/name, or "".
func (p *Plan) Image(component string) string {
	for _, o := range p.wanted {
		if images := o.images(); o.GetLabels()[labelName] == component && len(images) > 0 {
			return images[0]
		}
	}
	return ""
}

// keeper keeps the objects of later steps as they are.
type keeper struct {
	have  []object
	later []string
}

// Run replaces the rendered objects of later steps by those that are installed.
func (k keeper) Run(rendered *bytes.Buffer) (*bytes.Buffer, error) {
	wanted, err := split(rendered.String())
	if err != nil {
		return nil, err
	}
	out := &bytes.Buffer{}
	add := func(all []object, later bool) {
		for _, o := range all {
			if slices.Contains(k.later, stepOf(o)) == later {
				fmt.Fprintf(out, "---\n%s\n", strings.TrimSpace(o.text))
			}
		}
	}
	add(wanted, false)
	add(k.have, true)
	return out, nil
}

// stepOf returns the name of the step that changes an object.
func stepOf(o object) string {
	switch o.GetLabels()[labelName] {
	case "isthmus-agent":
		return Agents
	case "isthmus-gateway":
		return Gateways
	default:
		return Controllers
	}
}

func ofStep(all []object, name string) []object {
	return slices.DeleteFunc(slices.Clone(all), func(o object) bool { return stepOf(o) != name })
}

// compare returns the step from one set of objects to another.
func compare(name string, have, want []object) Step {
	s := Step{Name: name}
	before := map[string]object{}
	for _, o := range have {
		before[o.id()] = o
	}
	for _, o := range want {
		old, there := before[o.id()]
		delete(before, o.id())
		if o.isWorkload() && o.replacedByHand() {
			s.ByHand = append(s.ByHand, o.String())
		}
		switch {
		case !there:
			s.Changes = append(s.Changes, ObjectChange{Object: o.String(), Change: Created})
		case old.GetLabels()[labelVersion] == o.GetLabels()[labelVersion] && sameBut(old, o):
		case sameBut(old, o) && !o.isWorkload():
			s.VersionOnly++
		default:
			c := ObjectChange{Object: o.String(), Change: Changed}
			if !slices.Equal(old.images(), o.images()) {
				c.Images = [][]string{old.images(), o.images()}
			}
			s.Changes = append(s.Changes, c)
		}
	}
	for _, o := range have {
		if _, gone := before[o.id()]; gone {
			s.Changes = append(s.Changes, ObjectChange{Object: o.String(), Change: Deleted})
		}
	}
	return s
}
