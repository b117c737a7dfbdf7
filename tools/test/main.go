// Test runs every test of the repository. It first installs and builds the programs that tests need. The package on a large
// lab (real clusters) runs after all others. The report ends with the slowest packages and tests and a line of counts:
//
//	go run ./tools/test                      # everything; 312 passed, 0 failed, 0 skipped
//	go run ./tools/test -unit                # tests that need neither privileges nor an API server
//	go run ./tools/test -race                # packages of such tests only, with the race detector
//	go run ./tools/test ./dns/... ./agent    # some packages
//	go run ./tools/test -soak 5              # five rounds of everything, with the race detector
//
// It exits 1 when a test failed, when none ran, and, with REQUIRE_PRIVILEGED=1, when one was skipped. That is the default for
// root: set REQUIRE_PRIVILEGED=0 to allow skips. Packages that need neither privileges nor an API server are tested again only
// if they changed: Go's cache has their results. A soak tests them each time. A unit run installs nothing and skips all other
// tests also for root. Every fuzz target runs for a moment beyond its seeds, longer in a soak, unless -run selects tests.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/tools/apitest/pool"
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

// onLab is the package whose tests share a large lab. It runs alone, after all others: its clusters need the CPUs, some of its tests
// measure how long something takes, and the inotify instances of a machine (fs.inotify.max_user_instances, often 128) suffice for it
// and no other lab.
const onLab = module + "e2e"

// smallLab is the package whose tests bring up a small one.
const smallLab = module + "tools/lab/cluster"

// patient are packages that run after the busy ones and before the lab: they wait for Leases to expire, or packets must not wait for
// a CPU in them. Beside busy packages or a large lab they take four times as long.
var patient = []string{module + "controlplane/federation", module + "controlplane/broker/membership", module + "gateway/ebpf"}

// long are the packages of the first phase that start first, the longest one first, so that the phase does not end with one
// long package alone.
var long = []string{
	module + "controlplane/broker", module + "tools/bench/dataplane", module + "e2e/bystanders",
	module + "cmd/isthmusctl", module + "tools/kernels", module + "tools/bench/federation", module + "tools/neutron",
	module + "bpf/datapath", module + "bpf", smallLab, module + "e2e/gateways", module + "tools/bench/controlplane", module + "e2e/neighbours", module + "tools/scale/simulation",
	module + "controlplane/internal/liveness", module + "gateway/controller", module + "controlplane/federation/services",
	module + "controlplane/federation/bootstrap", module + "controlplane/api/access",
}

const (
	// packageLimit bounds a package, so that a test which hangs ends with a stack trace. On one CPU, e2e takes 40 minutes.
	packageLimit = time.Hour

	slowest = 20 // packages and tests that the report lists
)

