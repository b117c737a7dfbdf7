package e2e

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/named.conf
var namedConf string

//go:embed testdata/my-org.com.zone
var zoneFile string

// zone is the zone of the machines' DNS server.
const zone = "my-org.com"

// patchHostnames gives the federation of a supervisor names of the zone for Services.
func patchHostnames(ctx context.Context, supervisor string) error {
	_, err := bed.Kubectl(ctx, supervisor, "patch", "federations.federation.isthmus.dev", v1alpha1.FederationName, "--type", "merge",
		"--patch", `{"spec":{"hostnameTemplate":"{{.Name}}.`+zone+`"}}`)
	return err
}

// outsideMachine returns a client on a machine without Kubernetes whose DNS server is BIND, which the ExternalDNS of a writes to. It is nil
// without a built ExternalDNS (make test-external-dns builds it).
func outsideMachine(t *testing.T) client {
	t.Helper()
	program, ok := bed.Lab.Built(cluster.ExternalDNS)
	if !ok {
		t.Logf("%s is not built, so nobody looks up names of %s; make test-external-dns builds it", cluster.ExternalDNS, zone)
		return nil
	}
	ctx := context.WithoutCancel(t.Context())
	if err := debian.Ensure(ctx, os.Stdout, "bind9"); err != nil {
		t.Fatal(err)
	}
	host := func(name string, number byte, dns netip.Addr) *cluster.Host {
		h, err := bed.Lab.AddHost(ctx, name, number, dns)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := h.Remove(ctx); err != nil {
				t.Error(err)
			}
		})
		return h
	}
	server := host("ns", 2, netip.Addr{})
	machine := host("machine", 3, server.Addr)
	secret := rand.Text()
	startNamed(t, server, secret)
	background(t, "ExternalDNS", bed.Lab.FabricCommand(ctx, program, "--kubeconfig", bed.Lab.Kubeconfig("a"), "--source", "service", "--provider", "rfc2136",
		"--rfc2136-host", server.Addr.String(), "--rfc2136-port", "53", "--rfc2136-zone", zone, "--rfc2136-tsig-keyname", "external-dns",
		"--rfc2136-tsig-secret-alg", "hmac-sha256", "--rfc2136-tsig-secret", encoded(secret), "--rfc2136-axfr",
		"--domain-filter", zone, "--policy", "sync", "--txt-owner-id", "a", "--txt-prefix", "txt-", "--events", "--interval", "10s", "--min-event-sync-interval", "1s"))
	return func(ctx context.Context, args ...string) (*exec.Cmd, error) {
		return machine.Command(ctx, slices.Concat([]string{bed.Program("echo-server"), "client"}, args)...), nil
	}
}

func encoded(secret string) string { return base64.StdEncoding.EncodeToString([]byte(secret)) }

// startNamed starts BIND on a host. A key with the secret may change the zone.
func startNamed(t *testing.T, host *cluster.Host, secret string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"named.conf": namedConf, zone + ".zone": zoneFile} {
		text = strings.NewReplacer("DIR", dir, "SECRET", encoded(secret), "ADDRESS", host.Addr.String()).Replace(text)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	background(t, "BIND", host.Command(context.WithoutCancel(t.Context()), "named", "-g", "-c", filepath.Join(dir, "named.conf")))
}

// background runs a program until the test ends, and logs its output if the test failed.
func background(t *testing.T, name string, cmd *exec.Cmd) {
	t.Helper()
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
		if t.Failed() {
			t.Logf("%s: %v\n%s", name, err, out.String())
		}
	})
}

// machinesReach: a machine without Kubernetes looks up the host name of each federated Service, and servers of all its clusters answer
// there.
func machinesReach(t *testing.T, from client) {
	t.Helper()
	group, ctx := errgroup.WithContext(t.Context())
	for service, is := range federated {
		group.Go(func() error {
			var svc corev1.Service
			if err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
				err := bed.Get(ctx, "a", "/api/v1/namespaces/"+is.namespace+"/services/"+service, &svc)
				if err == nil && svc.Annotations["external-dns.kubernetes.io/target"] == "" {
					err = fmt.Errorf("its host name leads nowhere: %v", svc.Annotations)
				}
				return err
			}); err != nil {
				return err
			}
			target := "http://" + service + "." + zone
			if other, ok := strings.CutPrefix(svc.Annotations[v1alpha1.AnnotationHostnamePorts], "80/TCP="); ok {
				target += ":" + other
			}
			by := is.by
			if service == "nodes" { // each cluster has another node port, and a name leads to those of one
				nodes := strings.Split(svc.Annotations["external-dns.kubernetes.io/target"], ",")
				by = slices.DeleteFunc(slices.Clone(by), func(member string) bool {
					return !slices.Contains(nodes, clusterOf(t, member).Nodes[0].IPv4.String())
				})
				if len(by) != 1 {
					return fmt.Errorf("%s leads to nodes of %v, want those of one cluster", nodes, by)
				}
			}
			return answeredBy(ctx, from, "--url", target, by...)
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// forgetsDead waits until the machine outside of the clusters is led to supervisors alone, a TTL after the guest's endpoints went.
func forgetsDead(ctx context.Context, from client) error {
	began := time.Now()
	err := answeredBy(ctx, from, "--url", "http://balancer."+zone, testbed.Members()...)
	if took := time.Since(began); err == nil && took > time.Minute {
		err = fmt.Errorf("host names led to a dead cluster for %s", took)
	}
	return err
}
