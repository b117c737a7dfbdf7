package e2e

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

// explained is the part of the output of isthmusctl explain -o json that the tests read.
type explained struct {
	OK       bool          `json:"ok"`
	Broken   explainedLink `json:"broken"`
	BrokenOn string        `json:"brokenOn"`
	Nodes    []struct {
		Node  string          `json:"node"`
		Links []explainedLink `json:"links"`
	} `json:"nodes"`
}

type explainedLink struct {
	Link  string `json:"link"`
	State string `json:"state"`
	Text  string `json:"text"`
	Fix   string `json:"fix"`
}

// explain runs isthmusctl explain in a member. It fails if the exit status does not match the output.
func explain(ctx context.Context, member, service string) (explained, error) {
	var x explained
	output, err := bed.Isthmusctl(ctx, member, "explain", service, "--output", "json")
	if jsonErr := json.Unmarshal([]byte(output), &x); jsonErr != nil {
		return x, errors.Join(err, jsonErr)
	}
	if x.OK != (err == nil) {
		return x, fmt.Errorf("explain reports ok=%t and ends with %w", x.OK, err)
	}
	return x, nil
}

// brokenAt waits until link is the first broken one, on a node or, if node is "", in the cluster.
func brokenAt(t *testing.T, service, link, node string) {
	t.Helper()
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		x, err := explain(ctx, "a", service)
		if err != nil {
			return err
		}
		if x.OK || x.Broken.Link != link || x.BrokenOn != node || x.Broken.Fix == "" {
			return fmt.Errorf("ok=%t, broken at %+v on %q", x.OK, x.Broken, x.BrokenOn)
		}
		return nil
	})
	if err != nil {
		t.Errorf("want %s to be broken at %s on node %q: %v", service, link, node, err)
	}
}

