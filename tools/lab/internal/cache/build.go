package cache

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/compile"
)

// kubernetesVersion is the version that the binaries report, that of components/kubernetes/go.mod.
const kubernetesVersion = "v1.37.1"

const kubernetes = "kubernetes"

// component is a Go module in tools/lab/components, with the options of its build.
type component struct {
	name     string
	packages []string
	programs []string // the results of the build
	ldflags  string
	// compiler are flags of the compiler for packages, as `go build -gcflags` takes them; empty: those of all (compile.Flags).
	compiler string
	// toolchain is the Go toolchain that the module needs; empty: the one that builds all others.
	toolchain string
}

func components() []component {
	return []component{
		{
			name:     kubernetes,
			packages: []string{"tool"},
			programs: []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"},
			ldflags:  kubernetesLdflags(),
			// To inline functions is a third of the compiler's work on these packages. Those that Kubernetes has in common with Isthmus and
			// others stay as they are, in one build cache.
			compiler: "k8s.io/kubernetes/...=-dwarf=false -l",
		},
		{name: "etcd", packages: []string{"go.etcd.io/etcd/server/v3"}, programs: []string{"etcd"}, ldflags: "-s -w"},
		{name: "coredns", packages: []string{"tool"}, programs: []string{"coredns"}, ldflags: "-s -w"},
	}
}

// Optional programs: only some tests need them, and their builds take minutes.
const (
	ExternalDNS = "external-dns"
	KubeRouter  = "kube-router"
)

// optional are the components that Programs does not build. Each is one program.
func optional() []component {
	return []component{
		{name: ExternalDNS, packages: []string{"tool"}, programs: []string{ExternalDNS}, ldflags: "-s -w", toolchain: "go1.27.1"},
		{name: KubeRouter, packages: []string{"tool"}, programs: []string{KubeRouter}, ldflags: "-s -w"},
	}
}

// OptionalPrograms returns the names of the optional programs.
func OptionalPrograms() (names []string) {
	for _, part := range optional() {
		names = append(names, part.name)
	}
	return names
}

func kubernetesLdflags() string {
	flags := []string{"-s -w"}
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, set := range []string{
			"gitVersion=" + kubernetesVersion, "gitMajor=1", "gitMinor=37", "gitCommit=lab",
			"gitTreeState=archive", "buildDate=1970-01-01T00:00:00Z",
		} {
			flags = append(flags, "-X "+pkg+"."+set)
		}
	}
	return strings.Join(flags, " ")
}

// own are the lab's own programs, packages below tools/lab.
var own = []string{"nodeinit", "pause", "echo", "registry"}

// Programs maps the name of each program to its executable. Missing ones are built.
func (c Cache) Programs(ctx context.Context) (map[string]string, error) {
	version, err := goVersion(ctx)
	if err != nil {
		return nil, err
	}
	programs := map[string]string{}
	for _, part := range components() {
		source := c.component
		if c.gives(part) {
			source = c.given
		}
		dir, err := source(ctx, part, version)
		if err != nil {
			return nil, err
		}
		for _, p := range part.programs {
			programs[p] = filepath.Join(dir, p)
		}
	}
	dir, err := c.ownPrograms(ctx, version)
	if err != nil {
		return nil, err
	}
	for _, p := range own {
		programs[p] = filepath.Join(dir, p)
	}
	return programs, nil
}

// Optional returns the executable of an optional program, which it builds if it is missing.
func (c Cache) Optional(ctx context.Context, program string) (string, error) {
	part, err := optionalPart(program)
	if err != nil {
		return "", err
	}
	dir, err := c.component(ctx, part, part.toolchain)
	return filepath.Join(dir, program), err
}

// Built returns the executable of an optional program, and whether it was built.
func (c Cache) Built(program string) (string, bool) {
	part, err := optionalPart(program)
	if err != nil {
		return "", false
	}
	_, key, err := c.moduleOf(part, part.toolchain)
	path := filepath.Join(c.Dir, part.name+"-"+key, program)
	if err == nil {
		_, err = os.Stat(path)
	}
	return path, err == nil
}

