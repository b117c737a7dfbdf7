package e2e

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed testdata/dns.yaml
var headlessWorkload string

// inPod runs a command in the client pod of a member.
func inPod(ctx context.Context, member string, args ...string) (string, error) {
	return bed.Exec(ctx, member, namespace, "client", args...)
}

// nslookup runs BIND's nslookup and returns addresses, or "PORT TARGET" of SRV records, sorted.
func nslookup(ctx context.Context, member, qtype, name string) ([]string, error) {
	output, err := inPod(ctx, member, "nslookup", "-type="+qtype, name+".")
	if err != nil {
		return nil, err
	}
	var found []string
	for line := range strings.Lines(output) {
		f := strings.Fields(line)
		switch {
		case len(f) == 2 && f[0] == "Address:" && !strings.Contains(f[1], "#"): // the server's own address has a port
			found = append(found, f[1])
		case len(f) == 7 && f[1] == "service":
			found = append(found, f[5]+" "+strings.TrimSuffix(f[6], "."))
		}
	}
	slices.Sort(found)
	return found, nil
}

// resolvesTo waits until nslookup in a member returns exactly want.
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

// With CoreDNS alone (a) and behind NodeLocal DNSCache (b), a Service's name resolves to its VIPs, SRV of the name has each
// port once, and cluster.local still works.
func TestNamesInEveryCluster(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, member := range testbed.Members() {
		for _, vip := range addrs {
			resolvesTo(t, member, map[bool]string{true: "A", false: "AAAA"}[vip.Is4()], name, vip.String())
		}
		conformance.Holds(t, "C18")
		resolvesTo(t, member, "SRV", name, "7 "+name, "80 "+name)
		resolvesTo(t, member, "SRV", "_http._tcp."+name, "80 "+name)
		conformance.Holds(t, "C19")
		clusterIP, err := bed.Kubectl(t.Context(), member, "get", "service", "echo", "--namespace", namespace, "--output", "jsonpath={.spec.clusterIP}")
		if err != nil {
			t.Fatal(err)
		}
		resolvesTo(t, member, "A", "echo.e2e.svc.cluster.local", clusterIP)
		conformance.Holds(t, "C20")
	}
}

// The kernel answers a pod's simple questions to a resolver of --dns-fast-path at the pod's interface, besides the packet
// path. No server runs at the resolver's address.
func TestKernelAnswers(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, vip := range addrs {
		output, err := inPod(t.Context(), "a", "nslookup", "-type="+map[bool]string{true: "A", false: "AAAA"}[vip.Is4()], name+".", nobody)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(output, vip.String()) {
			t.Errorf("the answer for %s is\n%s\nwant %s", name, output, vip)
		}
	}
}

// database returns the addresses of the pods of StatefulSet db in a member, by hostname.
func database(t *testing.T, member string) map[string][]netip.Addr {
	t.Helper()
	output, err := bed.Kubectl(t.Context(), member, "get", "pods", "--namespace", namespace, "--selector", "app=db",
		"--output", `jsonpath={range .items[*]}{.metadata.name}{range .status.podIPs[*]} {.ip}{end}{"\n"}{end}`)
	if err != nil {
		t.Fatal(err)
	}
	pods := map[string][]netip.Addr{}
	for line := range strings.Lines(output) {
		f := strings.Fields(line)
		for _, ip := range f[1:] {
			pods[f[0]] = append(pods[f[0]], netip.MustParseAddr(ip))
		}
	}
	return pods
}

