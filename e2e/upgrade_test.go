package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

// TestUpgradeAndBack: member a goes back to the newest release or candidate and is upgraded to this build by isthmusctl, rolled back by Helm, and
// upgraded again, while b runs this build and connections and lookups go on. In between, the versions are mixed. None fails.
func TestUpgradeAndBack(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	old, err := bed.Earlier(ctx, "agent", "controller")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // whatever failed, other tests get this build
		if _, err := bed.Upgrade(context.WithoutCancel(ctx), "a", "--apply", "--yes"); err != nil {
			t.Error(err)
		}
	})
	helm := func(args ...string) {
		t.Helper()
		if _, err := bed.Helm(ctx, "a", append(args, "--namespace", testbed.Namespace, "--wait", "--timeout", "15m")...); err != nil {
			t.Fatal(err)
		}
	}
	mixed := func(version string) {
		t.Helper()
		images(t, version)
		if err := importedFrom(ctx, "a", "a b"); err != nil {
			t.Error(err)
		}
		if err := reaches(ctx, podClient, "a", "b"); err != nil {
			t.Error(err)
		}
		<-time.After(3 * time.Second) // of traffic
	}
	upgrade := func() {
		t.Helper()
		plan, err := bed.Upgrade(ctx, "a", "--plan")
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{old.Version + " -> dev", "changed Deployment isthmus-controller", "changed DaemonSet isthmus-agent", "gateways: skipped: not installed"} {
			if !strings.Contains(plan, want) {
				t.Errorf("the plan lacks %q:\n%s", want, plan)
			}
		}
		images(t, old.Version)
		if _, err := bed.Upgrade(ctx, "a", "--apply", "--yes"); err != nil {
			t.Fatal(err)
		}
		mixed("dev")
	}
	endLookups := lookups(t, "--timeout", "15s") // a resolver tries twice, for five seconds each
	underLoad(t, paths(), func() {
		helm("upgrade", "isthmus", old.Chart, "--reset-then-reuse-values", "--force-conflicts") // another test has set the image by kubectl
		mixed(old.Version)
		revision := revision(t)
		upgrade()
		helm("rollback", "isthmus", strconv.Itoa(revision))
		mixed(old.Version)
		upgrade()
	})
	endLookups()
}

// images checks the tags of the images of a's controller and agents.
func images(t *testing.T, want string) {
	t.Helper()
	for _, workload := range []string{"deployment/isthmus-controller", "daemonset/isthmus-agent"} {
		image, err := bed.Kubectl(t.Context(), "a", "get", workload, "--namespace", testbed.Namespace, "--output", "jsonpath={.spec.template.spec.containers[0].image}")
		if err != nil {
			t.Fatal(err)
		}
		if _, tag, _ := strings.Cut(filepath.Base(image), ":"); tag != want {
			t.Errorf("%s runs %s, want %s", workload, image, want)
		}
	}
}

// revision returns the revision of the Helm release in a.
func revision(t *testing.T) int {
	t.Helper()
	said, err := bed.Helm(t.Context(), "a", "status", "isthmus", "--namespace", testbed.Namespace, "--output", "json")
	var status struct{ Version int }
	if err == nil {
		err = json.Unmarshal([]byte(said), &status)
	}
	if err != nil {
		t.Fatal(fmt.Errorf("status of the release: %w", err))
	}
	return status.Version
}