func optionalPart(program string) (component, error) {
	for _, part := range optional() {
		if part.programs[0] == program {
			return part, nil
		}
	}
	return component{}, fmt.Errorf("%s is no optional program of the lab; there are %s", program, strings.Join(OptionalPrograms(), " and "))
}

// moduleOf returns the folder of a component's module, and the key of its build.
func (c Cache) moduleOf(part component, version string) (module, key string, err error) {
	module = filepath.Join(c.Source, "tools/lab/components", part.name)
	inputs := []string{version, compile.Flags, part.ldflags, strings.Join(part.packages, " ")}
	if part.compiler != "" {
		inputs = append(inputs, part.compiler)
	}
	key, err = Key(inputs, module)
	return module, key, err
}

func (c Cache) component(ctx context.Context, part component, version string) (string, error) {
	module, key, err := c.moduleOf(part, version)
	if err != nil {
		return "", err
	}
	return c.entry(part.name, key, func(path string) error {
		c.Report("building %s (%s): minutes the first time", part.name, strings.Join(part.programs, ", "))
		// -v prints each package as it is compiled, the only available progress.
		args := []string{"build", "-v", "-ldflags", part.ldflags, "-o", path + "/"}
		if part.compiler != "" {
			args = append(args, "-gcflags", part.compiler)
		}
		args = append(args, part.packages...)
		if err := c.goBuild(ctx, module, part.name, part.toolchain, args); err != nil {
			return err
		}
		return part.rename(path)
	})
}

// gives reports whether a component comes from the folder of prebuilt programs: Kubernetes always, any other if the folder has
// it.
func (c Cache) gives(part component) bool {
	if c.Kubernetes == "" || part.name == kubernetes {
		return c.Kubernetes != ""
	}
	_, err := os.Stat(filepath.Join(c.Kubernetes, part.programs[0]))
	return err == nil
}

// given copies the programs of a component from the folder of prebuilt programs.
func (c Cache) given(ctx context.Context, part component, _ string) (string, error) {
	var have []string // identifies the release in that folder
	for _, program := range part.programs {
		path := filepath.Join(c.Kubernetes, program)
		file, err := os.Stat(path)
		if err != nil {
			return "", fmt.Errorf("$%s: %w; it names a folder with %s", KubernetesVariable, err, strings.Join(part.programs, ", "))
		}
		have = append(have, fmt.Sprint(path, file.Size(), file.ModTime().UnixNano()))
	}
	key, err := Key(have)
	if err != nil {
		return "", err
	}
	return c.entry(part.name, key, func(dir string) error {
		c.Report("%s is that of %s", strings.Join(part.programs, ", "), c.Kubernetes)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		for _, program := range part.programs {
			if part.name == kubernetes {
				if err := c.release(ctx, program); err != nil {
					return err
				}
			}
			// A copy is visible to every machine of a lab, and stays when the folder is removed.
			content, err := os.ReadFile(filepath.Join(c.Kubernetes, program))
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, program), content, 0o755); err != nil {
				return err
			}
		}
		return nil
	})
}

// release rejects a program whose minor version differs from the lab's.
func (c Cache) release(ctx context.Context, program string) error {
	args := []string{"--version"}
	if program == "kubectl" {
		args = []string{"version", "--client"}
	}
	path := filepath.Join(c.Kubernetes, program)
	said, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return fmt.Errorf("$%s: ask %s for its version: %w", KubernetesVariable, path, err)
	}
	minor := kubernetesVersion[:strings.LastIndex(kubernetesVersion, ".")+1]
	if !strings.Contains(string(said), minor) {
		return fmt.Errorf("$%s: %s says %q, want a %sx", KubernetesVariable, path, strings.TrimSpace(string(said)), minor)
	}
	return nil
}

// rename gives an executable its program's name. For example, go names etcd's executable "server", after its directory.
func (part component) rename(dir string) error {
	if len(part.programs) != 1 {
		return nil
	}
	built, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(built) != 1 {
		return fmt.Errorf("build of %s left %v, want one program", part.name, built)
	}
	return os.Rename(built[0], filepath.Join(dir, part.programs[0]))
}

