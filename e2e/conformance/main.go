// Conformance runs the conformance suite of the MCS API against two real clusters with Isthmus, and writes the suite's own report,
// with which an implementation asks to be listed as conformant.
//
//	git clone https://github.com/kubernetes-sigs/mcs-api ../mcs-api
//	go run ./e2e/conformance --suite ../mcs-api    # ends with "conformance: 27 of 27", exit 0
//	go run ./e2e/conformance --suite ../mcs-api --families ipv6-first,ipv4-only
//
// The suite is not a part of this repository. It runs outside of both clusters, as an administrator of each.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// module is the path of the suite's module, which stands in the folder conformance of its repository.
const module = "sigs.k8s.io/mcs-api/conformance"

// reports are the files that the suite writes into its working directory, first the one with the counts.
var reports = []string{"report.yaml", "report.html"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := run{cfg: testbed.Config{Progress: os.Stdout}}
	flag.StringVar(&r.suite, "suite", "../mcs-api", "the `folder` of a clone of github.com/kubernetes-sigs/mcs-api")
	flag.StringVar(&r.out, "out", "bin/conformance", "the `folder` for report.yaml and report.html")
	flag.StringVar(&r.version, "version", "devel", "the version of Isthmus, for the report")
	flag.StringVar(&r.cfg.Name, "name", "conformance", "the `lab` to use; what already stands there is brought up to date")
	families := flag.String("families", "", "the address `families` of both clusters, or of each: ipv6-first or ipv4-only; empty is both, IPv4 first")
	flag.BoolVar(&r.keep, "keep", false, "leave the lab up")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: conformance [--suite DIR] [--out DIR] [--version VERSION] [--name LAB] [--families FAMILIES] [--keep]\nexample: go run ./e2e/conformance --suite ../mcs-api --version v0.1.0\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	r.cfg.Families = familiesOf(*families)
	if err := r.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "conformance: FAILED:", err)
		os.Exit(1)
	}
}

// run is one run of the suite.
type run struct {
	suite, out, version string
	cfg                 testbed.Config
	keep                bool
}

func (r run) run(ctx context.Context) (err error) {
	if err := checkSuite(r.suite); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "isthmus-conformance-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	program := filepath.Join(dir, "suite")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", program, ".")
	build.Dir = filepath.Join(r.suite, "conformance")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the suite in %s: %w\n%s", build.Dir, err, out)
	}
	tb, err := testbed.Up(ctx, r.cfg)
	if err != nil {
		return err
	}
	if !r.keep {
		defer func() { err = errors.Join(err, testbed.Down(context.WithoutCancel(ctx), r.cfg)) }()
	}
	tb.Step("run the suite against both clusters")
	failed := r.test(ctx, tb, dir, program)
	n, all, err := r.collect(dir)
	if err != nil {
		return errors.Join(failed, err)
	}
	fmt.Fprintf(os.Stdout, "  reports: %s\nconformance: %d of %d\n", r.out, n, all)
	if n < all || all == 0 {
		failed = errors.Join(failed, errors.New("not every specification passed"))
	}
	return failed
}

// familiesOf reads the families of all members, or a list of those of each. The lab checks their values.
func familiesOf(text string) map[string]topology.Families {
	all := map[string]topology.Families{}
	first, rest, each := strings.Cut(text, ",")
	for _, member := range testbed.Members() {
		all[member] = topology.Families(first)
		if each {
			first, rest, _ = strings.Cut(rest, ",")
		}
	}
	return all
}

// checkSuite returns an error unless dir is a clone of the suite's repository.
func checkSuite(dir string) error {
	path := filepath.Join(dir, "conformance", "go.mod")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("--suite: %s is missing; clone github.com/kubernetes-sigs/mcs-api beside this repository, or name its folder", path)
	}
	if err != nil {
		return fmt.Errorf("--suite: %w", err)
	}
	first, _, _ := strings.Cut(string(text), "\n")
	if have := strings.TrimSpace(strings.TrimPrefix(first, "module ")); have != module {
		return fmt.Errorf("--suite: %s is of module %q, not of %s", path, have, module)
	}
	return nil
}

// test runs the suite where every API server can be reached. It writes its reports into dir.
func (r run) test(ctx context.Context, tb *testbed.Testbed, dir, program string) error {
	var kubeconfigs []string
	for _, member := range testbed.Members() {
		kubeconfigs = append(kubeconfigs, tb.Lab.Kubeconfig(member))
	}
	cmd := tb.Lab.FabricCommand(ctx, program, "-contexts", strings.Join(testbed.Members(), ","),
		"-organization", "isthmus-net", "-project", "isthmus", "-version", r.version, "-url", "https://github.com/isthmus-net/isthmus")
	cmd.Env = append(cmd.Environ(), "KUBECONFIG="+strings.Join(kubeconfigs, string(os.PathListSeparator)))
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the suite: %w", err)
	}
	return nil
}

// collect copies the reports to r.out, and returns how many tests of all passed.
func (r run) collect(dir string) (passed, all int, err error) {
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return 0, 0, err
	}
	var texts [][]byte
	for _, name := range reports {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return 0, 0, fmt.Errorf("the suite wrote no report: %w", err)
		}
		if err := os.WriteFile(filepath.Join(r.out, name), text, 0o600); err != nil {
			return 0, 0, err
		}
		texts = append(texts, text)
	}
	return count(texts[0])
}

// count returns how many tests of all passed, from a report.
func count(text []byte) (passed, all int, err error) {
	var report struct{ Passed, Total int }
	if err := yaml.Unmarshal(text, &report); err != nil {
		return 0, 0, fmt.Errorf("read the suite's report: %w", err)
	}
	return report.Passed, report.Total, nil
}
