package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

const pins = "/sys/fs/bpf/isthmus/maps-v4"

// TestKilledAgentLosesNothing: no connection fails while the agent is killed by SIGKILL, during 10,000 connections without it, and while
// it comes back. New ones by name work too. The agent that comes back finds everything in place and writes nothing.
func TestKilledAgentLosesNothing(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + netip.AddrPortFrom(addrs[0], 80).String()
	throughout := flow(t, podClient, "--rate", "200", "--url", url)
	if err := bed.KillAgent(t.Context(), "a", clientNode); err != nil {
		t.Fatal(err)
	}
	byName, err := client(podClient).run(t.Context(), "--connections", "200", "--url", "http://"+name)
	if err != nil {
		t.Fatal(err)
	}
	if byName.Failures != 0 || !slices.Equal(byName.clusters(), []string{"a", "b"}) {
		t.Errorf("by name, without an agent on the node: %d of %d failed %v, clusters %v",
			byName.Failures, byName.Connections, byName.Errors, byName.clusters())
	}
	without, err := client(podClient).run(t.Context(), "--connections", "10000", "--concurrency", "2", "--url", url)
	if err != nil {
		t.Fatal(err)
	}
	if without.Failures != 0 || without.Connections != 10000 {
		t.Errorf("without an agent %d of %d connections failed: %v", without.Failures, without.Connections, without.Errors)
	}

	if err := bed.ReviveAgent(t.Context(), "a", clientNode); err != nil {
		t.Fatal(err)
	}
	said, err := bed.AgentStatus(t.Context(), "a", clientNode)
	if err != nil {
		t.Fatal(err)
	}
	if said.Dataplane.Writes != 0 {
		t.Errorf("the new agent wrote %d map entries though nothing had changed", said.Dataplane.Writes)
	}
	if said.Dataplane.Frontends == 0 {
		t.Error("the new agent knows no frontends")
	}
	if r, err := throughout.end(); err != nil || r.Failures != 0 {
		t.Errorf("%d of %d connections failed: %v; %v", r.Failures, r.Connections, r.Errors, err)
	}
}

// underLoad makes each client connect 200 times a second to VIPs of both families, and hold a connection to each,
// while something changes. No connection may fail.
func underLoad(t *testing.T, clients map[string]client, change func()) {
	t.Helper()
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	streams := map[string]*stream{}
	for path, c := range clients {
		for _, vip := range addrs {
			url := "http://" + netip.AddrPortFrom(vip, 80).String()
			streams[path+" to "+vip.String()] = flow(t, c, "--rate", "100", "--timeout", "3s", "--url", url)
			defer hold(t, c, url).end(t)
		}
	}
	change()
	for path, s := range streams {
		r, err := s.end()
		if err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if r.Failures != 0 || len(r.Backends) != 4 {
			t.Errorf("%s: %d of %d connections failed: %v; answered by %v", path, r.Failures, r.Connections, r.Errors, r.Backends)
		}
		t.Logf("%s: %d connections", path, r.Connections)
	}
}

// agents changes the agents of a and waits until all of them are as they should be, with maps of an ABI and no others.
func agents(t *testing.T, abi int, change ...string) {
	t.Helper()
	for _, args := range [][]string{change, {"rollout", "status", "daemonset/isthmus-agent", "--timeout", "10m"}} {
		if _, err := bed.Kubectl(t.Context(), "a", append(args, "--namespace", testbed.Namespace)...); err != nil {
			t.Fatal(err)
		}
	}
	want := fmt.Sprintf("maps-v%d", abi)
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		have, err := bed.Node(ctx, clientNode, "sh", "-c", "cd /sys/fs/bpf/isthmus && echo maps-*")
		if err == nil && strings.TrimSpace(have) != want {
			err = fmt.Errorf("there are %s, want %s", have, want)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAgentIsReplacedUnderLoad: on neither path a connection fails while the agent of the client's node is killed,
// started again, restarted, upgraded to a build whose maps are of another ABI, and rolled back.
func TestAgentIsReplacedUnderLoad(t *testing.T) {
	needBed(t)
	const (
		file = "bpf/abi.go"
		says = "var ABIVersion = versionIn(abiHeader, \"ABI_VERSION\")\n"
		ds   = "daemonset/isthmus-agent"
	)
	ours, next := bpf.ABIVersion, bpf.ABIVersion+1
	source, err := os.ReadFile(filepath.Join("..", file))
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(string(source), says, fmt.Sprintf("var ABIVersion = %d\n", next), 1)
	if changed == string(source) {
		t.Fatalf("%s does not say %q", file, says)
	}
	if err := bed.AnotherAgent(t.Context(), "next", map[string]string{file: changed}); err != nil {
		t.Fatal(err)
	}
	image, err := bed.Kubectl(t.Context(), "a", "get", ds, "--namespace", testbed.Namespace, "--output", "jsonpath={.spec.template.spec.containers[0].image}")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() { // else later tests, which upgrade the release, fail too
			_, err := bed.Kubectl(context.Background(), "a", "set", "image", ds, "--namespace", testbed.Namespace, "agent="+image)
			t.Logf("the agents' image is %s again: %v", image, err)
		}
	})
	underLoad(t, paths(), func() {
		if err := errors.Join(bed.KillAgent(t.Context(), "a", clientNode), bed.ReviveAgent(t.Context(), "a", clientNode)); err != nil {
			t.Fatal(err)
		}
		agents(t, ours, "rollout", "restart", ds)
		agents(t, next, "set", "image", ds, "agent=isthmus/agent:next")
		agents(t, ours, "rollout", "undo", ds)
	})
}