func (c Cache) ownPrograms(ctx context.Context, version string) (string, error) {
	lab := filepath.Join(c.Source, "tools/lab")
	args := []string{"build", "-ldflags", "-s -w", "-o", ""}
	inputs := []string{filepath.Join(c.Source, "go.sum"), filepath.Join(lab, "internal/machine"), filepath.Join(lab, "internal/supervisor")}
	for _, p := range own {
		args = append(args, "./tools/lab/"+p)
		inputs = append(inputs, filepath.Join(lab, p))
	}
	key, err := Key(append([]string{version, compile.Flags}, args...), inputs...)
	if err != nil {
		return "", err
	}
	return c.entry("own", key, func(path string) error {
		c.Report("building the lab's own programs")
		args[4] = path + "/"
		return c.goBuild(ctx, c.Source, "own", "", args)
	})
}

// goBuild runs go in a module, with a toolchain or the local one, and reports its progress at intervals.
func (c Cache) goBuild(ctx context.Context, dir, name, toolchain string, args []string) error {
	cmd := compile.Go(ctx, args...)
	cmd.Dir = dir
	// A compiler that collects no garbage before it holds 1 GiB is a tenth faster.
	cmd.Env = append(cmd.Env, "GOTOOLCHAIN="+cmp.Or(toolchain, "local"), "GOGC=off", "GOMEMLIMIT=1GiB")
	if scratch, ok := c.scratch(); ok {
		defer os.RemoveAll(scratch)
		cmd.Env = append(cmd.Env, "GOTMPDIR="+scratch)
	}
	out, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	var compiled atomic.Int64
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(15 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				c.Report("building %s: %d packages compiled", name, compiled.Load())
			}
		}
	}()
	said := readBuild(out, &compiled)
	err = cmd.Wait()
	close(done)
	if err != nil {
		return fmt.Errorf("build %s in %s: %w\n%s", name, dir, err, said)
	}
	return nil
}

// memory is a file system in memory.
const memory = "/dev/shm"

// scratch makes a folder in memory for the intermediate files of a build: without writing them to a disk, it takes a twelfth less time.
// There is none where memory is short: Kubernetes has 3 GiB of such files, and each compiler may take 1 GiB.
func (c Cache) scratch() (folder string, ok bool) {
	if !roomFor(memory, uint64(3+runtime.NumCPU())<<30) {
		return "", false
	}
	return c.scratchIn(memory)
}

// scratchIn makes the folder of this cache in another one. The cache is locked, so whatever is there is of a build that was killed.
func (c Cache) scratchIn(parent string) (folder string, ok bool) {
	key, err := Key([]string{c.Dir, strconv.Itoa(os.Getuid())})
	folder = filepath.Join(parent, "isthmus-lab-build-"+key)
	return folder, err == nil && os.RemoveAll(folder) == nil && os.Mkdir(folder, 0o700) == nil
}

// roomFor reports whether a file system in memory can take so many bytes, and the machine has so much memory to spare.
func roomFor(fs string, bytes uint64) bool {
	var shared unix.Statfs_t
	if unix.Statfs(fs, &shared) != nil || shared.Type != unix.TMPFS_MAGIC || shared.Bavail*uint64(shared.Bsize) < bytes {
		return false
	}
	machine, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return false
	}
	_, available, _ := strings.Cut(string(machine), "MemAvailable:")
	var kilobytes uint64
	_, err = fmt.Sscan(available, &kilobytes)
	return err == nil && kilobytes<<10 >= bytes
}

// readBuild counts the package names that `go build -v` prints, and returns all other output.
func readBuild(out io.Reader, compiled *atomic.Int64) string {
	var rest strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if line := lines.Text(); strings.Contains(line, " ") {
			fmt.Fprintln(&rest, line)
		} else {
			compiled.Add(1)
		}
	}
	return rest.String()
}