func main() {
	soak := flag.Int("soak", 0, "number of `rounds` with the race detector, each with servers and labs of its own; 0 is one plain round")
	pattern := flag.String("run", "", "only tests that match, as for go test")
	unit := flag.Bool("unit", false, "only tests that need neither privileges nor an API server")
	race := flag.Bool("race", false, "only packages that need neither privileges nor an API server, with the race detector, unless they are unchanged")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: test [-run PATTERN] [-unit | -race | -soak ROUNDS] [PACKAGE ...]\nexample: go run ./tools/test -run TestLeave ./controlplane/...\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	r := report.New(os.Stdout)
	var err error
	switch {
	case *race:
		err = runRace(ctx, r, flag.Args())
	case *unit:
		err = runUnit(ctx, r, *pattern, flag.Args())
	default:
		err = run(ctx, r, *soak, *pattern, flag.Args())
	}
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

// fullLength makes tests that shorten outages, Leases and the like, or repeat a step a few times, use production values.
const fullLength = "ISTHMUS_FULL_LENGTH=1"

// runUnit runs the tests of packages, or of all, that need neither privileges nor an API server. The rules of the tree
// (tools/check) are left to make check.
func runUnit(ctx context.Context, r *report.Report, pattern string, packages []string) error {
	packages, err := withTests(ctx, packages)
	if err != nil {
		return err
	}
	packages = slices.DeleteFunc(packages, func(pkg string) bool { return strings.HasPrefix(pkg, module+"tools/check") })
	args := []string{"test", "-json", "-vet=off", "-timeout=" + packageLimit.String()}
	if pattern != "" {
		args = append(args, "-run="+pattern)
	}
	if err := goTest(ctx, r, append(os.Environ(), "ISTHMUS_UNIT=1"), slices.Concat(args, packages)); err != nil {
		return err
	}
	r.Skips = nil // they are what a unit run leaves out
	return verdict(r, false)
}

// runRace runs those of packages, or of all, whose tests depend on nothing but their source, with the race detector. Go's cache
// has the results of unchanged ones. The rules of the tree (tools/check) start no goroutines and are left out.
func runRace(ctx context.Context, r *report.Report, packages []string) error {
	if err := debian.Ensure(ctx, os.Stdout, "gcc", "libc6-dev"); err != nil { // the race detector is C
		return err
	}
	packages, err := withTests(ctx, packages)
	if err != nil {
		return err
	}
	units, _, err := byNeed(ctx, packages)
	if err != nil {
		return err
	}
	units = slices.DeleteFunc(units, func(pkg string) bool { return strings.HasPrefix(pkg, module+"tools/check") })
	step("test %d packages with the race detector, unless they are unchanged", len(units))
	args := []string{"test", "-json", "-vet=off", "-race", "-ldflags=-s -w", "-timeout=" + packageLimit.String()}
	if err := goTest(ctx, r, append(os.Environ(), "CGO_ENABLED=1"), slices.Concat(args, units)); err != nil {
		return err
	}
	return verdict(r, false)
}

// run runs the tests of packages, or of all. Its error says why the run is no success.
func run(ctx context.Context, r *report.Report, soak int, pattern string, packages []string) (err error) {
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
	packages, err = withTests(ctx, packages)
	if err != nil {
		return err
	}
	if pattern == "" {
		each := fuzzTime
		if soak > 0 {
			each = soakFuzzTime
		}
		if err := fuzzAll(ctx, r, env, packages, each); err != nil {
			return err
		}
	}
	if slices.Contains(packages, onLab) || slices.Contains(packages, smallLab) {
		release, lockErr := haveMachine(ctx, machineLock())
		if lockErr != nil {
			return lockErr
		}
		defer func() { err = errors.Join(err, release()) }()
	}
	// make check runs vet. Without debug information, which no test needs, programs are linked faster.
	args := []string{"test", "-json", "-vet=off", "-ldflags=-s -w"}
	if pattern != "" {
		args = append(args, "-run="+pattern)
	}
	if soak > 0 {
		err = runSoak(ctx, r, soak, env, args, packages)
	} else {
		err = runOnce(ctx, r, env, append(args, "-timeout="+packageLimit.String()), packages)
	}
	if err != nil {
		return err
	}
	return verdict(r, strict)
}

// runSoak runs packages in rounds, with the race detector. Each package starts its own API servers.
func runSoak(ctx context.Context, r *report.Report, rounds int, env, args, packages []string) error {
	args = append(args, "-count=1", "-timeout="+packageLimit.String(), "-race")
	for round := range rounds {
		env := env
		step("round %d of %d", round+1, rounds)
		if round == 0 { // one round with production values is enough
			env = append(slices.Clone(env), fullLength)
		}
		if err := inPhases(ctx, r, env, args, packages); err != nil {
			return err
		}
	}
	return nil
}

// runOnce runs packages once. Those that depend on nothing but their source come first, unless Go's cache has their results.
// The others follow in phases, and borrow their API servers from one pool.
func runOnce(ctx context.Context, r *report.Report, env, args, packages []string) (err error) {
	units, others, err := byNeed(ctx, packages)
	if err != nil {
		return err
	}
	step("test %d packages that need neither privileges nor an API server, unless they are unchanged", len(units))
	if err := goTest(ctx, r, env, slices.Concat(args, units)); err != nil {
		return err
	}
	servers, err := lendServers(ctx, env)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, servers.Close()) }()
	env = append(slices.Clone(env), pool.Variable+"="+servers.Socket())
	return inPhases(ctx, r, env, append(args, "-count=1"), others)
}

// inPhases tests packages: most of them first, twice as many at a time as there are CPUs, or as the quota allows, because many tests
// wait; then the patient ones; then the one on the large lab.
func inPhases(ctx context.Context, r *report.Report, env, args, packages []string) error {
	cpus := runtime.GOMAXPROCS(0)
	busy, waiting, lab := phases(packages)
	for _, phase := range []struct {
		packages []string
		args     []string
	}{
		{busy, []string{"-p=" + strconv.Itoa(2*cpus)}},
		{waiting, []string{"-p=" + strconv.Itoa(2*cpus-1)}},
		{lab, []string{"-parallel=" + strconv.Itoa(parallelOnLab(cpus))}},
	} {
		if len(phase.packages) == 0 {
			continue
		}
		step("test %d packages, %s", len(phase.packages), strings.Join(phase.args, " "))
		if err := goTest(ctx, r, env, slices.Concat(args, phase.args, phase.packages)); err != nil {
			return err
		}
	}
	return nil
}

// lendServers starts a pool of API servers with the programs of env. The caller closes it.
func lendServers(ctx context.Context, env []string) (*pool.Pool, error) {
	log.SetLogger(logr.Discard()) // of controller-runtime, which installs kinds
	assets := ""
	for _, e := range env {
		if value, ok := strings.CutPrefix(e, "KUBEBUILDER_ASSETS="); ok {
			assets = value
		}
	}
	return pool.Listen(ctx, assets)
}

