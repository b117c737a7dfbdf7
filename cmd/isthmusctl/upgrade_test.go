package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	chart "helm.sh/helm/v4/pkg/chart/v2"

	"github.com/isthmus-net/isthmus/cmd/isthmusctl/internal/installation"
)

func TestCheckUpgrade(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		from             string
		to, chart, title string
		want             string // part of the error
	}{
		"the next minor version": {"v0.1.3", "v0.2.0", "v0.2.0", "isthmus", ""},
		"a patch":                {"v0.1.3", "v0.1.4", "v0.1.4", "isthmus", ""},
		"back":                   {"v0.2.0", "v0.1.9", "v0.1.9", "isthmus", ""},
		"a build of one's own":   {"v0.1.0", "dev", "dev", "isthmus", ""},
		"two minor versions":     {"v0.1.0 v0.2.0", "v0.3.0", "v0.3.0", "isthmus", "v0.1.0 is installed, which is more than one minor version from v0.3.0"},
		"two back":               {"v0.3.0", "v0.1.0", "v0.1.0", "isthmus", "v0.3.0 is installed"},
		"the next major version": {"v0.9.0", "v1.0.0", "v1.0.0", "isthmus", "v0.9.0 is installed"},
		"another chart":          {"v0.1.0", "v0.2.0", "v0.2.0", "cilium", "it is cilium"},
		"a chart of another day": {"v0.1.0", "v0.2.0", "v0.2.1", "isthmus", "it is of version v0.2.1, and this isthmusctl of v0.2.0"},
	} {
		c := &chart.Chart{Metadata: &chart.Metadata{Name: tt.title, AppVersion: tt.chart}}
		err := cmp.Or(checkDistance(strings.Fields(tt.from), tt.to), checkChart(tt.to, c))
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// A pod that an updateStrategy OnDelete has kept counts as well as the release.
func TestCheckRunning(t *testing.T) {
	t.Parallel()
	running := map[string]string{"v0.1.0": "isthmus-agent-old", "v0.2.0": "isthmus-agent-new", "dev": "mine"}
	if err := checkRunning(running, "v0.2.5"); err != nil {
		t.Error(err)
	}
	if err := checkRunning(running, "v0.3.0"); err == nil || !strings.Contains(err.Error(), "pod isthmus-agent-old still runs v0.1.0") {
		t.Errorf("a pod of two minor versions before: %v", err)
	}
}

func TestOlder(t *testing.T) {
	t.Parallel()
	for to, want := range map[string]bool{"v0.1.9": true, "v0.2.0": false, "v0.2.0-rc.1": true, "v0.3.0": false, "dev": false} {
		if have := older(to, []string{"v0.1.0", "v0.2.0", "dev"}); have != want {
			t.Errorf("%s: %t", to, have)
		}
	}
}

// The plan names every change and the reason of every step that is skipped. A failure says what stands and how to go on.
func TestUpgradeText(t *testing.T) {
	t.Parallel()
	did := ""
	step := func(name string, err error) *upgradeStep {
		return &upgradeStep{Step: installation.Step{Name: name}, do: func(context.Context, time.Duration) error { did += name + " "; return err }}
	}
	agents := step("agents", errors.New("it is late"))
	agents.Changes = []installation.ObjectChange{{Object: "DaemonSet isthmus-agent", Change: installation.Changed, Images: [][]string{{"isthmus/agent:v0.1.0"}, {"isthmus/agent:v0.2.0"}}}}
	agents.VersionOnly, agents.ByHand = 3, []string{"DaemonSet isthmus-agent"}
	up := &upgrade{
		Release: "isthmus", Namespace: "isthmus-system", Back: 4, From: []string{"v0.1.0"}, To: "v0.2.0",
		Steps: []*upgradeStep{skip("broker", "no --broker-kubeconfig"), step("controllers", nil), agents, step("gateways", nil)},
	}
	var out bytes.Buffer
	if err := up.writeText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Helm release isthmus in namespace isthmus-system: v0.1.0 -> v0.2.0\n", "broker: skipped: no --broker-kubeconfig\n",
		"  changed DaemonSet isthmus-agent\n    isthmus/agent:v0.1.0 -> isthmus/agent:v0.2.0\n  and 3 objects", "delete its pods yourself",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the plan lacks %q:\n%s", want, out.String())
		}
	}
	err := up.run(t.Context(), &out, time.Second)
	if did != "controllers agents " {
		t.Errorf("did %s", did)
	}
	for _, want := range []string{"agents: it is late", "controllers are of v0.2.0 already", "helm rollback isthmus 4 --namespace isthmus-system"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}