// dump reads a pinned map of clientNode as bpftool prints it.
func dump(t *testing.T, name string) []map[string]any {
	t.Helper()
	out, err := bed.Node(t.Context(), clientNode, "bpftool", "map", "dump", "pinned", pins+"/"+name)
	if err != nil {
		t.Fatal(err)
	}
	var entries []map[string]any
	if err := json.Unmarshal([]byte(out), &entries); err != nil {
		t.Fatalf("bpftool printed of %s what is no JSON with field names: %v\n%s", name, err, out)
	}
	return entries
}

// TestMapsAreReadable: bpftool shows every map with field names, addresses in order and ports as people
// write them.
func TestMapsAreReadable(t *testing.T) {
	needBed(t)
	addrs, err := vips(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	found := map[netip.AddrPort]bool{}
	for _, e := range dump(t, "frontends") {
		key := e["key"].(map[string]any)
		var raw [16]byte
		for i, b := range key["addr"].([]any) {
			raw[i] = number(t, b)
		}
		found[netip.AddrPortFrom(netip.AddrFrom16(raw).Unmap(), uint16(key["port"].(float64)))] = true
	}
	for _, vip := range addrs {
		if want := netip.AddrPortFrom(vip, 80); !found[want] {
			t.Errorf("bpftool shows no frontend %s, but %v", want, found)
		}
	}
	for name, fields := range map[string][]string{
		"frontends": {"addr", "port", "proto", "id", "count"},
		"slots":     {"frontend_id", "slot"},
		"backends":  {"addr", "port", "proto"},
		"udp_vips":  nil, // empty unless a client sends unconnected datagrams
		"refusals":  nil, // plain numbers
	} {
		entries := dump(t, name)
		for _, field := range fields {
			if len(entries) == 0 || !strings.Contains(fmt.Sprint(entries[0]), field+":") {
				t.Errorf("bpftool shows no field %s in map %s: %v", field, name, entries)
			}
		}
	}
}

// number reads a byte that bpftool wrote as a number or as "0x.." text.
func number(t *testing.T, v any) byte {
	t.Helper()
	switch v := v.(type) {
	case float64:
		return byte(v)
	case string:
		var n byte
		if _, err := fmt.Sscanf(v, "0x%x", &n); err != nil {
			t.Fatalf("read byte %q: %v", v, err)
		}
		return n
	}
	t.Fatalf("%v is no byte", v)
	return 0
}

// TestBadInputLeavesDataplane: an agent started with something wrong says so in one sentence that names it,
// exits, and leaves programs and maps of the running dataplane as they were.
func TestBadInputLeavesDataplane(t *testing.T) {
	needBed(t)
	// What stands in bpffs, and what the maps hold.
	state := func() string {
		t.Helper()
		all, err := bed.Node(t.Context(), clientNode, "sh", "-c", "cd /sys/fs/bpf/isthmus && find . | sort && ls -i links/* maps-v4/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []string{"frontends", "slots", "backends"} {
			entries := dump(t, m)
			slices.SortFunc(entries, func(a, b map[string]any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
			all += fmt.Sprintln(m, entries)
		}
		return all
	}
	before := state()
	kubeconfig := "--kubeconfig=" + bed.Lab.Kubeconfig("a")
	const free = "--http-listen=127.0.0.1:0" // the running agent has the default
	cases := map[string]struct {
		args []string
		says string
	}{
		"unknown flag":           {[]string{"--no-such-flag"}, "--no-such-flag"},
		"malformed kubeconfig":   {[]string{"--kubeconfig=/etc/hostname"}, "kubeconfig"},
		"missing kubeconfig":     {[]string{"--kubeconfig=/nonexistent"}, "/nonexistent"},
		"no BPF file system":     {[]string{kubeconfig, free, "--bpffs=/tmp"}, "/tmp"},
		"no cgroup v2":           {[]string{kubeconfig, free, "--cgroup-root=/proc"}, "cgroup"},
		"DNS address malformed":  {[]string{"--dns-listen=300.0.0.1"}, "300.0.0.1"},
		"HTTP address malformed": {[]string{"--http-listen=nonsense"}, "nonsense"},
	}
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		t.Run(name, func(t *testing.T) {
			c := cases[name]
			args := slices.Concat([]string{"timeout", "20", bed.Program("isthmus-agent"), "run", "--node-name=" + clientNode}, c.args)
			_, err := process.Output(bed.Lab.NodeCommand(t.Context(), clientNode, args...))
			var failed *process.CommandError
			var exit *exec.ExitError
			if !errors.As(err, &failed) || !errors.As(err, &exit) {
				t.Fatalf("want an agent that exits non-zero, got: %v", err)
			}
			const timedOut = 124 // timeout(1)
			if exit.ExitCode() == timedOut {
				t.Fatalf("the agent did not give up: %s", failed.Said)
			}
			if lines := strings.Split(failed.Said, "\n"); len(lines) != 1 || !strings.Contains(failed.Said, c.says) {
				t.Errorf("want one sentence that names %q, got: %s", c.says, failed.Said)
			}
			if after := state(); after != before {
				t.Errorf("the dataplane changed from\n%s\nto\n%s", before, after)
			}
		})
	}
}
