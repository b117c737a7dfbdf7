package neighbours

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// family is the addresses of one. A pod, made by a CNI plugin, is on a node whose default route leads to the pods of
// another cluster.
type family struct {
	pods        netip.Prefix
	node, other netip.Prefix
	all         string // the default route
	vips        string // the range of VIPs
	vip         netip.Addr
}

var families = []family{
	{
		netip.MustParsePrefix("10.71.1.0/24"), netip.MustParsePrefix("10.73.0.1/24"), netip.MustParsePrefix("10.73.0.2/24"),
		"0.0.0.0/0", "243.0.0.0/8", netip.MustParseAddr("243.0.0.5"),
	},
	{
		netip.MustParsePrefix("fd71:1::/64"), netip.MustParsePrefix("fd73::73:1/64"), netip.MustParsePrefix("fd73::73:2/64"),
		"::/0", "fd00:243::/48", netip.MustParseAddr("fd00:243::5"),
	},
}

// The ports: of the VIP, of its backend in the other cluster, and of the endpoint there of the cluster's own Service,
// which has IPv4 alone.
const vipPort, backendPort, endpointPort = 80, 8080, 9090

var endpoint = netip.AddrPortFrom(families[0].other.Addr(), endpointPort)

// patience is how long anything may take to become as it should, answer how long a connection may.
const (
	patience = time.Minute
	answer   = 3 * time.Second
)

// node is one with a pod on it.
type node struct {
	ns, pod, other *netlab.Namespace
	pods           []netip.Addr   // the pod's address, by family
	cgroup         *netlab.Cgroup // of processes that the socket path serves
	dir, bpffs     string
}

// newNode makes a node, and a pod on it by the CNI plugin of that name. The plugin masquerades what leaves the node.
func newNode(t *testing.T, plugin string) *node {
	t.Helper()
	n := &node{dir: t.TempDir(), bpffs: netlab.BPFFS(t)}
	for _, ns := range []**netlab.Namespace{&n.ns, &n.pod, &n.other} {
		made, err := netlab.NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = made.Close() })
		*ns = made
		// Addresses that devices give themselves are there at once, and not when they have been looked for.
		if err := made.Do(func() error {
			return errors.Join(
				os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0),
				os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range families {
		if err := errors.Join(n.ns.Connect(n.other, f.node, f.other), n.ns.Route(f.other.Addr()), n.other.RouteTo(f.pods, f.node.Addr())); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if n.cgroup, err = netlab.NewCgroup(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.cgroup.Close(); err != nil {
			t.Error(err)
		}
	})
	n.addPod(t, plugin)
	for _, f := range families {
		n.serve(t, netip.AddrPortFrom(f.other.Addr(), backendPort))
	}
	n.serve(t, endpoint)
	return n
}

// plugins is where Debian puts the CNI plugins.
const plugins = "/usr/lib/cni"

// addPod lets a CNI plugin make the pod's device, as a container runtime does (CNI specification, section 3).
func (n *node) addPod(t *testing.T, plugin string) {
	t.Helper()
	var ranges [][]map[string]string
	var routes []map[string]string
	for _, f := range families {
		ranges = append(ranges, []map[string]string{{"subnet": f.pods.String()}})
		routes = append(routes, map[string]string{"dst": f.all})
	}
	config := map[string]any{
		"cniVersion": "0.4.0", "name": "neighbours", "type": plugin, "ipMasq": true,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(n.dir, "ipam"), "ranges": ranges, "routes": routes,
		},
	}
	if plugin == "bridge" {
		config["bridge"], config["isGateway"], config["hairpinMode"] = "cni0", true, true
	}
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	cmd := n.command(t.Context(), filepath.Join(plugins, plugin))
	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID=pod", "CNI_IFNAME=eth0", "CNI_PATH="+plugins, "CNI_NETNS="+n.pod.Path())
	cmd.Stdin = bytes.NewReader(text)
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("CNI plugin %s: %v\n%s", plugin, err, output)
	}
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal(output, &result); err != nil || len(result.IPs) != len(families) {
		t.Fatalf("CNI plugin %s says %s: %v", plugin, output, err)
	}
	for _, ip := range result.IPs {
		n.pods = append(n.pods, ip.Address.Addr())
	}
}

// command is a program on the node.
func (n *node) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.ns.Path(), program}, args...)...)
}

