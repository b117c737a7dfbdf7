package installation

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"helm.sh/helm/v4/pkg/action"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/kube"
)

// hooksOnly waits for hooks, and not for pods.
const hooksOnly = kube.HookOnlyStrategy

// maxHistory is Helm's own default for the number of revisions that it keeps.
const maxHistory = 10

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
}

// Empty reports whether a step changes nothing.
func (s Step) Empty() bool { return len(s.Changes) == 0 && s.VersionOnly == 0 }

// Plan is the way from an installation to a chart.
type Plan struct {
	Steps        []Step
	installation *Installation
	wanted       []object // of the chart
	chart        *chart.Chart
	values       map[string]any
}

// Plan renders a chart with the values of the installation, changed by values, and compares the result with what is installed. back
// reverses the order of the steps, for a chart that is older. It changes nothing in the cluster.
func (i *Installation) Plan(ctx context.Context, to *chart.Chart, values map[string]any, back bool) (*Plan, error) {
	p := &Plan{installation: i, chart: to, values: values}
	u := p.upgrade()
	u.DryRunStrategy = action.DryRunServer
	result, err := u.RunWithContext(ctx, i.Name, to, values)
	if err != nil {
		return nil, fmt.Errorf("render chart %s %s with the values of release %s: %w", to.Name(), to.Metadata.Version, i.Name, err)
	}
	r, err := v1(result)
	if err != nil {
		return nil, err
	}
	if p.wanted, err = split(r.Manifest); err != nil {
		return nil, err
	}
	names := []string{Controllers, Agents, Gateways}
	if back {
		slices.Reverse(names)
	}
	for _, name := range names {
		p.Steps = append(p.Steps, compare(name, ofStep(i.objects, name), ofStep(p.wanted, name)))
	}
	return p, nil
}

// upgrade returns an upgrade of the Helm release.
func (p *Plan) upgrade() *action.Upgrade {
	u := action.NewUpgrade(p.installation.config)
	u.Namespace = p.installation.Namespace
	u.ResetThenReuseValues = true
	u.MaxHistory = maxHistory
	u.WaitStrategy = kube.StatusWatcherStrategy
	u.PostRenderStrategy = action.PostRenderStrategyNoHooks
	return u
}

// Apply does a step, after the earlier ones, and waits until its pods are ready, at most timeout.
func (p *Plan) Apply(ctx context.Context, name string, timeout time.Duration) error {
	at := slices.IndexFunc(p.Steps, func(s Step) bool { return s.Name == name })
	if at < 0 {
		return fmt.Errorf("the plan has no step %q", name)
	}
	var later []string
	for _, s := range p.Steps[at+1:] {
		later = append(later, s.Name)
	}
	u := p.upgrade()
	u.Timeout = timeout
	u.Description = fmt.Sprintf("isthmusctl upgrade to %s: %s", p.chart.Metadata.AppVersion, name)
	u.PostRenderer = keeper{p.installation.objects, later}
	if len(p.Steps[at].ByHand) > 0 {
		u.WaitStrategy = hooksOnly
	}
	_, err := u.RunWithContext(ctx, p.installation.Name, p.chart, p.values)
	return err
}

// Installs reports whether the chart has objects of a step.
func (p *Plan) Installs(name string) bool { return len(ofStep(p.wanted, name)) > 0 }

// Image returns the image of a component in the chart, by its label app.kubernetes.io/name, or "".
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
