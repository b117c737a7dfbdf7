package neighbours

import (
	"context"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/scale/kubeproxy"
)

// program is the path of isthmus-agent, built by TestMain.
var program string

func TestMain(m *testing.M) {
	if !netlab.IsRoot() {
		os.Exit(m.Run()) // each test says why it cannot run
	}
	dir, err := os.MkdirTemp("", "isthmus-neighbours-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := 1
	program = filepath.Join(dir, "isthmus-agent")
	if os.Getenv(envProgram) != "" { // the same binary again, in its own network
		program = os.Getenv(envProgram)
		code = netlab.Main(m)
	} else if output, err := compile.Go(context.Background(), "build", "-o", program, "github.com/isthmus-net/isthmus/cmd/isthmus-agent").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build isthmus-agent: %v\n%s", err, output)
	} else if err := os.Setenv(envProgram, program); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = netlab.Main(m)
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// envProgram tells the tests, which netlab.Main starts anew, where isthmus-agent is.
const envProgram = "ISTHMUS_TEST_AGENT"

// Beside every kube-proxy and CNI plugin a pod reaches a VIP on the socket path and on both paths of the packet path,
// and sees its own cluster's Services all the time: while the agent starts, works, stops, starts anew and is cleaned
// away. Backends see whom docs/dataplane.md says, and nothing of ours is left in the end.
func TestBesideKubeProxyAndCNI(t *testing.T) {
	netlab.Privileged(t)
	assets := os.Getenv("KUBEBUILDER_ASSETS")
	if assets == "" {
		netlab.Skip(t, "KUBEBUILDER_ASSETS is not set; run by go run ./tools/test")
	}
	services := []kubeproxy.Service{{
		Name: "own", Protocols: []corev1.Protocol{corev1.ProtocolTCP}, Port: 80, EndpointPort: endpointPort, Endpoints: []netip.Addr{endpoint.Addr()},
	}}
	c, err := kubeproxy.New(t.Context(), kubeproxy.Config{Assets: assets, Dir: t.TempDir(), Address: families[0].node.Addr(), Progress: t.Output()}, services)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	for _, plugin := range []string{"ptp", "bridge"} {
		for _, mode := range []kubeproxy.Mode{"", kubeproxy.NFTables, kubeproxy.IPTables} {
			name := plugin + " and kube-proxy " + string(mode)
			if mode == "" {
				name = plugin + " alone"
			}
			t.Run(name, func(t *testing.T) {
				n := newNode(t, plugin)
				own := endpoint
				if mode != "" {
					p, err := c.Start(t.Context(), n.ns, mode)
					if err != nil {
						t.Fatal(err)
					}
					defer func() {
						if err := p.Stop(); err != nil {
							t.Error(err)
						}
					}()
					own = netip.AddrPortFrom(kubeproxy.ClusterIP(0), 80)
				}
				n.liveTogether(t, own)
			})
		}
	}
}

// liveTogether is the life of an agent on a node where own is what already works.
func (n *node) liveTogether(t *testing.T, own netip.AddrPort) {
	t.Helper()
	if _, err := n.ask(own); err != nil {
		t.Fatalf("the cluster's own Service, before anything is there: %v", err)
	}
	before := n.traces(t)
	always := n.load(own)
	a := n.startAgent(t)
	expect := func(when string, packetsMasqueraded bool) {
		t.Helper()
		for i, f := range families {
			vip := netip.AddrPortFrom(f.vip, vipPort)
			n.bySockets(t, func() {
				t.Helper()
				if seen, err := n.ask(vip); err != nil || seen != f.node.Addr().String() {
					t.Errorf("%s, socket path: %v; %s leads to a backend that sees %q, want the node, which masquerades", when, err, vip, seen)
				}
			})
			want := n.pods[i]
			if packetsMasqueraded {
				want = f.node.Addr()
			}
			if seen, err := n.ask(vip); err != nil || seen != want.String() {
				t.Errorf("%s, packet path: %v; %s leads to a backend that sees %q, want %s", when, err, vip, seen, want)
			}
		}
	}
	expect("slow path", true)
	a.stop(t)
	expect("slow path, without an agent", true)
	a = n.startAgent(t, "--fast-path")
	expect("fast path", false)
	said, err := a.get("/status")
	for _, f := range families {
		if err != nil || !strings.Contains(said, "masqueraded on this node: the backends see "+f.node.Addr().String()) {
			t.Errorf("the status does not name the masquerade: %v\n%s", err, said)
		}
	}
	a.stop(t)
	expect("fast path, without an agent", false)
	n.cleanup(t)
	for _, f := range families {
		if seen, err := n.ask(netip.AddrPortFrom(f.vip, vipPort)); err == nil {
			t.Errorf("after cleanup %s leads to a backend that sees %s", f.vip, seen)
		}
	}
	always.end(t, "the cluster's own Service")
	if diff := cmp.Diff(before, n.traces(t)); diff != "" {
		t.Errorf("a trace is left (-before +after):\n%s", diff)
	}
}

// traces is all that an agent could leave on a node.
func (n *node) traces(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for name, args := range map[string][]string{
		"devices":   {"sh", "-c", "ip -brief link | awk '{print $1}'"},
		"addresses": {"ip", "-brief", "address"},
		"routes":    {"ip", "route", "show", "table", "all"},
		"rules":     {"nft", "--stateless", "list", "ruleset"},
		"qdiscs":    {"tc", "qdisc", "show"},
		"settings":  {"sh", "-c", "cd /proc/sys/net/ipv4 && grep . ip_forward conf/*/forwarding conf/*/rp_filter conf/*/arp_*"},
	} {
		output, err := n.command(t.Context(), args[0], args[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, output)
		}
		found[name] = string(output)
	}
	var pins []string
	err := filepath.WalkDir(n.bpffs, func(path string, _ fs.DirEntry, err error) error {
		pins = append(pins, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	found["pins"] = strings.Join(pins, "\n")
	found["programs"] = n.programs(t)
	return found
}

// programs lists what is attached to the node's cgroup and to its devices by TCX.
func (n *node) programs(t *testing.T) string {
	t.Helper()
	var found []string
	add := func(where string, target int, at ebpf.AttachType) error {
		q, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: at})
		if err != nil {
			return fmt.Errorf("ask for the programs of %s: %w", where, err)
		}
		found = append(found, fmt.Sprint(where, " ", at, ": ", len(q.Programs)))
		return nil
	}
	dir, err := os.Open(n.cgroup.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, h := range bpf.Hooks() {
		if err := add("cgroup", int(dir.Fd()), h.Attach); err != nil {
			t.Fatal(err)
		}
	}
	err = n.ns.Do(func() error {
		devices, err := devices()
		if err != nil {
			return err
		}
		for name, index := range devices {
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				if err := add(name, index, at); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(found)
	return strings.Join(found, "\n")
}