// serve answers connections in the other cluster with the address that they come from.
func (n *node) serve(t *testing.T, at netip.AddrPort) {
	t.Helper()
	var l net.Listener
	if err := n.other.Do(func() (err error) {
		config := &net.ListenConfig{}
		config.SetMultipathTCP(false)
		l, err = config.Listen(t.Context(), "tcp", at.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	netlab.Answer(t, l, func(c net.Conn) {
		_, _ = io.WriteString(c, netip.MustParseAddrPort(c.RemoteAddr().String()).Addr().String())
	})
}

// ask connects from the pod and returns the address that the server sees.
func (n *node) ask(to netip.AddrPort) (string, error) {
	var c net.Conn
	err := n.pod.Do(func() (err error) {
		d := net.Dialer{Timeout: answer}
		d.SetMultipathTCP(false)
		c, err = d.Dial("tcp", to.String())
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(answer)); err != nil {
		return "", err
	}
	said, err := io.ReadAll(c)
	return string(said), err
}

// bySockets runs f while new sockets of this process are served by the socket path.
func (n *node) bySockets(t *testing.T, f func()) {
	t.Helper()
	if err := n.cgroup.Enter(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.cgroup.Leave(); err != nil {
			t.Fatal(err)
		}
	}()
	f()
}

// agent is an isthmus-agent on a node.
type agent struct {
	node *node
	cmd  *exec.Cmd
	end  chan struct{} // closed when it has ended
	err  error         // how; read after end
	log  *bytes.Buffer // likewise
	http *http.Client
}

// world is a Service of another cluster, as a folder of manifests.
func world() string {
	var ips []string
	var slices strings.Builder
	for _, f := range families {
		ips = append(ips, f.vip.String())
		kind := map[bool]string{true: "IPv4", false: "IPv6"}[f.vip.Is4()]
		fmt.Fprintf(&slices, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: demo
  name: hello-%s
  labels: {multicluster.kubernetes.io/service-name: hello, multicluster.kubernetes.io/source-cluster: b}
addressType: %s
ports: [{name: http, protocol: TCP, port: %d}]
endpoints: [{addresses: ["%s"]}]
`, strings.ToLower(kind), kind, backendPort, f.other.Addr())
	}
	return fmt.Sprintf(`apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {namespace: demo, name: hello}
spec: {type: ClusterSetIP, ips: ["%s"], ipFamilies: [IPv4, IPv6], ports: [{name: http, protocol: TCP, port: %d}]}
`, strings.Join(ips, `", "`), vipPort) + slices.String()
}

// where are the flags that say where things of the node are.
func (n *node) where() []string {
	return []string{"--cgroup-root=" + n.cgroup.Path, "--bpffs=" + n.bpffs}
}

// startAgent starts an agent on the node with the packet path and further flags, and waits until every program is
// where it should be.
func (n *node) startAgent(t *testing.T, flags ...string) *agent {
	t.Helper()
	folder := filepath.Join(n.dir, "world")
	if err := errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(filepath.Join(folder, "hello.yaml"), []byte(world()), 0o600)); err != nil {
		t.Fatal(err)
	}
	args := append(n.where(), "--source=dir:"+folder, "--cluster-id=a", "--http-listen=127.0.0.1:9470", "--insecure-http", "--packet-path")
	for _, f := range families {
		args = append(args, "--clusterset-ip-range="+f.vips)
	}
	a := &agent{node: n, end: make(chan struct{}), log: &bytes.Buffer{}}
	a.cmd = n.command(context.WithoutCancel(t.Context()), program, append(args, flags...)...)
	a.cmd.Stderr = a.log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	a.http = &http.Client{Timeout: answer, Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = n.ns.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, address); return err })
		return c, err
	}}}
	// The agent dies with the thread that starts it, so that thread waits for it.
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := a.cmd.Start()
		started <- err
		if err == nil {
			a.err = a.cmd.Wait()
			close(a.end)
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.cmd.Process.Kill() // has ended already, if all went well
		<-a.end
		if t.Failed() {
			t.Logf("the agent's log:\n%s", a.log)
		}
	})
	await(t, "the agent to be ready", func() error {
		if body, err := a.get("/readyz"); err != nil {
			return fmt.Errorf("%w: %s", err, body)
		}
		hooks, err := n.show(t.Context(), "hooks")
		if err == nil && (!strings.Contains(hooks, "from_client") || !strings.Contains(hooks, "from_network")) {
			err = fmt.Errorf("the packet path is not on the devices:\n%s", hooks)
		}
		return err
	})
	return a
}

func (a *agent) get(path string) (string, error) {
	resp, err := a.http.Get("http://127.0.0.1:9470" + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return string(body), err
}

// stop ends the agent as the kubelet does.
func (a *agent) stop(t *testing.T) {
	t.Helper()
	a.http.CloseIdleConnections()
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if <-a.end; a.err != nil {
		t.Errorf("the agent does not end cleanly: %v", a.err)
	}
}

// show is what isthmus-agent shows.
func (n *node) show(ctx context.Context, what string) (string, error) {
	output, err := n.command(ctx, program, append([]string{"show", what}, n.where()...)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("isthmus-agent show %s: %w\n%s", what, err, output)
	}
	return string(output), nil
}

// cleanup runs isthmus-agent cleanup.
func (n *node) cleanup(t *testing.T) {
	t.Helper()
	if output, err := n.command(t.Context(), program, append([]string{"cleanup"}, n.where()...)...).CombinedOutput(); err != nil {
		t.Fatalf("isthmus-agent cleanup: %v\n%s", err, output)
	}
}

// await waits until ok returns nil.
func await(t *testing.T, what string, ok func() error) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(patience)
	for {
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s: %v", what, err)
		}
		<-tick.C
	}
}

// load is connections from the pod to one address, one after the other, until end.
type load struct {
	stop     chan struct{}
	finished sync.WaitGroup
	count    int
	failures []error
}

func (n *node) load(to netip.AddrPort) *load {
	l := &load{stop: make(chan struct{})}
	l.finished.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			if _, err := n.ask(to); err != nil {
				l.failures = append(l.failures, err)
			}
			l.count++
			select {
			case <-l.stop:
				return
			case <-tick.C:
			}
		}
	})
	return l
}

// end stops the load and fails the test unless every connection succeeded.
func (l *load) end(t *testing.T, what string) {
	t.Helper()
	close(l.stop)
	l.finished.Wait()
	if len(l.failures) > 0 {
		t.Errorf("%s: %d of %d connections failed, first with %v", what, len(l.failures), l.count, l.failures[0])
	}
}

// devices returns the devices of the calling thread's network namespace.
func devices() (map[string]int, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	found := map[string]int{}
	for _, l := range links {
		found[l.Attrs().Name] = l.Attrs().Index
	}
	return found, nil
}
