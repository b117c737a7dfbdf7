// Package testbed is Isthmus installed on a lab, the way a user installs it: images, deploy-broker,
// join, Helm chart, status --wait. The demo, the end-to-end tests and the benchmarks all start here.
//
// In: the name of a lab. Out: clusters a and b, joined, every agent and controller ready, and perhaps one
// more that a test may let join. Running Up again on a testbed that stands brings it up to date and costs
// little.
package testbed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/process"
)

// Namespace is where Isthmus is installed in each member.
const Namespace = "isthmus-system"

// Members are the clusters of the lab that Up lets join the ClusterSet.
func Members() []string { return []string{"a", "b"} }

// Guest is the cluster with one node that a testbed has besides when Config.Guest says so. Nothing is
// installed in it but the images.
const Guest = "c"

// broker is the cluster of the lab that serves as broker.
const broker = "broker"

// Config says which testbed is wanted.
type Config struct {
	Name  string // of the lab; testbeds of different names share nothing
	Guest bool   // whether there is a cluster Guest
	Zone  string // label of all nodes; empty means none
	// Topology is that of the lab for Prepare, which then needs no Members; empty means that of Up.
	Topology string
	// Families are the address families of members; by default both, IPv4 first.
	Families map[string]topology.Families
	// AgentArgs are further flags of the agents, by member.
	AgentArgs map[string][]string
	// Federation says that controllers do their part in a federation as soon as there is one.
	Federation bool
	// NodeLocalDNS are the members whose nodes have NodeLocal DNSCache in front of CoreDNS.
	NodeLocalDNS []string
	// Release installs from a release that is built from the working tree, through a registry in the lab, as users do. Otherwise images
	// are loaded into every node, and the chart is that of the working tree.
	Release  bool
	Progress io.Writer // receives one line a step; nil means silence
}

// Testbed is an installed ClusterSet. Its methods may be used concurrently.
type Testbed struct {
	Lab    *cluster.Lab
	cfg    Config
	bin    string // directory of isthmusctl and helm
	root   string // of this repository
	digest string // of the images that Up has loaded

	archives []string // files of these images
	registry string   // address of the registry with the release; empty without one
	start    time.Time

	mu      sync.Mutex                      // guards all below
	clients map[string]kubernetes.Interface // by cluster
	tasks   map[string]string               // processes of containers, as their nodes number them, by container
}

