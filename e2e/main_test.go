package e2e

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/workload.yaml
var workload string

const (
	namespace = "e2e"
	name      = "echo.e2e.svc.clusterset.local"

	// clientNode is where the tests connect from. No backend of its own cluster runs there.
	clientNode = "a2"

	// nobody is an address of documentation (RFC 5737) with no resolver behind it: what a asks there only the kernel
	// answers.
	nobody = "198.51.100.53"

	// patience is how long anything may take to become as it should.
	patience = 2 * time.Minute
)

// clientNodes says where testdata/workload.yaml puts the clients of each member.
var clientNodes = map[string]string{"a": clientNode, "b": "b1", testbed.Guest: "c1"}

// bed is the testbed all tests share; nil when this process may not build one.
var bed *testbed.Testbed

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if !netlab.IsRoot() {
		return m.Run() // each test says why it cannot run
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	// All nodes are in one zone and one region, which are the same for members whose agents are told that they span clusters. The
	// guest's agents serve names with a cluster.
	cfg := testbed.Config{
		Name: "e2e", Guest: true, Zone: "z1", Progress: os.Stderr,
		AgentArgs: map[string][]string{
			"a":           {"--packet-path", "--zones-span-clusters", "--regions-span-clusters", "--dns-fast-path=" + nobody},
			testbed.Guest: {"--dns-cluster-scoped"},
		},
		NodeLocalDNS: []string{"b"}, Federation: true,
	}
	if os.Getenv("ISTHMUS_E2E_KEEP") != "1" {
		defer func() {
			if err := testbed.Down(context.WithoutCancel(ctx), cfg); err != nil {
				fmt.Fprintln(os.Stderr, "take the testbed down:", err)
			}
		}()
	}
	var err error
	if bed, err = testbed.Up(ctx, cfg); err == nil {
		err = deploy(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bring the testbed up:", err)
		return 1
	}
	return m.Run()
}

// deploy puts the workload into both members, exports it and waits until both are imported in both.
func deploy(ctx context.Context) error {
	if err := startWorkload(ctx, testbed.Members()...); err != nil {
		return err
	}
	for _, member := range testbed.Members() {
		if _, err := bed.Isthmusctl(ctx, member, "export", "service", "echo", "--namespace", namespace); err != nil {
			return err
		}
	}
	for _, member := range testbed.Members() {
		if err := importedFrom(ctx, member, "a b"); err != nil {
			return err
		}
		if _, err := bed.Kubectl(ctx, member, "wait", "pod", "--selector", "role=client", "--namespace", namespace, "--for", "condition=Ready", "--timeout", patience.String()); err != nil {
			return err
		}
	}
	for _, c := range []client{podClient, outsideClient, hostClient, nodeClient} {
		if err := reaches(ctx, c, "a", "b"); err != nil {
			return err
		}
	}
	return nil
}

// startWorkload puts the workload into clusters and waits until its pods serve.
func startWorkload(ctx context.Context, clusters ...string) error {
	for _, member := range clusters {
		manifest := strings.NewReplacer("CLUSTER_ID", member, "CLIENT_NODE", clientNodes[member]).Replace(workload)
		if err := bed.Apply(ctx, member, manifest); err != nil {
			return err
		}
	}
	for _, member := range clusters {
		if _, err := bed.Kubectl(ctx, member, "rollout", "status", "deployment/echo", "--namespace", namespace, "--timeout", patience.String()); err != nil {
			return err
		}
	}
	return nil
}

// importedFrom waits until a member's ServiceImport lists exactly clusters and has two IPs.
func importedFrom(ctx context.Context, member, clusters string) error {
	return serviceImportedFrom(ctx, member, "echo", clusters)
}

// serviceImportedFrom is importedFrom for a Service of choice.
func serviceImportedFrom(ctx context.Context, member, service, clusters string) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		have, err := serviceImport(ctx, member, service)
		if err != nil {
			return err
		}
		var from []string
		for _, c := range have.Status.Clusters {
			from = append(from, c.Cluster)
		}
		if strings.Join(from, " ") != clusters || len(have.Spec.IPs) != 2 {
			return fmt.Errorf("the ServiceImport of %s is of clusters %v with IPs %v", member, from, have.Spec.IPs)
		}
		return nil
	})
}

// serviceImport reads a ServiceImport as a member has it.
func serviceImport(ctx context.Context, member, service string) (v1beta1.ServiceImport, error) {
	var si v1beta1.ServiceImport
	err := bed.Get(ctx, member, "/apis/"+v1beta1.GroupVersion.String()+"/namespaces/"+namespace+"/serviceimports/"+service, &si)
	return si, err
}

// needBed skips, or fails, a test that has no testbed.
func needBed(t *testing.T) {
	t.Helper()
	if bed == nil {
		netlab.Skip(t, "a testbed needs root")
	}
}
