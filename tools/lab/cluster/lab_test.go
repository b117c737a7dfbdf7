package cluster_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// TestLab brings a small lab up, uses all of it, and takes it down without a trace.
func TestLab(t *testing.T) {
	netlab.Privileged(t)
	before := footprint(t)
	lab, err := cluster.Open(cluster.Config{Name: "labtest", Topology: "a:1 b:1 broker:0", Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			showLogs(t, lab.Dir())
		}
		if err := lab.Down(context.Background()); err != nil {
			t.Errorf("down: %v", err)
		}
		if diff := cmp.Diff(before, footprint(t)); diff != "" {
			t.Errorf("the lab left something behind (-before +after):\n%s", diff)
		}
	})
	if err := lab.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	x := bench{lab: lab}
	for _, c := range []string{"a", "b"} {
		x.must(t, lab.Kubectl(t.Context(), c, "apply", "-f", "testdata/echo.yaml"))
	}
	for _, c := range []string{"a", "b"} {
		x.must(t, lab.Kubectl(t.Context(), c, "rollout", "status", "deploy/echo", "--timeout=180s"))
		x.must(t, lab.Kubectl(t.Context(), c, "wait", "pod/client", "--for=condition=Ready", "--timeout=180s"))
	}
	t.Run("pod reaches pods of the other cluster", x.podToPod)
	t.Run("Service and cluster DNS", x.service)
	t.Run("node command is in the node's cgroup and network", x.nodeCommand)
	t.Run("components stop and start", x.components)
	t.Run("started API server is ready", x.apiServer)
	t.Run("preflight asks for the inotify instances in use", x.inotify)
	t.Run("cut and heal", x.cut)
	t.Run("images are loaded once", x.images)
	t.Run("second up changes nothing", x.secondUp)
	t.Run("up heals a dead node", x.deadNode)
}

// bench takes the T of the test that asks, so that a fault fails the subtest it is in.
type bench struct {
	lab *cluster.Lab
}

func (x bench) must(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s%s", cmd.Args, err, out.String(), complaints.String())
	}
	return strings.TrimSpace(out.String())
}

func (x bench) exec(t *testing.T, cluster string, argv ...string) string {
	t.Helper()
	return x.must(t, x.lab.Kubectl(t.Context(), cluster, slices.Concat([]string{"exec", "client", "--"}, argv)...))
}

func (x bench) client(t *testing.T, cluster string) kubernetes.Interface {
	t.Helper()
	config, err := x.lab.RESTConfig(cluster)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func (x bench) podToPod(t *testing.T) {
	pods, err := x.client(t, "b").CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=echo"})
	if err != nil {
		t.Fatal(err)
	}
	ips := pods.Items[0].Status.PodIPs
	if len(ips) != 2 {
		t.Fatalf("have addresses %v, want one of each family", ips)
	}
	for i, url := range []string{"http://" + ips[0].IP + ":8080", "http://[" + ips[1].IP + "]:8080"} {
		if have := x.exec(t, "a", curl(url)...); !strings.Contains(have, "node=b1") {
			t.Errorf("%s answered %q, want node=b1", ips[i].IP, have)
		}
	}
}

// curl asks until it is answered: kube-proxy and cluster DNS learn of a Service some time
// after the API server.
func curl(argv ...string) []string {
	return slices.Concat([]string{"curl", "-sS", "-m", "5", "--retry", "60", "--retry-all-errors", "--retry-delay", "1", "--retry-max-time", "60"}, argv)
}

const echoURL = "http://echo.default.svc.cluster.local"

func (x bench) service(t *testing.T) {
	for _, family := range []string{"-4", "-6"} {
		if have := x.exec(t, "a", curl(family, echoURL)...); !strings.Contains(have, "node=a1") {
			t.Errorf("curl %s answered %q, want node=a1", family, have)
		}
	}
}

func (x bench) nodeCommand(t *testing.T) {
	if have := x.must(t, x.lab.NodeCommand(t.Context(), "a1", curl(echoURL)...)); !strings.Contains(have, "node=a1") {
		t.Errorf("curl on the node answered %q, want node=a1", have)
	}
	// Its own cgroup namespace shows the machine's cgroup as the root, the host's does not.
	cmd := x.lab.NodeCommand(t.Context(), "a1", "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()         //nolint:errcheck // killed below
	defer cmd.Process.Kill() //nolint:errcheck // it may be gone
	await(t, "the command in the node's cgroup", func() bool {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "cgroup"))
		return err == nil && strings.Contains(string(raw), "0::/isthmus.labtest.a1\n")
	})
	if err := x.lab.NodeCommand(t.Context(), "a9", "true").Run(); err == nil {
		t.Error("a command ran on a node that does not exist")
	}
}