// Up brings the lab up, builds and loads the images, and installs Isthmus in every member. When it
// returns, `isthmusctl status --wait` has succeeded everywhere. The error names the step.
func Up(ctx context.Context, cfg Config) (*Testbed, error) {
	tb, err := Prepare(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := tb.labelZone(ctx); err != nil {
		return nil, err
	}
	for _, member := range cfg.NodeLocalDNS {
		if err := tb.startNodeLocalDNS(ctx, member); err != nil {
			return nil, fmt.Errorf("start NodeLocal DNSCache in %s: %w", member, err)
		}
	}
	if err := tb.install(ctx); err != nil {
		return nil, err
	}
	return tb, nil
}

// Prepare is Up without the installation: the lab is up, and its nodes have the images.
func Prepare(ctx context.Context, cfg Config) (*Testbed, error) {
	tb, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(tb.Lab.Dir()); err == nil {
		tb.Step("lab %q stands already: bring it up to date", cfg.Name)
	}
	if err := tb.Lab.BuildPrograms(ctx); err != nil {
		return nil, err
	}
	both, bothCtx := errgroup.WithContext(ctx) // a lab that comes up waits a lot
	both.Go(func() (err error) {
		tb.archives, err = tb.build(bothCtx)
		return err
	})
	both.Go(func() error {
		if err := tb.Lab.Up(bothCtx); err != nil {
			return fmt.Errorf("bring the lab up: %w", err)
		}
		return tb.renew(bothCtx)
	})
	if err := both.Wait(); err != nil {
		return nil, err
	}
	if cfg.Release {
		return tb, tb.publish(ctx)
	}
	tb.Step("load the images into every node")
	if err := tb.Lab.LoadImages(ctx, tb.archives...); err != nil {
		return nil, fmt.Errorf("load images: %w", err)
	}
	tb.digest, err = digestOf(tb.archives)
	return tb, err
}

// AddNode adds a node to a cluster, with all images. No other method may run meanwhile. The caller removes it by Lab.RemoveNode.
func (tb *Testbed) AddNode(ctx context.Context, cluster string) (topology.Node, error) {
	n, err := tb.Lab.AddNode(ctx, cluster)
	if err != nil {
		return n, fmt.Errorf("add a node to %s: %w", cluster, err)
	}
	return n, tb.Lab.LoadImages(ctx, tb.archives...)
}

// Down removes the testbed called name. Nothing of it is left.
func Down(ctx context.Context, cfg Config) error {
	tb, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	return tb.Lab.Down(ctx)
}

func open(ctx context.Context, cfg Config) (*Testbed, error) {
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	root, err := repository(ctx)
	if err != nil {
		return nil, err
	}
	l, err := cluster.Open(cluster.Config{Name: cfg.Name, Topology: shape(cfg), Progress: cfg.Progress})
	if err != nil {
		return nil, fmt.Errorf("open lab %s: %w", cfg.Name, err)
	}
	return &Testbed{Lab: l, cfg: cfg, bin: filepath.Join(root, "bin"), root: root, start: time.Now(), clients: map[string]kubernetes.Interface{}, tasks: map[string]string{}}, nil
}

// shape returns the topology of cfg, "" for the default one.
func shape(cfg Config) string {
	if cfg.Topology != "" {
		return cfg.Topology
	}
	shape := topology.Default
	if cfg.Guest {
		shape += " " + Guest + ":1"
	}
	for _, member := range Members() {
		if f := cfg.Families[member]; f != topology.IPv4First {
			nodes := regexp.MustCompile(`\b` + member + `:[0-9]`)
			shape = nodes.ReplaceAllString(shape, "${0}/"+string(f))
		}
	}
	if shape == topology.Default {
		return "" // that of a lab which stands already
	}
	return shape
}

// repository finds the root of this module, from anywhere inside of it.
func repository(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the repository with go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// Root is the folder of this repository.
func (tb *Testbed) Root() string { return tb.root }

// Step says what is being done, and how long after the start.
func (tb *Testbed) Step(format string, args ...any) {
	fmt.Fprintf(tb.cfg.Progress, "[%6.1fs] %s\n", time.Since(tb.start).Seconds(), fmt.Sprintf(format, args...))
}

// build compiles what the installation needs, without what a debugger reads, and returns the image archives.
func (tb *Testbed) build(ctx context.Context) ([]string, error) {
	images := filepath.Join(tb.bin, "images")
	products := []string{"controller", "agent", "isthmusctl"}
	builds := []struct {
		name string
		args []string
	}{
		{"our programs", []string{"build", "-ldflags=-s -w", "-o", tb.bin + "/", "./cmd/isthmusctl", "./cmd/isthmus-agent"}},
		{"the echo client", []string{"build", "-ldflags=-s -w", "-o", filepath.Join(tb.bin, "echo-server"), "./tools/lab/echo"}},
		{"Helm", []string{"build", "-C", "tools/helm", "-ldflags=-s -w", "-o", filepath.Join(tb.bin, "helm"), "helm.sh/helm/v4/cmd/helm"}},
		{"the images", append([]string{"run", "./tools/images", "-o", images}, products...)},
	}
	if tb.cfg.Release {
		builds = builds[1 : len(builds)-1] // the release has our programs and the images
		products = nil
	}
	for _, b := range builds {
		tb.Step("build %s", b.name)
		if err := tb.compile(ctx, nil, b.args...); err != nil {
			return nil, fmt.Errorf("build %s: %w", b.name, err)
		}
	}
	if tb.cfg.Release {
		if err := tb.release(ctx); err != nil {
			return nil, fmt.Errorf("build a release: %w", err)
		}
	}
	var archives []string
	for _, p := range products {
		archives = append(archives, filepath.Join(images, p+".tar"))
	}
	return archives, nil
}

// LoadImages builds images of further products, by their names for tools/images, and loads them into every node.
func (tb *Testbed) LoadImages(ctx context.Context, products ...string) error {
	tb.Step("build and load the images of %s", strings.Join(products, " and "))
	images := filepath.Join(tb.bin, "images")
	if err := tb.compile(ctx, nil, append([]string{"run", "./tools/images", "-o", images}, products...)...); err != nil {
		return fmt.Errorf("build images: %w", err)
	}
	var archives []string
	for _, p := range products {
		archives = append(archives, filepath.Join(images, p+".tar"))
	}
	return tb.Lab.LoadImages(ctx, archives...)
}

// SetValues changes values of the chart in a member, and leaves the others.
func (tb *Testbed) SetValues(ctx context.Context, member, values string) error {
	cmd := tb.fabric(ctx, "helm", member, slices.Concat([]string{"upgrade", "isthmus"}, tb.chart(), []string{
		"--namespace", Namespace, "--reuse-values", "--values", "-",
	}))
	cmd.Stdin = strings.NewReader(values)
	_, err := process.Output(cmd)
	return err
}

// AnotherAgent builds the image isthmus/agent:TAG from sources of which some files are replaced, by their paths in
// the repository, and loads it into every node.
func (tb *Testbed) AnotherAgent(ctx context.Context, tag string, replaced map[string]string) (err error) {
	dir, err := os.MkdirTemp("", "isthmus-agent-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	overlay := struct{ Replace map[string]string }{map[string]string{}} // see `go help build`
	for name, text := range replaced {
		at := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			return err
		}
		overlay.Replace[filepath.Join(tb.root, name)] = at
	}
	text, err := json.Marshal(overlay)
	if err != nil {
		return err
	}
	list := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(list, text, 0o600); err != nil {
		return err
	}
	if err := tb.compile(ctx, []string{"-overlay=" + list}, "run", "./tools/images", "-o", dir, "--tag", tag, "agent"); err != nil {
		return fmt.Errorf("build another agent: %w", err)
	}
	return tb.Lab.LoadImages(ctx, filepath.Join(dir, "agent.tar"))
}

// compile runs the go command in the repository, with further flags of its builds.
func (tb *Testbed) compile(ctx context.Context, flags []string, args ...string) error {
	return tb.compileIn(ctx, tb.root, flags, args...)
}

// compileIn is compile in another folder.
func (tb *Testbed) compileIn(ctx context.Context, dir string, flags []string, args ...string) error {
	cmd := compile.Go(ctx, args...)
	cmd.Dir = dir
	cmd.Env = append(cmd.Env, "GOFLAGS="+strings.Join(append([]string{compile.Flags}, flags...), " "))
	_, err := process.Output(cmd)
	return err
}

// labelZone puts every node into the zone that is wanted.
func (tb *Testbed) labelZone(ctx context.Context) error {
	if tb.cfg.Zone == "" {
		return nil
	}
	clusters := Members()
	if tb.cfg.Guest {
		clusters = append(clusters, Guest)
	}
	for _, member := range clusters {
		if _, err := tb.Kubectl(ctx, member, "label", "node", "--all", "--overwrite", "topology.kubernetes.io/zone="+tb.cfg.Zone); err != nil {
			return err
		}
	}
	return nil
}

// install deploys the broker and makes Members members.
func (tb *Testbed) install(ctx context.Context) error {
	tb.Step("isthmusctl deploy-broker")
	if _, err := tb.Isthmusctl(ctx, broker, "deploy-broker"); err != nil {
		return err
	}
	return tb.Join(ctx, Members()...)
}

// invitation is the file that invite writes and join reads.
func (tb *Testbed) invitation(member string) string {
	return filepath.Join(tb.Lab.Dir(), "invitation-"+member+".yaml")
}

// Join makes clusters members of the ClusterSet, installs Isthmus in them and waits until all of it is ready.
func (tb *Testbed) Join(ctx context.Context, clusters ...string) error {
	for _, member := range clusters {
		tb.Step("isthmusctl invite and join %s", member)
		if _, err := tb.Isthmusctl(ctx, broker, "invite", member, "-o", tb.invitation(member)); err != nil {
			return err
		}
		if _, err := tb.Isthmusctl(ctx, member, "join", tb.invitation(member)); err != nil {
			return err
		}
	}
	return tb.Install(ctx, clusters...)
}

// upgrade installs or upgrades the release in a member. It tries again while the API server has no time for a request.
func (tb *Testbed) upgrade(ctx context.Context, member string, args ...string) error {
	const tries = 3
	args = append(append([]string{"upgrade", "--install", "isthmus"}, tb.chart()...), args...)
	for try := 1; ; try++ {
		_, err := tb.Helm(ctx, member, args...)
		if err == nil || ctx.Err() != nil || try == tries || !strings.Contains(err.Error(), "request did not complete") {
			return err
		}
		tb.Step("the API server of %s is busy, try again: %v", member, err)
	}
}

// Install installs Isthmus in clusters and waits until all of it is ready.
func (tb *Testbed) Install(ctx context.Context, clusters ...string) error {
	tb.Step("helm install in %s", strings.Join(clusters, " and "))
	each, eachCtx := errgroup.WithContext(ctx)
	for _, member := range clusters {
		each.Go(func() error {
			flags := strings.Join(append([]string{"--check-interval=5s"}, tb.cfg.AgentArgs[member]...), ",") // a minute is long for tests
			return tb.upgrade(eachCtx, member, "--namespace", Namespace,
				"--set-string", "podAnnotations.isthmus\\.dev/images="+tb.digest, "--set", "agent.extraArgs={"+flags+"}",
				"--set", "controller.federation.enabled="+strconv.FormatBool(tb.cfg.Federation))
		})
	}
	if err := each.Wait(); err != nil {
		return err
	}
	for _, member := range clusters {
		tb.Step("isthmusctl status --wait in %s", member)
		if _, err := tb.Isthmusctl(ctx, member, "status", "--wait"); err != nil {
			return err
		}
	}
	tb.Step("isthmusctl dns install in %s", strings.Join(clusters, " and "))
	named, namedCtx := errgroup.WithContext(ctx)
	for _, member := range clusters {
		named.Go(func() error {
			_, err := tb.Isthmusctl(namedCtx, member, "dns", "install", "--yes")
			return err
		})
	}
	return named.Wait()
}

// Leave ends the membership of a cluster and uninstalls Isthmus from it.
func (tb *Testbed) Leave(ctx context.Context, member string) error {
	return tb.Uninstall(ctx, member, "--broker-kubeconfig", tb.Lab.Kubeconfig(broker))
}

// Uninstall removes Isthmus from a cluster that is no member, with further flags.
func (tb *Testbed) Uninstall(ctx context.Context, member string, flags ...string) error {
	tb.Step("isthmusctl uninstall in %s", member)
	_, err := tb.Isthmusctl(ctx, member, append([]string{"uninstall", "--yes"}, flags...)...)
	return err
}

// Upgrade upgrades a member to this build by isthmusctl, with the broker, and returns what that printed.
func (tb *Testbed) Upgrade(ctx context.Context, member string, flags ...string) (string, error) {
	tb.Step("isthmusctl upgrade %s in %s", strings.Join(flags, " "), member)
	return tb.Isthmusctl(ctx, member, append([]string{
		"upgrade", "--chart", filepath.Join(tb.root, "deploy", "helm", "isthmus"), "--broker-kubeconfig", tb.Lab.Kubeconfig(broker),
	}, flags...)...)
}

// digestOf is one name for the contents of files: pods that carry it are replaced when an image changes.
func digestOf(files []string) (string, error) {
	h := sha256.New()
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		_, err = io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return "", fmt.Errorf("read %s: %w", name, err)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8]), nil
}

