package e2e

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-net/isthmus/e2e/testbed"
)

//go:embed testdata/dns.yaml
var headlessWorkload string

// inPod runs a command in the client pod of a member.
func inPod(ctx context.Context, member string, args ...string) (string, error) {
	return bed.Exec(ctx, member, namespace, "client", args...)
}

// nslookup asks as BIND's nslookup does and returns addresses, or "PORT TARGET" of SRV records, sorted.
func nslookup(ctx context.Context, member, qtype, name string) ([]string, error) {
	said, err := inPod(ctx, member, "nslookup", "-type="+qtype, name+".")
	if err != nil {
		return nil, err
	}
	var found []string
	for line := range strings.Lines(said) {
		f := strings.Fields(line)
		switch {
		case len(f) == 2 && f[0] == "Address:" && !strings.Contains(f[1], "#"): // the server's own has its port
			found = append(found, f[1])
		case len(f) == 7 && f[1] == "service":
			found = append(found, f[5]+" "+strings.TrimSuffix(f[6], "."))
		}
	}
	slices.Sort(found)
	return found, nil
}

// resolvesTo waits until nslookup in a member finds exactly these.
func resolvesTo(t *testing.T, member, qtype, name string, want ...string) {
	t.Helper()
	slices.Sort(want)
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		have, err := nslookup(ctx, member, qtype, name)
		if err != nil {
			return err
		}
		if !slices.Equal(have, want) {
			return fmt.Errorf("%s %s in %s is %v, want %v", name, qtype, member, have, want)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestNamesInEveryCluster: with CoreDNS alone (a) and behind NodeLocal DNSCache (b), the name of a Service has its VIPs,
// SRV of the bare name has each port once, and cluster.local is as it was.
func TestNamesInEveryCluster_C18_C19_C20(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, member := range testbed.Members() {
		for _, vip := range addrs {
			resolvesTo(t, member, map[bool]string{true: "A", false: "AAAA"}[vip.Is4()], name, vip.String())
		}
		resolvesTo(t, member, "SRV", name, "7 "+name, "80 "+name)
		resolvesTo(t, member, "SRV", "_http._tcp."+name, "80 "+name)
		clusterIP, err := bed.Kubectl(t.Context(), member, "get", "service", "echo", "--namespace", namespace, "--output", "jsonpath={.spec.clusterIP}")
		if err != nil {
			t.Fatal(err)
		}
		resolvesTo(t, member, "A", "echo.road.svc.cluster.local", clusterIP)
	}
}

// database is what the tests know of the pods of the StatefulSet db in a member, by hostname.
func database(t *testing.T, member string) map[string][]netip.Addr {
	t.Helper()
	said, err := bed.Kubectl(t.Context(), member, "get", "pods", "--namespace", namespace, "--selector", "app=db",
		"--output", `jsonpath={range .items[*]}{.metadata.name}{range .status.podIPs[*]} {.ip}{end}{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	pods := map[string][]netip.Addr{}
	for line := range strings.Lines(said) {
		f := strings.Fields(line)
		for _, ip := range f[1:] {
			pods[f[0]] = append(pods[f[0]], netip.MustParseAddr(ip))
		}
	}
	return pods
}

// TestHeadlessNamesInEveryCluster: the name of a headless Service has the ready pods of all clusters, each host has a
// name below its cluster, SRV of the bare name leads to the hosts, and all of that follows the scale.
func TestHeadlessNamesInEveryCluster_C21_C22_C23_L66_L67(t *testing.T) {
	needBed(t)
	const db = "db.road.svc.clusterset.local"
	for _, member := range testbed.Members() {
		if err := bed.Apply(t.Context(), member, headlessWorkload); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if _, err := bed.Kubectl(context.WithoutCancel(t.Context()), member, "delete", "statefulset/db", "service/db", "serviceexport/db", "--namespace", namespace, "--ignore-not-found", "--wait=false"); err != nil {
				t.Error(err)
			}
		}()
		if _, err := bed.Kubectl(t.Context(), member, "rollout", "status", "statefulset/db", "--namespace", namespace, "--timeout", "60s"); err != nil {
			t.Fatal(err)
		}
		if _, err := bed.Isthmusctl(t.Context(), member, "export", "service", "db", "--namespace", namespace); err != nil {
			t.Fatal(err)
		}
	}
	hosts := func() {
		t.Helper()
		var all, targets []string
		var one string // a host and its addresses
		var ofOne []string
		for _, member := range testbed.Members() {
			for pod, ips := range database(t, member) {
				one = pod + "." + member + "." + db
				targets = append(targets, "8081 "+one) // the pods' own port: nobody translates between
				ofOne = nil
				for _, ip := range ips {
					if ip.Is4() {
						all = append(all, ip.String())
						ofOne = append(ofOne, ip.String())
					}
				}
			}
		}
		for _, member := range testbed.Members() {
			resolvesTo(t, member, "A", db, all...)
			resolvesTo(t, member, "A", one, ofOne...)
			resolvesTo(t, member, "SRV", db, targets...)
		}
	}
	hosts()
	if _, err := bed.Kubectl(t.Context(), "b", "scale", "statefulset/db", "--namespace", namespace, "--replicas", "1"); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Kubectl(t.Context(), "b", "wait", "pod/db-1", "--namespace", namespace, "--for", "delete", "--timeout", "60s"); err != nil {
		t.Fatal(err)
	}
	hosts()
}

// TestKilledAgentLosesNoLookup: 200 lookups a second from a pod go on while the agent of its node is killed and stays
// away, and come home when it is back.
func TestKilledAgentLosesNoLookup(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	cmd, err := podClient(ctx, "--lookup", name+".", "--rate", "200", "--concurrency", "20", "--duration", "5m")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = bed.KillAgent(ctx, "a", clientNode)
	if err == nil {
		// The node's own answers nothing; the questions do not notice.
		_, err = client(podClient).run(ctx, "--lookup", name+".", "--rate", "100", "--connections", "200")
	}
	err = errors.Join(err, bed.ReviveAgent(context.WithoutCancel(ctx), "a", clientNode))
	err = errors.Join(err, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
	if err != nil {
		t.Fatal(err)
	}
	r, err := readReport(out.String())
	if err != nil {
		t.Fatal(err)
	}
	if r.Failures != 0 || r.Connections < 500 || len(r.Backends) != 1 {
		t.Errorf("of %d lookups %d failed: %v; answers %v", r.Connections, r.Failures, r.Errors, r.Backends)
	}
}
