package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/dns/device"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// envNode makes this test binary run as an agent on a test node: see runAsNode.
const envNode = "ISTHMUS_TEST_NODE"

// runAsNode runs in a child process with its own network and mount namespace. It prepares them like a node's, with a cgroup
// below dir/cgroup, and runs isthmus-agent. On its standard input and output it answers requests that only a process inside
// of the namespace can make.
func runAsNode(dir string) {
	must := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "prepare the node:", err)
			os.Exit(3)
		}
	}
	lo, err := netlink.LinkByName("lo")
	must(err)
	must(netlink.LinkSetUp(lo))
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(mountBPFFS(filepath.Join(dir, "bpffs"), logger(defaults())))
	must(mountBPFFS(filepath.Join(dir, "bpffs"), logger(defaults()))) // a second agent does the same
	go answer(os.Stdin, os.Stdout)
	main()
}

// answer reads URLs and addresses of name servers as JSON strings, and writes the answers as JSON strings.
func answer(in io.Reader, out io.Writer) {
	lines := json.NewDecoder(in)
	replies := json.NewEncoder(out)
	for {
		var ask string
		if lines.Decode(&ask) != nil {
			return
		}
		var reply string
		if url, ok := strings.CutPrefix(ask, "http "); ok {
			resp, err := http.Get(url)
			if err != nil {
				reply = err.Error()
			} else {
				body, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				reply = fmt.Sprintf("%d %s", resp.StatusCode, body)
			}
		} else {
			m := new(dns.Msg)
			m.SetQuestion("hello.demo.svc.clusterset.local.", dns.TypeA)
			r, err := dns.Exchange(m, ask)
			if err != nil {
				reply = err.Error()
			} else {
				reply = dns.RcodeToString[r.Rcode]
			}
		}
		_ = replies.Encode(reply)
	}
}

// node is a running agent in its own namespaces.
type node struct {
	t     *testing.T
	cmd   *exec.Cmd
	log   *lockedBuffer
	asks  *json.Encoder
	reply *json.Decoder
	dir   string
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startNode starts an agent with flags on a test node. Its kubeconfig names a server that refuses connections.
func startNode(t *testing.T, flags ...string) *node {
	t.Helper()
	if !netlab.IsRoot() {
		netlab.Skip(t, "needs root, for namespaces, cgroups and BPF")
	}
	dir := t.TempDir()
	for _, sub := range []string{"bpffs", "cgroup"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// A new cgroup, so that no other process of the machine runs the programs.
	if err := unix.Mount("cgroup2", filepath.Join(dir, "cgroup"), "cgroup2", 0, ""); err != nil {
		t.Fatalf("mount cgroup v2: %v", err)
	}
	own := filepath.Join(dir, "cgroup", fmt.Sprintf("isthmus-agent-test-%d", os.Getpid()))
	t.Cleanup(func() {
		if err := os.Remove(own); err != nil && !os.IsNotExist(err) {
			t.Errorf("remove the test's cgroup: %v", err)
		}
		if err := unix.Unmount(filepath.Join(dir, "cgroup"), 0); err != nil {
			t.Errorf("unmount cgroup v2: %v", err)
		}
	})
	if err := os.Mkdir(own, 0o755); err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	err := os.WriteFile(kubeconfig, []byte(`{apiVersion: v1, kind: Config, current-context: c,
contexts: [{name: c, context: {cluster: c, user: c}}], users: [{name: c, user: {token: t}}],
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]}`), 0o600)
	if err != nil {
		t.Fatal(err)
	}

	n := &node{t: t, log: &lockedBuffer{}, dir: dir}
	n.cmd = exec.Command(os.Args[0], append([]string{
		"--node-name=n1", "--kubeconfig=" + kubeconfig, "--cgroup-root=" + own,
		"--bpffs=" + filepath.Join(dir, "bpffs"), "--http-listen=127.0.0.1:9470", "--insecure-http",
	}, flags...)...)
	n.cmd.Env = append(os.Environ(), envNode+"="+dir)
	n.cmd.Stderr = n.log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	in, errIn := n.cmd.StdinPipe()
	out, errOut := n.cmd.StdoutPipe()
	if errIn != nil || errOut != nil {
		t.Fatal(errIn, errOut)
	}
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	n.asks, n.reply = json.NewEncoder(in), json.NewDecoder(out)
	t.Cleanup(func() {
		_ = n.cmd.Process.Kill() // already ended if the test passed
		if t.Failed() {
			t.Logf("the agent's log:\n%s", n.log)
		}
	})
	return n
}

// ask sends a request from inside of the node.
func (n *node) ask(question string) string {
	n.t.Helper()
	var reply string
	if err := n.asks.Encode(question); err != nil {
		n.t.Fatalf("ask %s: %v; the log of the agent:\n%s", question, err, n.log)
	}
	if err := n.reply.Decode(&reply); err != nil {
		n.t.Fatalf("ask %s: %v; the log of the agent:\n%s", question, err, n.log)
	}
	return reply
}

// await asks until the reply begins with want.
func (n *node) await(question, want string) string {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 20*time.Second)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		reply := n.ask(question)
		if strings.HasPrefix(reply, want) {
			return reply
		}
		select {
		case <-ctx.Done():
			n.t.Fatalf("%s answers %q, want %q", question, reply, want)
		case <-tick.C:
		}
	}
}