// Isthmusctl runs isthmusctl against a cluster and returns what it printed.
func (tb *Testbed) Isthmusctl(ctx context.Context, cluster string, args ...string) (string, error) {
	return process.Output(tb.IsthmusctlCommand(ctx, cluster, args...))
}

// IsthmusctlCommand returns an isthmusctl command against a cluster.
func (tb *Testbed) IsthmusctlCommand(ctx context.Context, cluster string, args ...string) *exec.Cmd {
	return tb.fabric(ctx, "isthmusctl", cluster, args)
}

// Helm runs the pinned Helm against a cluster and returns what it printed.
func (tb *Testbed) Helm(ctx context.Context, cluster string, args ...string) (string, error) {
	return process.Output(tb.fabric(ctx, "helm", cluster, args))
}

// fabric is one of our binaries where every API server can be reached.
func (tb *Testbed) fabric(ctx context.Context, program, cluster string, args []string) *exec.Cmd {
	argv := slices.Concat([]string{tb.Program(program)}, args, []string{"--kubeconfig", tb.Lab.Kubeconfig(cluster)})
	return tb.Lab.FabricCommand(ctx, argv...)
}

// Kubectl runs kubectl against a cluster and returns what it printed.
func (tb *Testbed) Kubectl(ctx context.Context, cluster string, args ...string) (string, error) {
	return process.Output(tb.Lab.Kubectl(ctx, cluster, args...))
}