// The name of a headless Service resolves to the ready pods of all clusters, each host has a name below its cluster, and SRV
// of the Service's name points at the hosts. All follow the number of replicas, down to a single cluster. Without pods the
// name does not exist, and it exists again when the Service is created again.
func TestHeadlessNamesInEveryCluster(t *testing.T) {
	needBed(t)
	t.Parallel()
	const db = "db.e2e.svc.clusterset.local"
	for _, member := range testbed.Members() {
		if err := bed.Apply(t.Context(), member, headlessWorkload); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if _, err := bed.Kubectl(context.WithoutCancel(t.Context()), member, "delete", "statefulset/db", "service/db", "serviceexport/db", "--namespace", namespace, "--ignore-not-found", "--wait=false"); err != nil {
				t.Error(err)
			}
		}()
		if _, err := bed.Kubectl(t.Context(), member, "rollout", "status", "statefulset/db", "--namespace", namespace, "--timeout", patience.String()); err != nil {
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
				targets = append(targets, "8081 "+one) // the pods' own port: headless Services are not translated
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
	conformance.Holds(t, "C21", "C22", "C23")
	if _, err := bed.Kubectl(t.Context(), "b", "scale", "statefulset/db", "--namespace", namespace, "--replicas", "0"); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Kubectl(t.Context(), "b", "wait", "pod/db-0", "pod/db-1", "--namespace", namespace, "--for", "delete", "--timeout", patience.String()); err != nil {
		t.Fatal(err)
	}
	hosts()
	conformance.Holds(t, "L66", "L67")
	if _, err := bed.Kubectl(t.Context(), "a", "delete", "service/db", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	for _, member := range testbed.Members() {
		isNXDOMAIN(t, member, db)
	}
	conformance.Holds(t, "L65")
	if err := bed.Apply(t.Context(), "a", headlessWorkload); err != nil {
		t.Fatal(err)
	}
	hosts()
	conformance.Holds(t, "L64")
}

// isNXDOMAIN waits until a name does not exist in a member.
func isNXDOMAIN(t *testing.T, member, name string) {
	t.Helper()
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		output, err := inPod(ctx, member, "dig", name+".", "A")
		if err == nil && !strings.Contains(output, "status: NXDOMAIN") {
			err = fmt.Errorf("%s in %s:\n%s", name, member, output)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// lookups starts 200 lookups per second from a pod in a. end stops them, but not before 500, and checks that none failed.
func lookups(t *testing.T, flags ...string) (end func()) {
	t.Helper()
	const minimum = 500
	cmd, err := podClient(t.Context(), append(flags, "--lookup", name+".", "--rate", "200", "--concurrency", "20", "--minimum", strconv.Itoa(minimum), "--duration", "2h")...)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			t.Fatal(err)
		}
		r, err := readReport(out.String())
		if err != nil {
			t.Fatal(err)
		}
		if r.Failures != 0 || r.Connections < minimum || len(r.Backends) != 1 {
			t.Errorf("of %d lookups %d failed: %v, the last at %s; answers %v", r.Connections, r.Failures, r.Errors, r.LastFailure, r.Backends)
		}
	}
}

// No lookup fails while the agent of the node is killed and stays down. Lookups use it again after it has started.
func TestKilledAgentLosesNoLookup(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	end := lookups(t)
	err := bed.KillAgent(ctx, "a", clientNode)
	if err == nil {
		// The node's own agent does not answer; lookups still succeed.
		_, err = client(podClient).run(ctx, "--lookup", name+".", "--rate", "100", "--connections", "200")
	}
	if err := errors.Join(err, bed.ReviveAgent(context.WithoutCancel(ctx), "a", clientNode)); err != nil {
		t.Error(err)
	}
	end()
}

// No lookup fails during a rolling restart of all agents; a resolver may retry.
func TestReplacedAgentsLoseNoLookup(t *testing.T) {
	needBed(t)
	const daemonSet = "daemonset/isthmus-agent"
	end := lookups(t, "--timeout", "15s") // a resolver tries twice, for five seconds each
	for _, args := range [][]string{{"rollout", "restart", daemonSet}, {"rollout", "status", daemonSet, "--timeout", patience.String()}} {
		if _, err := bed.Kubectl(t.Context(), "a", append(args, "--namespace", testbed.Namespace)...); err != nil {
			t.Error(err)
		}
	}
	end()
}

// Behind NodeLocal DNSCache, parallel A and AAAA questions make no conntrack entries on the node, from the pod to the agent.
func TestLookupsAreNotTracked(t *testing.T) {
	needBed(t)
	const node = "b1"
	clusterDNS, err := bed.Kubectl(t.Context(), "b", "get", "service", "kube-dns", "--namespace", "kube-system", "--output", "jsonpath={.spec.clusterIP}")
	if err != nil {
		t.Fatal(err)
	}
	failed := func() int {
		t.Helper()
		output, err := bed.Node(t.Context(), node, "conntrack", "--stats")
		if err != nil {
			t.Fatal(err)
		}
		sum := 0
		for f := range strings.FieldsSeq(output) {
			if n, ok := strings.CutPrefix(f, "insert_failed="); ok {
				i, err := strconv.Atoi(n)
				if err != nil {
					t.Fatal(err)
				}
				sum += i
			}
		}
		return sum
	}
	before := failed()
	r, err := clientIn("b").run(t.Context(), "--lookup", name+".", "--concurrency", "16", "--connections", "400")
	if err != nil {
		t.Fatal(err)
	}
	if r.Failures > 0 || len(r.Backends) != 1 {
		t.Errorf("%d lookups failed: %v; answers %v", r.Failures, r.Errors, r.Backends)
	}
	if after := failed(); after != before {
		t.Errorf("insert_failed went from %d to %d", before, after)
	}
	source, err := bed.Kubectl(t.Context(), "b", "get", "pod", "client", "--namespace", namespace, "--output", "jsonpath={.status.podIP}")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := bed.Node(t.Context(), node, "conntrack", "--dump")
	if err != nil {
		t.Fatal(err)
	}
	// CoreDNS, too, asks the cluster's DNS server, to know whether it is well; only NodeLocal DNSCache asks the agent.
	for line := range strings.Lines(entries) {
		for _, hop := range []string{"src=" + source + " dst=" + clusterDNS, "src=" + source + " dst=" + testbed.NodeLocalDNSAddress, " dst=169.254.20.53"} {
			if strings.Contains(line, hop+" ") && strings.Contains(line, " dport=53 ") {
				t.Errorf("tracked: %s", line)
			}
		}
	}
}

// dnsStatus is the part of the output of isthmusctl dns status -o json that the tests read.
type dnsStatus struct {
	OK      bool `json:"ok"`
	Configs []struct {
		Name, State string
	} `json:"configs"`
	Answers []struct {
		Answers bool `json:"answers"`
	} `json:"answers"`
}

// isthmusctl dns uninstall removes exactly the stub that install has added, from CoreDNS and from NodeLocal DNSCache, and
// keeps other edits. Without the stub pods cannot resolve names, and isthmusctl reports it. install adds it again.
func TestStubInstallAndUninstall(t *testing.T) {
	needBed(t)
	const member = "b"
	corefile := func() string {
		t.Helper()
		output, err := bed.Kubectl(t.Context(), member, "get", "configmap", "coredns", "--namespace", "kube-system", "--output", "jsonpath={.data.Corefile}")
		if err != nil {
			t.Fatal(err)
		}
		return output
	}
	state := func(want string, answer bool) error {
		return testbed.Eventually(t.Context(), patience, func(context.Context) error {
			ctx := t.Context() // a command that is cut off has no output
			output, failed := bed.Isthmusctl(ctx, member, "dns", "status", "--output", "json")
			var s dnsStatus
			if err := json.Unmarshal([]byte(output), &s); err != nil {
				return errors.Join(failed, err)
			}
			if s.OK != answer || len(s.Configs) != 2 || s.Configs[0].State != want || s.Configs[1].State != want {
				return fmt.Errorf("dns status: %s", output)
			}
			for _, a := range s.Answers {
				if a.Answers != answer {
					return fmt.Errorf("dns status: %s", output)
				}
			}
			return nil
		})
	}
	installed := corefile()
	if err := state("installed", true); err != nil {
		t.Fatal(err)
	}
	const foreign = "example.org:53 {\n    errors\n}\n"
	edit, err := json.Marshal(map[string]map[string]string{"data": {"Corefile": installed + foreign}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Kubectl(t.Context(), member, "patch", "configmap", "coredns", "--namespace", "kube-system", "--patch", string(edit)); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Isthmusctl(t.Context(), member, "dns", "uninstall", "--yes"); err != nil {
		t.Fatal(err)
	}
	if have := corefile(); strings.Contains(have, "isthmus") || strings.Contains(have, "clusterset.local") || !strings.HasSuffix(have, foreign) {
		t.Errorf("after uninstall the Corefile is\n%s", have)
	}
	if err := state("not installed", false); err != nil {
		t.Error(err)
	}
	if out, err := inPod(t.Context(), member, "dig", "+tries=1", name, "A"); err != nil || strings.Contains(out, "status: NOERROR") {
		t.Errorf("without the stub the name resolves: %v\n%s", err, out)
	}
	began := time.Now()
	if _, err := bed.Isthmusctl(t.Context(), member, "dns", "install", "--yes"); err != nil {
		t.Fatal(err)
	}
	t.Logf("installed, loaded by every server and answered after %s", time.Since(began).Round(time.Second))
	if have := corefile(); have != installed+foreign {
		t.Errorf("after install the Corefile is\n%s\nwant\n%s", have, installed+foreign)
	}
	if err := state("installed", true); err != nil {
		t.Error(err)
	}
}

// The C library's resolver, BIND's dig over TCP and Knot's kdig resolve a name to its VIPs.
func TestResolvers(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, member := range testbed.Members() {
		for _, vip := range addrs {
			family, qtype := "ahostsv6", "AAAA"
			if vip.Is4() {
				family, qtype = "ahostsv4", "A"
			}
			for _, tool := range [][]string{
				{"getent", family, name}, {"dig", "+short", "+tcp", name, qtype}, {"kdig", "+short", name, qtype},
			} {
				output, err := inPod(t.Context(), member, tool...)
				if err != nil {
					t.Fatal(err)
				}
				if f := strings.Fields(output); len(f) == 0 || f[0] != vip.String() {
					t.Errorf("%s in %s: %q, want %s", strings.Join(tool, " "), member, output, vip)
				}
			}
		}
	}
}

// Pods of every cluster resolve a name with 200 addresses, too many for a datagram: a truncated answer makes them retry over
// TCP.
func TestLargeHeadlessService(t *testing.T) {
	needBed(t)
	const many = 200
	var manifest strings.Builder
	manifest.WriteString(`
apiVersion: v1
kind: Service
metadata: {name: many, namespace: e2e}
spec: {clusterIP: None, ports: [{name: tcp, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: many-1, namespace: e2e, labels: {kubernetes.io/service-name: many}}
addressType: IPv4
ports: [{name: tcp, port: 80, protocol: TCP}]
endpoints:
`)
	var want []string
	for i := range many {
		want = append(want, fmt.Sprintf("10.201.1.%d", i+1))
		fmt.Fprintf(&manifest, "- {addresses: [%s], conditions: {ready: true}}\n", want[i])
	}
	defer func() {
		if _, err := bed.Kubectl(context.WithoutCancel(t.Context()), "a", "delete", "service/many", "endpointslice/many-1", "serviceexport/many", "--namespace", namespace, "--ignore-not-found", "--wait=false"); err != nil {
			t.Error(err)
		}
	}()
	if err := bed.Apply(t.Context(), "a", manifest.String()); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Isthmusctl(t.Context(), "a", "export", "service", "many", "--namespace", namespace); err != nil {
		t.Fatal(err)
	}
	for _, member := range testbed.Members() {
		resolvesTo(t, member, "A", "many.e2e.svc.clusterset.local", want...)
		out, err := inPod(t.Context(), member, "dig", "+ignore", "many.e2e.svc.clusterset.local", "A") // no TCP
		if err != nil {
			t.Fatal(err)
		}
		if flags := strings.Join(strings.Fields(out), " "); !strings.Contains(flags, " tc") {
			t.Errorf("over UDP the answer in %s lacks the flag tc:\n%s", member, out)
		}
	}
}

//go:embed testdata/multicluster.yaml
var multicluster string

// CoreDNS's own option multicluster answers from the objects that Isthmus writes.
func TestCoreDNSWithoutAgents(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd := bed.Lab.Kubectl(context.WithoutCancel(t.Context()), "a", "delete", "--wait=false", "-f", "-")
		cmd.Stdin = strings.NewReader(multicluster)
		if _, err := process.Output(cmd); err != nil {
			t.Error(err)
		}
	}()
	if err := bed.Apply(t.Context(), "a", multicluster); err != nil {
		t.Fatal(err)
	}
	if _, err := bed.Kubectl(t.Context(), "a", "wait", "pod/coredns-multicluster", "--namespace", "kube-system", "--for", "condition=Ready", "--timeout", patience.String()); err != nil {
		t.Fatal(err)
	}
	server, err := bed.Kubectl(t.Context(), "a", "get", "pod", "coredns-multicluster", "--namespace", "kube-system", "--output", "jsonpath={.status.podIP}")
	if err != nil {
		t.Fatal(err)
	}
	for _, vip := range addrs {
		output, err := inPod(t.Context(), "a", "dig", "+short", "@"+server, name, map[bool]string{true: "A", false: "AAAA"}[vip.Is4()])
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(output) != vip.String() {
			t.Errorf("CoreDNS answers %q, want %s", output, vip)
		}
	}
}
