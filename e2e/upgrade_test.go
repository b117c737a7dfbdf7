package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

// throughGateways is a Service of a's gateways for servers in b.
const throughGateways = `
apiVersion: v1
kind: Service
metadata:
  name: through-gateways
  namespace: e2e
  annotations: {isthmus.dev/service-import: behind-gateways}
spec:
  type: LoadBalancer
  loadBalancerClass: isthmus.dev/gateway
  ports: [{name: http, port: 80}]
`

// components are the workloads of member a that are upgraded.
var components = []string{
	"deployment/isthmus-controller", "daemonset/isthmus-agent", "deployment/isthmus-gateway-controller", "daemonset/isthmus-gateway",
}

// TestUpgradeAndBack: member a runs the newest release or candidate, is upgraded to this build by isthmusctl, and goes back by Helm, while b
// runs this build. Connections and lookups go on, also connections through the gateways on a's nodes to pods of b. None fails. A soak does
// so ten times.
func TestUpgradeAndBack(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	old, err := bed.Earlier(ctx, "agent", "controller", "gateway", "gateway-controller")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // whatever failed, other tests get this build
		if _, err := bed.Upgrade(context.WithoutCancel(ctx), "a", "--apply", "--yes"); err != nil {
			t.Error(err)
		}
	})
	gatewaysOnNodes(t, "a1", "a2")
	offer(t, "behind-gateways", "0", "b")
	helm := func(args ...string) {
		t.Helper()
		if _, err := bed.Helm(ctx, "a", append(args, "--namespace", testbed.Namespace, "--wait", "--timeout", "15m")...); err != nil {
			t.Fatal(err)
		}
	}
	mixed := func(version string) {
		t.Helper()
		t.Logf("%s: all run %s", time.Now().Format(time.StampMilli), version)
		images(t, version)
		if err := importedFrom(ctx, "a", "a b"); err != nil {
			t.Error(err)
		}
		if err := reaches(ctx, podClient, "a", "b"); err != nil {
			t.Error(err)
		}
		<-time.After(3 * time.Second) // of traffic
	}
	helm("upgrade", "isthmus", old.Chart, "--reset-then-reuse-values", "--force-conflicts") // another test has set the image by kubectl
	mixed(old.Version)
	rounds := 1
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		rounds = 10
	}
	endThrough := throughTheGateways(t)
	endLookups := lookups(t, "--timeout", "15s") // a resolver tries twice, for five seconds each
	underLoad(t, paths(), func() {
		for range rounds {
			revision := revision(t)
			checkPlan(t, old.Version)
			if _, err := bed.Upgrade(ctx, "a", "--apply", "--yes"); err != nil {
				t.Fatal(err)
			}
			mixed("dev")
			helm("rollback", "isthmus", strconv.Itoa(revision))
			mixed(old.Version)
		}
	})
	endLookups()
	endThrough()
}

// checkPlan checks the plan of an upgrade of a from a version to this build, which changes nothing.
func checkPlan(t *testing.T, from string) {
	t.Helper()
	plan, err := bed.Upgrade(t.Context(), "a", "--plan")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{from + " -> dev", "changed Deployment isthmus-controller", "changed DaemonSet isthmus-agent", "changed Deployment isthmus-gateway-controller", "changed DaemonSet isthmus-gateway"} {
		if !strings.Contains(plan, want) {
			t.Errorf("the plan lacks %q:\n%s", want, plan)
		}
	}
	images(t, from)
}

// throughTheGateways starts connections from outside of the clusters to the Service of a's gateways: short ones and one that is held. end
// checks that none failed.
func throughTheGateways(t *testing.T) (end func()) {
	t.Helper()
	ctx := t.Context()
	if err := bed.Apply(ctx, "a", throughGateways); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dismiss(context.WithoutCancel(ctx), "through-gateways"); err != nil {
			t.Error(err)
		}
	})
	url := "http://" + answersOn(t, "through-gateways", "a1", "a2").String()
	fabric := func(ctx context.Context, args ...string) (*exec.Cmd, error) {
		return bed.Lab.FabricCommand(ctx, slices.Concat([]string{bed.Program("echo-server"), "client"}, args)...), nil
	}
	// While the other gateway takes over, a SYN is lost, and on a busy machine the client's next one too.
	short := flow(t, fabric, "--rate", "30", "--timeout", "10s", "--url", url)
	open := hold(t, fabric, url)
	return func() {
		t.Helper()
		r, err := short.end()
		if err != nil || r.Failures != 0 || len(r.Backends) != 2 {
			t.Errorf("through the gateways %d of %d connections failed: %v; answered by %v; %v", r.Failures, r.Connections, r.Errors, r.Backends, err)
		}
		for _, failed := range r.Failed {
			t.Logf("failed: %s", failed)
		}
		t.Logf("through the gateways: %d connections", r.Connections)
		open.end(t)
	}
}

// images checks the tags of the images of a's components.
func images(t *testing.T, want string) {
	t.Helper()
	for _, workload := range components {
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