// Get reads what a cluster's API server has at a path, such as /api/v1/nodes/a1, into a value that JSON fits. It
// costs next to nothing beside a kubectl.
func (tb *Testbed) Get(ctx context.Context, cluster, path string, into any) error {
	client, err := tb.client(cluster)
	if err != nil {
		return err
	}
	body, err := client.CoreV1().RESTClient().Get().AbsPath(path).DoRaw(ctx)
	if err != nil {
		return fmt.Errorf("get %s of %s: %w", path, cluster, err)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("read %s of %s: %w", path, cluster, err)
	}
	return nil
}

// Apply applies manifests to a cluster.
func (tb *Testbed) Apply(ctx context.Context, cluster, manifests string) error {
	cmd := tb.Lab.Kubectl(ctx, cluster, "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifests)
	_, err := process.Output(cmd)
	return err
}

// Program is the path of a program that Up has built, valid on every node: isthmusctl, isthmus-agent, helm,
// echo-server.
func (tb *Testbed) Program(name string) string { return filepath.Join(tb.bin, name) }

// Node runs a command on a node, in all of its namespaces and cgroups, and returns what it printed.
func (tb *Testbed) Node(ctx context.Context, node string, args ...string) (string, error) {
	return process.Output(tb.Lab.NodeCommand(ctx, node, args...))
}

// Eventually calls check until it returns nil. When ctx ends first, or within has passed, the error is
// check's last one; that one has as long again, since a command that is cut off says nothing of what is wrong. What
// takes long is asked for less often, so that asking is not what the machine is busy with.
func Eventually(ctx context.Context, within time.Duration, check func(context.Context) error) error {
	asking, stop := context.WithTimeout(ctx, within)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 2*within)
	defer cancel()
	const often, seldom = 100 * time.Millisecond, 500 * time.Millisecond
	for began := time.Now(); ; {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-asking.Done():
			return fmt.Errorf("not so within %s: %w", within, err)
		case <-time.After(min(max(often, time.Since(began)/8), seldom)):
		}
	}
}
