// Test runs every test of the repository. It installs and builds what they need first, runs the packages that bring up
// labs (real clusters) after all others, says what took longest, and ends with a line that counts what ran:
//
//	go run ./tools/test                      # everything; 312 passed, 0 failed, 0 skipped
//	go run ./tools/test ./dns/... ./agent    # some packages
//	go run ./tools/test -soak 5              # five rounds of everything, with the race detector
//
// It exits 1 when a test failed, when none ran, and, with REQUIRE_PRIVILEGED=1, when one was skipped. Root
// has that by default: set REQUIRE_PRIVILEGED=0 to let tests skip.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/generate/conformance"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/neutron"
	"github.com/isthmus-net/isthmus/tools/test/report"
)

// hostPackages are the Debian packages that tests call programs of; those of a lab are its own matter.
var hostPackages = []string{
	"bpftool", "conntrack", "containernetworking-plugins", "iproute2", "iptables", "nftables",
	"bind9-dnsutils", "knot-dnsutils", "ldnsutils", "unbound", // e2e/resolvers, which also compiles for two C libraries
	"gcc", "libc6-dev", "musl-tools",
	"frr", "keepalived", // gateway
}

const module = "github.com/isthmus-net/isthmus/"

// heavy are the packages whose tests bring up labs. They go after all others: what they promise of a cluster is for a
// machine that has the time, and its inotify instances (fs.inotify.max_user_instances) do for labs or for the API
// servers of other tests.
var heavy = []string{module + "tools/lab/cluster", module + "e2e"}

// long are the packages that begin first, the longest one first, so that nothing waits for them alone in the end.
var long = []string{
	module + "controlplane/broker", module + "controlplane/federation", module + "controlplane/broker/membership", module + "tools/kernels", module + "cmd/isthmusctl",
	module + "tools/bench/controlplane", module + "tools/scale/world", module + "tools/bench/dataplane", module + "e2e/neighbours",
	module + "controlplane/api/access", module + "controlplane/broker/internal/liveness", module + "gateway/controller",
}

const (

	// No package runs longer than this, so that a test which hangs ends in a stack trace.
	packageLimit = 25 * time.Minute
	soakLimit    = 60 * time.Minute

	// So many tests of one lab run at the same time, of those that may: they wait for Kubernetes more than they work.
	atOnce = 3

	slowest = 20 // packages and tests that the end names
)

func main() {
	soak := flag.Int("soak", 0, "this many `rounds` with the race detector, each with servers and labs of its own; 0 is one plain round")
	pattern := flag.String("run", "", "only tests that match, as for go test")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	r := report.New(os.Stdout)
	err := run(ctx, r, *soak, *pattern, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stdout, "test:", err)
	}
	for _, t := range r.Slowest(slowest) {
		fmt.Fprintln(os.Stdout, "slowest:", t)
	}
	fmt.Fprintln(os.Stdout, r.Summary())
	if err != nil {
		stop()
		os.Exit(1)
	}
}

// fullLength tells tests that scale outages, Leases and the like down, or repeat something a few times, to take
// the real time and the real number.
const fullLength = "ISTHMUS_FULL_LENGTH=1"

