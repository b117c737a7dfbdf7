package e2e

import (
	"context"
	"os"
	"os/exec"
	"slices"
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

// gatewaysAreReplaced: the gateways on two nodes of a are replaced one after the other, as by an upgrade, while clients outside of the
// clusters connect through them to pods of b. No connection fails. A soak does so ten times.
func gatewaysAreReplaced(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	gatewaysOnNodes(t, "a1", "a2")
	offer(t, "behind-gateways", "0", "b")
	end := throughTheGateways(t)
	rounds := 1
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		rounds = 10
	}
	for range rounds {
		for _, args := range [][]string{{"restart"}, {"status", "--timeout", "120s"}} {
			if _, err := bed.Kubectl(ctx, "a", slices.Concat([]string{"rollout", args[0], "daemonset/isthmus-gateway", "--namespace", testbed.Namespace}, args[1:])...); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(3 * time.Second) // of traffic
	}
	end()
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
		t.Logf("through the gateways: %d connections", r.Connections)
		open.end(t)
	}
}
