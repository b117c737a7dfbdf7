package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

// The broker of a cluster with nodes runs its quota controller: both pods become ready, and one of them acts.
func TestQuotaControllerRuns(t *testing.T) {
	needBed(t)
	t.Parallel()
	const broker, deployment = "quota-broker", "deployment/isthmus-quota-controller"
	ctx := t.Context()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		kinds := "validatingadmissionpolicies,validatingadmissionpolicybindings,clusterroles,clusterrolebindings"
		names, err := bed.Kubectl(ctx, "a", "get", kinds, "--output", "name")
		remove := []string{"delete", "--wait=false", "namespace/" + broker}
		for name := range strings.Lines(names) {
			if strings.Contains(name, "/isthmus."+broker+".") {
				remove = append(remove, strings.TrimSpace(name))
			}
		}
		_, deleteErr := bed.Kubectl(ctx, "a", remove...)
		if err := errors.Join(err, deleteErr); err != nil {
			t.Error(err)
		}
	})
	if _, err := bed.Isthmusctl(ctx, "a", "deploy-broker", "--broker-namespace", broker, "--quota-controller", "isthmus/controller:dev"); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Kubectl(ctx, "a", "rollout", "status", deployment, "--namespace", broker, "--timeout", patience.String()); err != nil {
		logs, logErr := bed.Kubectl(ctx, "a", "logs", deployment, "--namespace", broker)
		t.Fatal(errors.Join(err, logErr), logs)
	}
	err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		text, err := bed.Kubectl(ctx, "a", "get", "lease/isthmus-quota-controller", "--namespace", broker, "--output", "json")
		if err != nil {
			return err
		}
		var lease coordinationv1.Lease
		if err := json.Unmarshal([]byte(text), &lease); err != nil {
			return err
		}
		if holder := lease.Spec.HolderIdentity; holder == nil || !strings.HasPrefix(*holder, "isthmus-quota-controller-") {
			return fmt.Errorf("the Lease is held by %v", holder)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