// parallelOnLab is how many parallel tests use one lab at a time. They mostly wait for Kubernetes, which needs a CPU for that.
func parallelOnLab(cpus int) int {
	if cpus == 1 {
		return 1
	}
	return 3
}

// prepare installs and builds the programs that tests use. It returns the environment of the tests, and whether a skip is a
// failure.
func prepare(ctx context.Context, soak int) (env []string, strict bool, err error) {
	if os.Getenv("GOGC") == "" {
		// For API servers, linkers, clients: they live for a moment, and memory is there.
		if err := os.Setenv("GOGC", "400"); err != nil {
			return nil, false, err
		}
	}
	env = os.Environ()
	required, set := os.LookupEnv("REQUIRE_PRIVILEGED")
	if !set && os.Geteuid() == 0 {
		required = "1"
		env = append(env, "REQUIRE_PRIVILEGED=1")
	}
	if soak > 0 {
		env = append(env, "CGO_ENABLED=1") // the race detector is C
	}
	// Installing waits for the network, building takes the CPUs.
	var preparing errgroup.Group
	preparing.Go(func() error { return debian.Ensure(ctx, os.Stdout, hostPackages...) })
	preparing.Go(func() error {
		return neutron.Open(neutron.Config{Compute: true, Balancing: true, Progress: os.Stdout}).Install(ctx)
	})
	if assets := os.Getenv("KUBEBUILDER_ASSETS"); assets == "" {
		preparing.Go(func() error {
			step("build kube-apiserver and etcd, unless the cache has them")
			assets, err := cluster.Assets(ctx, cluster.Config{Progress: os.Stdout})
			if err != nil {
				return fmt.Errorf("build the API server that tests use: %w", err)
			}
			env = append(env, "KUBEBUILDER_ASSETS="+assets)
			return nil
		})
	}
	if err := preparing.Wait(); err != nil {
		return nil, false, err
	}
	return env, required == "1", nil
}

// withTests lists those of packages, by default all, that have tests.
func withTests(ctx context.Context, packages []string) ([]string, error) {
	if len(packages) == 0 {
		packages = []string{"./..."}
	}
	const format = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"
	out, err := goList(ctx, append([]string{"-f", format}, packages...)...)
	return strings.Fields(out), err
}

func goList(ctx context.Context, args ...string) (string, error) {
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, "go", append([]string{"list"}, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w\n%s", err, stderr.String())
	}
	return string(out), nil
}

// byNeed divides packages into those whose tests depend on their source alone, and those that may need privileges or an API
// server: these import netlab, which decides whether such a test runs.
func byNeed(ctx context.Context, packages []string) (units, others []string, err error) {
	const format = `{{if eq .Name "main"}}{{.ImportPath}} {{join .Deps " "}}{{end}}`
	out, err := goList(ctx, append([]string{"-test", "-f", format}, packages...)...)
	if err != nil {
		return nil, nil, err
	}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		pkg, isTest := strings.CutSuffix(fields[0], ".test")
		switch {
		case !isTest: // a command
		case slices.Contains(fields, module+"tools/netlab"):
			others = append(others, pkg)
		default:
			units = append(units, pkg)
		}
	}
	return units, others, nil
}

// phases divides packages into those of each phase, in the order to start them.
func phases(packages []string) (busy, waiting, lab []string) {
	for _, pkg := range packages {
		switch {
		case pkg == onLab:
			lab = append(lab, pkg)
		case slices.Contains(patient, pkg):
			waiting = append(waiting, pkg)
		default:
			busy = append(busy, pkg)
		}
	}
	slices.SortStableFunc(busy, func(a, b string) int { return cmp.Compare(rank(long, a), rank(long, b)) })
	slices.SortFunc(waiting, func(a, b string) int { return cmp.Compare(rank(patient, a), rank(patient, b)) })
	return busy, waiting, lab
}

// rank is a package's place in order, or after its end.
func rank(order []string, pkg string) int {
	if i := slices.Index(order, pkg); i >= 0 {
		return i
	}
	return len(order)
}

// goTest runs go with args, which end with full import paths. Failed tests are in the report, so they are no error.
func goTest(ctx context.Context, r *report.Report, env, args []string) error {
	if !strings.HasPrefix(args[len(args)-1], module) {
		return nil // without a package, go would test the current folder
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, write, write
	// Tests receive an interrupt too and take their clusters down, which takes time.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	if err := cmd.Start(); err != nil {
		return errors.Join(err, write.Close())
	}
	if err := write.Close(); err != nil { // go holds the other end now
		return err
	}
	failed := r.Failed
	readErr := r.Read(read)
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