// isOK waits until all links are ok.
func isOK(t *testing.T, service string) {
	t.Helper()
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		x, err := explain(ctx, "a", service)
		if err != nil {
			return err
		}
		if !x.OK || len(x.Nodes) != 2 {
			return fmt.Errorf("ok=%t on %d nodes, broken at %+v on %q", x.OK, len(x.Nodes), x.Broken, x.BrokenOn)
		}
		for _, n := range x.Nodes {
			for _, link := range []string{"agent", "import", "name", "cluster DNS", "map", "backends"} {
				if !slices.ContainsFunc(n.Links, func(l explainedLink) bool { return l.Link == link && l.State == "ok" }) {
					return fmt.Errorf("node %s has no link %s: %+v", n.Node, link, n.Links)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Errorf("want all links of %s to be ok: %v", service, err)
	}
}

// isthmusctl explain accepts every form of a Service's name and reports ok on every node. It reports each broken link, with
// the fix.
func TestExplain(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	addrs, err := vips(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{"echo.e2e", "e2e/echo", name, addrs[0].String()} {
		isOK(t, service)
	}
	text, err := bed.Isthmusctl(ctx, "a", "explain", "echo.e2e", "--node", clientNode)
	if err != nil || !strings.Contains(text, "node "+clientNode) || strings.Contains(text, "✗") {
		t.Errorf("as text, %v:\n%s", err, text)
	}
	t.Log(text)
	brokenAt(t, "unknown.e2e", "import", "")

	t.Run("the kernel of a node", func(t *testing.T) { explainMap(t, addrs) })
	t.Run("the name server of a node", func(t *testing.T) {
		const own = "169.254.20.53/32"
		device, err := bed.Node(ctx, clientNode, "sh", "-c", "ip -o -4 address show to "+own+" | awk '{print $2}'")
		if err != nil {
			t.Fatal(err)
		}
		device = strings.TrimSpace(device)
		if _, err := bed.Node(ctx, clientNode, "ip", "address", "del", own, "dev", device); err != nil {
			t.Fatal(err)
		}
		brokenAt(t, "echo.e2e", "name", clientNode)
		if _, err := bed.Node(ctx, clientNode, "ip", "address", "add", own, "dev", device); err != nil {
			t.Fatal(err)
		}
		isOK(t, "echo.e2e")
	})
	t.Run("the cluster's DNS", func(t *testing.T) {
		patch := func(app string) {
			if _, err := bed.Kubectl(ctx, "a", "patch", "service", "kube-dns", "--namespace", "kube-system", "--patch", `{"spec":{"selector":{"k8s-app":"`+app+`"}}}`); err != nil {
				t.Fatal(err)
			}
		}
		patch("no-such-app")
		brokenAt(t, "echo.e2e", "cluster DNS", "a1")
		patch("kube-dns")
		isOK(t, "echo.e2e")
	})
	t.Run("a Service from export to unexport", explainExport)
}

// explainMap deletes a VIP from the BPF map. explain reports it until the agent has restored it.
func explainMap(t *testing.T, addrs []netip.Addr) {
	t.Helper()
	ctx := t.Context()
	vip := addrs[slices.IndexFunc(addrs, netip.Addr.Is4)].As16()
	key := append(slices.Clone(vip[:]), 80, 0, 6, 0) // port, in host order; TCP; padding
	bytes := []string{"bpftool", "map", "delete", "pinned", pins + "/frontends", "key", "hex"}
	for _, b := range key {
		bytes = append(bytes, hex.EncodeToString([]byte{b}))
	}
	// The agent may restore the VIP before explain reads the map.
	err := testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		if _, err := bed.Node(ctx, clientNode, bytes...); err != nil && !strings.Contains(err.Error(), "No such file") {
			return err
		}
		x, err := explain(ctx, "a", "echo.e2e")
		if err != nil {
			return err
		}
		if x.OK || x.Broken.Link != "map" || x.BrokenOn != clientNode || !strings.Contains(x.Broken.Text, "is not in the kernel") {
			return fmt.Errorf("ok=%t, broken at %+v on %q", x.OK, x.Broken, x.BrokenOn)
		}
		return nil
	})
	if err != nil {
		t.Errorf("explain does not report a VIP that is not in the kernel: %v", err)
	}
	isOK(t, "echo.e2e")
	if err := reaches(ctx, podClient, "a", "b"); err != nil {
		t.Error(err)
	}
	// The difference is counted until the next check finds none.
	err = testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		nodes, err := bed.Isthmusctl(ctx, "a", "show", "nodes", "--output", "json")
		if err != nil {
			return err
		}
		var rows []struct {
			Node   string
			Status struct{ Dataplane struct{ Differences int } }
		}
		if err := json.Unmarshal([]byte(nodes), &rows); err != nil {
			return err
		}
		for _, r := range rows {
			if r.Status.Dataplane.Differences != 0 {
				return fmt.Errorf("node %s has %d differences", r.Node, r.Status.Dataplane.Differences)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// explainExport explains a Service of b in a: before the namespace exists in a, without endpoints, and after the unexport.
func explainExport(t *testing.T) {
	ctx := t.Context()
	const lonely = "lonely"
	kubectl := func(member string, args ...string) {
		t.Helper()
		if _, err := bed.Kubectl(ctx, member, args...); err != nil {
			t.Fatal(err)
		}
	}
	isthmusctl := func(args ...string) {
		t.Helper()
		if _, err := bed.Isthmusctl(ctx, "b", args...); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, member := range testbed.Members() {
			if _, err := bed.Kubectl(context.WithoutCancel(ctx), member, "delete", "namespace", lonely, "--ignore-not-found", "--wait=false"); err != nil {
				t.Error(err)
			}
		}
	})
	kubectl("b", "create", "namespace", lonely)
	kubectl("b", "create", "service", "clusterip", "hello", "--tcp", "80:8080", "--namespace", lonely)
	isthmusctl("export", "service", "hello", "--namespace", lonely)
	brokenAt(t, "hello."+lonely, "namespace", "")
	kubectl("a", "create", "namespace", lonely)
	brokenAt(t, "hello."+lonely, "endpoints", "")
	isthmusctl("unexport", "service", "hello", "--namespace", lonely)
	brokenAt(t, "hello."+lonely, "import", "")
}

// event is the part of an event of isthmusctl observe -o json that the tests read.
type event struct {
	Node, Verdict, Reason, Path, Protocol, Service, Cluster, Command string
	VIP, Backend                                                     netip.AddrPort
	PID                                                              int
}

// observe returns the first event of isthmusctl observe in a, while c repeats the commands that cause one.
func observe(t *testing.T, c client, args, do []string) event {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	type outcome struct {
		output string
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		output, err := bed.Isthmusctl(ctx, "a", slices.Concat([]string{"observe", "--last", "1", "--for", patience.String(), "--output", "json"}, args)...)
		done <- outcome{output, err}
	}()
	for {
		if _, err := c.run(ctx, do...); err != nil {
			t.Fatal(err)
		}
		select {
		case o := <-done:
			if o.err != nil {
				t.Fatal(o.err)
			}
			var e event
			if err := json.Unmarshal([]byte(o.output), &e); err != nil {
				t.Fatalf("observe %v printed %q: %v", args, o.output, err)
			}
			return e
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// isthmusctl observe shows a pod's connection and a refused one, with names. The programs stop making events when the
// observer ends.
func TestObserve(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	addrs, err := vips(ctx)
	if err != nil {
		t.Fatal(err)
	}
	http := netip.AddrPortFrom(addrs[0], 80)
	e := observe(t, podClient, []string{"--service", "echo.e2e", "--node", clientNode}, []string{"--connections", "1", "--url", "http://" + http.String()})
	want := event{
		Node: clientNode, Verdict: "chosen", Path: "socket", Protocol: "TCP", Service: "e2e/echo", Command: "echo-server", VIP: http,
		Cluster: e.Cluster, Backend: e.Backend, PID: e.PID,
	}
	if e != want || e.Cluster != "a" && e.Cluster != "b" || e.Backend.Port() != 8080 || e.PID == 0 {
		t.Errorf("observed %+v, want %+v with a backend and a process", e, want)
	}
	unused := netip.AddrPortFrom(addrs[0], 4444)
	e = observe(t, podClient, []string{"--refused"}, []string{"--connections", "1", "--timeout", "2s", "--tcp", unused.String()})
	want = event{Node: clientNode, Verdict: "refused", Reason: "no_frontend", Path: "socket", Protocol: "TCP", Command: "echo-server", VIP: unused, PID: e.PID}
	if e != want || e.PID == 0 {
		t.Errorf("observed %+v, want %+v with a process", e, want)
	}

	forever := bed.IsthmusctlCommand(ctx, "a", "observe", "--reason", "no_memory")
	if err := forever.Start(); err != nil {
		t.Fatal(err)
	}
	observing(t, true)
	if err := forever.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := forever.Wait(); err != nil {
		t.Errorf("after an interrupt it ends with %v", err)
	}
	observing(t, false)
}

// observing waits until the programs of clientNode make events, or until they make none.
func observing(t *testing.T, want bool) {
	t.Helper()
	err := testbed.Eventually(t.Context(), patience, func(context.Context) error {
		for _, e := range dump(t, "settings") {
			if rate := e["value"].(map[string]any)["observe"].(float64); rate > 0 != want {
				return fmt.Errorf("the sample rate is %g", rate)
			}
		}
		return nil
	})
	if err != nil {
		t.Errorf("want events: %t: %v", want, err)
	}
}

// isthmusctl show prints the state of Services, clusters and nodes. Agents refuse requests without a token.
func TestShow(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	addrs, err := vips(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string][]string{
		"show services e2e":           {"e2e/echo", "ClusterSetIP", addrs[0].String(), "80/TCP", "a,b", "4/4", "yes"},
		"show backends e2e":           {"e2e/echo", "8080/TCP", "ready", "b1"},
		"show clusters":               {"this one", "live", "b"},
		"show nodes":                  {"a1", "a2", "yes"},
		"show frontends --node a2":    {"a2", "e2e/echo", netip.AddrPortFrom(addrs[0], 80).String(), "a,b"},
		"show hooks --node a1":        {"a1", "connect4", "cgroup"},
		"show drops -o json":          {`"node": "a1"`, `"node": "a2"`},
		"show connections --limit=10": {"PROTOCOL|the packet path has no connections"}, // depends on earlier tests
	} {
		output, err := bed.Isthmusctl(ctx, "a", strings.Fields(args)...)
		if err != nil {
			t.Errorf("%s: %v", args, err)
			continue
		}
		for _, w := range want {
			if !slices.ContainsFunc(strings.Split(w, "|"), func(w string) bool { return strings.Contains(output, w) }) {
				t.Errorf("%s does not print %q:\n%s", args, w, output)
			}
		}
	}
	for _, path := range []string{"/explain?namespace=e2e&name=echo", "/observe", "/show/services", "/status", "/metrics"} {
		for _, header := range []string{"", "Isthmus-Token: not.a.token"} {
			output, err := bed.Node(ctx, clientNode, "curl", "--silent", "--insecure", "--max-time", "5", "--header", header, "https://127.0.0.1:9470"+path)
			if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if !strings.Contains(output, "isthmus-observer") {
				t.Errorf("%s with header %q answers: %s", path, header, output)
			}
		}
	}
}

// `helm test` runs isthmusctl status in the cluster with the rights of the chart's test account, and leaves nothing behind. isthmusctl
// version prints what runs there.
func TestHelmTest(t *testing.T) {
	needBed(t)
	output, err := bed.Helm(t.Context(), "a", "test", "isthmus", "--namespace", testbed.Namespace, "--timeout", patience.String())
	if err != nil {
		logs, _ := bed.Kubectl(t.Context(), "a", "-n", testbed.Namespace, "logs", "isthmus-test")
		t.Fatalf("helm test: %v\n%s\n%s", err, output, logs)
	}
	left, err := bed.Kubectl(t.Context(), "a", "-n", testbed.Namespace, "get", "pod,sa,role,rolebinding,clusterrole,clusterrolebinding",
		"-l", "app.kubernetes.io/name=isthmus-test", "-o", "name")
	if err != nil || strings.TrimSpace(left) != "" {
		t.Errorf("helm test leaves %q (%v)", left, err)
	}
	output, err = bed.Isthmusctl(t.Context(), "a", "version")
	if err != nil || strings.Count(output, "dev") != 3 {
		t.Errorf("isthmusctl version: %v\n%s", err, output)
	}
}