func TestAgentStartsWithoutAPIServer(t *testing.T) {
	n := startNode(t)
	n.await("http http://127.0.0.1:9470/healthz", "200 ok")
	n.await(device.IPv4.String()+":53", "SERVFAIL") // no snapshot yet
	n.await("["+device.IPv6.String()+"]:53", "SERVFAIL")

	// The reason appears once the first attempt to read has failed.
	n.await("http http://127.0.0.1:9470/readyz", "503 not all ServiceImports and EndpointSlices have been read: ")
	var s status.Agent
	reply := strings.TrimPrefix(n.ask("http http://127.0.0.1:9470/status"), "200 ")
	if err := json.Unmarshal([]byte(reply), &s); err != nil {
		t.Fatalf("status %q: %v", reply, err)
	}
	if s.Node != "n1" || s.Ready || s.View.Synced || !strings.Contains(s.View.Error, "refused") {
		t.Errorf("status: %+v", s)
	}
	if len(s.Dataplane.Hooks) == 0 || len(s.DNS.Listening) != 2 || s.DNS.Interface == "" {
		t.Errorf("dataplane or DNS is not running: %+v", s)
	}
	for _, h := range s.Dataplane.Hooks {
		if !h.Attached {
			t.Errorf("hook %s is not attached", h.Name)
		}
	}
	if m := n.ask("http http://127.0.0.1:9470/metrics"); !strings.Contains(m, "\nisthmus_agent_ready 0\n") {
		t.Errorf("metrics: %.300s", m)
	}

	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := n.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM the agent ends with %v", err)
	}
}