func (x bench) components(t *testing.T) {
	if err := x.lab.Stop(t.Context(), "a1", "kubelet"); err != nil {
		t.Fatal(err)
	}
	if s := x.state(t, "a1", "kubelet"); s != "exit status 0" {
		t.Errorf("kubelet is %q after stop", s)
	}
	x.exec(t, "b", "true") // another node's kubelet is not concerned
	if err := x.lab.Start(t.Context(), "a1", "kubelet"); err != nil {
		t.Fatal(err)
	}
	if s := x.state(t, "a1", "kubelet"); s != "alive" {
		t.Errorf("kubelet is %q after start", s)
	}
	if err := x.lab.Stop(t.Context(), "a1", "etcd"); err == nil {
		t.Error("a worker's etcd was stopped, but it has none")
	}
}

func (x bench) apiServer(t *testing.T) {
	if err := x.lab.Stop(t.Context(), "broker", "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	client := x.client(t, "broker")
	if _, err := client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); err == nil {
		t.Error("the stopped API server answered")
	}
	if err := x.lab.Start(t.Context(), "broker", "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("the started API server: %v", err)
	}
}

func (x bench) inotify(t *testing.T) {
	if need := x.lab.InotifyNeed(); need != 0 {
		t.Errorf("a running lab needs %d more inotify instances, want none", need)
	}
	have := inotifyInstances(t)
	t.Logf("inotify instances in use: %v", have)
	for machine, most := range map[string]int{
		"a1": cluster.NodeInotify, "b1": cluster.NodeInotify,
		"a": cluster.ControlPlaneInotify, "b": cluster.ControlPlaneInotify, "broker": cluster.ControlPlaneInotify,
	} {
		if n := have[machine]; n == 0 || n > most {
			t.Errorf("%s holds %d inotify instances, preflight asks for %d", machine, n, most)
		}
	}
}

func (x bench) state(t *testing.T, node, component string) string {
	t.Helper()
	status, err := x.lab.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range status.Clusters {
		for _, n := range c.Nodes {
			for _, s := range n.Components {
				switch {
				case n.Name != node || s.Name != component:
				case s.Alive:
					return "alive"
				default:
					return s.Exit
				}
			}
		}
	}
	return "unknown"
}

func (x bench) cut(t *testing.T) {
	ping := func() error {
		return x.lab.FabricCommand(t.Context(), "curl", "-sk", "-m", "1", "https://10.200.0.21:10250/healthz").Run()
	}
	await(t, "b1 to answer", func() bool { return ping() == nil })
	if err := x.lab.Cut(t.Context(), "b1"); err != nil {
		t.Fatal(err)
	}
	if ping() == nil {
		t.Error("b1 answers although it is cut off")
	}
	if err := x.lab.Heal(t.Context(), "b1"); err != nil {
		t.Fatal(err)
	}
	if err := ping(); err != nil {
		t.Errorf("b1 does not answer as soon as it is healed: %v", err)
	}
}

func (x bench) images(t *testing.T) {
	for range 2 {
		if err := x.lab.LoadImages(t.Context(), testArchive(t)); err != nil {
			t.Fatal(err)
		}
	}
	have := x.must(t, x.lab.NodeCommand(t.Context(), "b1", "ctr", "-n", "k8s.io", "images", "list", "-q"))
	if !strings.Contains(have, "/isthmus/empty:dev") {
		t.Errorf("images of b1:\n%s\nwant isthmus/empty:dev", have)
	}
}

func (x bench) secondUp(t *testing.T) {
	pids := func() (all []int) {
		status, err := x.lab.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range status.Clusters {
			for _, s := range c.ControlPlane.Components {
				all = append(all, s.PID)
			}
			for _, n := range c.Nodes {
				for _, s := range n.Components {
					all = append(all, s.PID)
				}
			}
		}
		return all
	}
	before := pids()
	if err := x.lab.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, pids()); diff != "" {
		t.Errorf("components restarted (-before +after):\n%s", diff)
	}
}

func (x bench) deadNode(t *testing.T) {
	status, err := x.lab.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	init, err := os.FindProcess(status.Clusters[0].Nodes[0].PID)
	if err != nil {
		t.Fatal(err)
	}
	if err := init.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, "the node's death", func() bool {
		status, err := x.lab.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return !status.Clusters[0].Nodes[0].Running
	})
	if err := x.lab.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	await(t, "the client pod on the new node", func() bool {
		return x.lab.Kubectl(t.Context(), "a", "exec", "client", "--", "true").Run() == nil
	})
	client := x.client(t, "a")
	await(t, "the client pod's status", func() bool {
		pod, err := client.CoreV1().Pods("default").Get(t.Context(), "client", metav1.GetOptions{})
		return err == nil && pod.Status.Phase == corev1.PodRunning
	})
}

// await asks cond until it holds. A busy machine is ten times slower than an idle one.
func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(2 * time.Minute); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long for %s", what)
		}
	}
}