// run runs the tests of packages, or of all, and returns why the whole is not a success.
func run(ctx context.Context, r *report.Report, soak int, pattern string, packages []string) error {
	if len(packages) == 0 {
		packages = []string{"./..."}
	}
	env, strict, err := prepare(ctx, soak)
	if err != nil {
		return err
	}
	if pattern == "" {
		marks, err := conformance.Marks(".")
		if err != nil {
			return err
		}
		r.Expect(marks)
	}
	light, alone, err := split(ctx, packages)
	if err != nil {
		return err
	}
	step("vet")
	if output, err := exec.CommandContext(ctx, "go", append([]string{"vet"}, packages...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("go vet: %w\n%s", err, output)
	}
	// Vetted they are. Nobody debugs these programs, and without what a debugger reads they are linked sooner.
	args := []string{"test", "-json", "-count=1", "-vet=off", "-ldflags=-s -w"}
	if soak > 0 {
		args = append(args, "-timeout="+soakLimit.String(), "-race")
	} else {
		args = append(args, "-timeout="+packageLimit.String())
	}
	if pattern != "" {
		args = append(args, "-run="+pattern)
	}
	for round := range max(soak, 1) {
		env := env
		if soak > 0 {
			step("round %d of %d", round+1, soak)
		}
		if soak > 0 && round == 0 { // once is enough for what takes its full time
			env = append(slices.Clone(env), fullLength)
		}
		step("test %d packages", len(light))
		// One more than there are CPUs: some package always waits.
		if err := goTest(ctx, r, env, slices.Concat(args, []string{"-p=" + strconv.Itoa(runtime.NumCPU()+1)}, light)); err != nil {
			return err
		}
		if err := testAlone(ctx, r, env, args, alone); err != nil {
			return err
		}
	}
	return verdict(r, strict)
}

// testAlone tests packages that bring up labs while nobody else on this machine does the same.
func testAlone(ctx context.Context, r *report.Report, env, args, packages []string) (err error) {
	if len(packages) == 0 {
		return nil
	}
	release, err := haveMachine(ctx, machineLock())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	step("test %d packages that bring up labs", len(packages))
	return goTest(ctx, r, env, slices.Concat(args, []string{"-parallel=" + strconv.Itoa(atOnce)}, packages))
}

// prepare installs and builds what tests use. It returns their environment, and whether a skip is a failure.
func prepare(ctx context.Context, soak int) (env []string, strict bool, err error) {
	env = os.Environ()
	if os.Getenv("GOGC") == "" {
		env = append(env, "GOGC=400") // API servers, linkers, clients: they live for a moment, and memory is there
	}
	required, set := os.LookupEnv("REQUIRE_PRIVILEGED")
	if !set && os.Geteuid() == 0 {
		required = "1"
		env = append(env, "REQUIRE_PRIVILEGED=1")
	}
	if soak > 0 {
		env = append(env, "CGO_ENABLED=1") // the race detector is C
	}
	if err := errors.Join(debian.Ensure(ctx, os.Stdout, hostPackages...), neutron.Open(neutron.Config{Compute: true, Progress: os.Stdout}).Install(ctx)); err != nil {
		return nil, false, err
	}
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		step("build kube-apiserver and etcd, unless they are there")
		assets, err := cluster.Assets(ctx, cluster.Config{Progress: os.Stdout})
		if err != nil {
			return nil, false, fmt.Errorf("build the API server that tests use: %w", err)
		}
		env = append(env, "KUBEBUILDER_ASSETS="+assets)
	}
	return env, required == "1", nil
}

// split lists packages that have tests: those that bring up no lab, in the order to begin with, and those that do.
func split(ctx context.Context, packages []string) (light, alone []string, err error) {
	const format = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-f", format}, packages...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go list: %w\n%s", err, stderr.String())
	}
	for pkg := range strings.FieldsSeq(string(out)) {
		if slices.Contains(heavy, pkg) {
			alone = append(alone, pkg)
		} else {
			light = append(light, pkg)
		}
	}
	slices.SortStableFunc(light, func(a, b string) int { return cmp.Compare(rank(a), rank(b)) })
	return light, alone, nil
}

// rank is a package's place in long, or after it.
func rank(pkg string) int {
	if i := slices.Index(long, pkg); i >= 0 {
		return i
	}
	return len(long)
}

// goTest runs go with args, whose first package is a full import path. Failed tests are in the report, so they are no
// error.
func goTest(ctx context.Context, r *report.Report, env, args []string) error {
	if !strings.HasPrefix(args[len(args)-1], module) {
		return nil // no package: go would take the current folder
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, write, write
	// An interrupt reaches tests too, which take their clusters down; give them the time.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	if err := cmd.Start(); err != nil {
		return errors.Join(err, write.Close())
	}
	if err := write.Close(); err != nil { // go holds the other end now
		return err
	}
	failed := r.Failed
	readErr := r.Read(io.Reader(read))
	err = cmd.Wait()
	switch exit := (*exec.ExitError)(nil); {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &exit) && r.Failed > failed:
		return readErr
	case err != nil:
		return fmt.Errorf("go test: %w", err)
	default:
		return readErr
	}
}

// verdict returns why the counts are not a success, or nil.
func verdict(r *report.Report, strict bool) error {
	for _, s := range r.Skips {
		fmt.Fprintln(os.Stdout, "skipped:", s)
	}
	for _, u := range r.Unreached {
		fmt.Fprintln(os.Stdout, "unreached:", u)
	}
	switch {
	case r.Failed > 0:
		return errors.New("there are failures")
	case len(r.Unreached) > 0:
		return errors.New("tests passed without showing lines of docs/conformance.md that they name")
	case r.Skipped > 0 && strict:
		return errors.New("tests were skipped, which REQUIRE_PRIVILEGED=1 forbids")
	case r.Passed == 0:
		return errors.New("no test ran")
	default:
		return nil
	}
}

var begin = time.Now()

// step says what is being done, and how long after the start.
func step(format string, args ...any) {
	fmt.Fprintf(os.Stdout, "[%4.0fs] %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
}