// Without an API server the agent serves manifests on disk and follows their changes. A broken file changes nothing and
// appears in the status.
func TestAgentServesManifests(t *testing.T) {
	manifests := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(manifests, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("hello.yaml", `apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {namespace: demo, name: hello}
spec: {type: ClusterSetIP, ips: [243.0.0.5], ipFamilies: [IPv4], ports: [{name: http, protocol: TCP, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: demo
  name: hello-1
  labels: {multicluster.kubernetes.io/service-name: hello, multicluster.kubernetes.io/source-cluster: a}
addressType: IPv4
ports: [{name: http, protocol: TCP, port: 8080}]
endpoints: [{addresses: [10.1.0.1]}]
`)
	n := startNode(t, "--kubeconfig=", "--source=dir:"+manifests, "--cluster-id=a", "--clusterset-ip-range=243.0.0.0/8", "--check-interval=100ms")
	n.await("http http://127.0.0.1:9470/readyz", "200 ok")
	n.await(device.IPv4.String()+":53", "NOERROR")
	var s status.Agent
	ask := func() {
		t.Helper()
		reply := strings.TrimPrefix(n.ask("http http://127.0.0.1:9470/status"), "200 ")
		if err := json.Unmarshal([]byte(reply), &s); err != nil {
			t.Fatalf("status %q: %v", reply, err)
		}
	}
	if ask(); s.Dataplane.Frontends != 1 || s.Dataplane.Backends != 1 {
		t.Errorf("dataplane: %+v", s.Dataplane)
	}
	var x status.Explanation
	reply := strings.TrimPrefix(n.ask("http http://127.0.0.1:9470/explain?namespace=demo&name=hello"), "200 ")
	if err := json.Unmarshal([]byte(reply), &x); err != nil {
		t.Fatalf("explanation %q: %v", reply, err)
	}
	for _, l := range x.Links {
		if l.State == status.LinkBroken {
			t.Errorf("broken: %+v", l)
		}
	}
	if len(x.Links) < 6 || len(x.Frontends) != 1 || len(x.Endpoints) != 1 || x.Endpoints[0].State != "serves" {
		t.Errorf("explanation: %+v", x)
	}
	if reply := n.ask("http http://127.0.0.1:9470/explain?name=hello"); !strings.HasPrefix(reply, "400 ") {
		t.Errorf("explain without a namespace: %s", reply)
	}
	reply = strings.TrimPrefix(n.ask("http http://127.0.0.1:9470/show/services"), "200 ")
	if rows, err := status.DecodeTable("services", []byte(reply)); err != nil || len(rows.Rows()) != 1 {
		t.Errorf("services %s: %v", reply, err)
	}
	n.await("http http://127.0.0.1:9470/show/nonsense", "404 ")
	checked := func(m string) bool {
		return strings.Contains(m, "\nisthmus_agent_map_differences 0\n") && strings.Contains(m, "\nisthmus_agent_map_check_timestamp_seconds ")
	}
	tries := time.NewTicker(50 * time.Millisecond)
	defer tries.Stop()
	for deadline := time.Now().Add(20 * time.Second); !checked(n.ask("http http://127.0.0.1:9470/metrics")); <-tries.C {
		if time.Now().After(deadline) {
			t.Fatal("the maps were not checked")
		}
	}
	// An import of an address outside of the ranges, such as that of the API server, is not served, and everything says so.
	write("evil.yaml", `apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {namespace: evil, name: api-server}
spec: {type: ClusterSetIP, ips: [10.96.0.1], ipFamilies: [IPv4], ports: [{name: https, protocol: TCP, port: 443}]}
`)
	const refused = "10.96.0.1 is not served: it lies outside of 243.0.0.0/8"
	for deadline := time.Now().Add(20 * time.Second); len(s.Dataplane.Problems) == 0; <-tries.C {
		if ask(); time.Now().After(deadline) {
			t.Fatalf("no problem: %+v", s.Dataplane)
		}
	}
	if !strings.Contains(s.Dataplane.Problems[0], refused) || s.Dataplane.Frontends != 1 || !s.Ready {
		t.Errorf("dataplane: %+v", s.Dataplane)
	}
	if m := n.ask("http http://127.0.0.1:9470/metrics"); !strings.Contains(m, "\nisthmus_agent_problems{reason=\"VIPOutsideRanges\"} 1\n") {
		t.Error("the metrics do not count the refused VIP")
	}
	if reply := n.ask("http http://127.0.0.1:9470/explain?namespace=evil&name=api-server"); !strings.Contains(reply, refused) {
		t.Errorf("explanation: %s", reply)
	}
	if err := os.Remove(filepath.Join(manifests, "evil.yaml")); err != nil {
		t.Fatal(err)
	}
	write("broken.yaml", "kind: [")
	n.await("http http://127.0.0.1:9470/status", "200 ")
	tick, late := time.NewTicker(50*time.Millisecond), time.After(20*time.Second)
	defer tick.Stop()
	for ask(); !strings.Contains(s.View.Error, "broken.yaml"); ask() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("status does not name the broken file: %+v", s.View)
		}
	}
	if !s.Ready || s.Dataplane.Frontends != 1 {
		t.Errorf("a broken file removed something: %+v", s)
	}
	if err := os.Remove(filepath.Join(manifests, "hello.yaml")); err != nil {
		t.Fatal(err)
	}
	n.await(device.IPv4.String()+":53", "NXDOMAIN")
}
