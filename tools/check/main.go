// Check proves what every change must pass: format, lint, vet, the rules of the tree, diagrams that parse, and generated
// files that are current. It runs all checks, also after a fault, and says how to correct each fault.
//
//	go run ./tools/check             # everything
//	go run ./tools/check generated   # one check
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/check/mermaid"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/generate/gen"
)

// check is one thing to prove. Its error tells the reader how to correct the fault.
type check struct {
	name string
	run  func(context.Context) error
}

var checks = []check{
	{"vet", func(ctx context.Context) error { return command(ctx, "go", "vet", "./...") }},
	{"lint", func(ctx context.Context) error {
		return command(ctx, "go", "tool", "-modfile=tools/lint/go.mod", "golangci-lint", "run", "--allow-parallel-runners")
	}},
	{"c-format", clangFormat},
	{"yaml", yamlLint},
	{"rules", func(ctx context.Context) error { return command(ctx, "go", "test", "./tools/check/...") }},
	{"mermaid", func(ctx context.Context) error { return mermaid.Check(ctx, ".", os.Stderr) }},
	{"modules", func(ctx context.Context) error { return command(ctx, "go", "mod", "tidy", "-diff") }},
	{"generated", generated},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: check [CHECK ...]\nexample: go run ./tools/check vet lint\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(ctx, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		stop()
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, "check: ok")
}

// run runs the named checks, or all, and names those that failed in its error.
func run(ctx context.Context, names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(checks, func(c check) bool { return c.name == name }) {
			return fmt.Errorf("there is no check %q", name)
		}
	}
	var failed []string
	for _, c := range checks {
		if len(names) > 0 && !slices.Contains(names, c.name) {
			continue
		}
		begin := time.Now()
		err := c.run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		result := "ok"
		if err != nil {
			result = "FAILED"
			failed = append(failed, c.name)
		}
		fmt.Fprintf(os.Stdout, "check %-10s %-6s %6.1fs\n", c.name, result, time.Since(begin).Seconds())
		if err != nil {
			fmt.Fprintln(os.Stdout, err)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

// clangFormat proves that the C is formatted, with the clang-format of the pinned clang.
func clangFormat(ctx context.Context) error {
	if err := debian.Ensure(ctx, os.Stderr, "clang-format-19"); err != nil {
		return err
	}
	var files []string
	for _, pattern := range []string{"bpf/*.[ch]", "tools/bench/dataplane/internal/reference/*.c", "e2e/resolvers/testdata/*.c"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		files = append(files, paths...)
	}
	if err := command(ctx, "clang-format-19", append([]string{"--dry-run", "-Werror"}, files...)...); err != nil {
		return fmt.Errorf("%w\nrun: clang-format-19 -i %s", err, strings.Join(files, " "))
	}
	return nil
}

// yamlLint proves that the chart's YAML is as chart-testing (`ct lint`) wants it.
func yamlLint(ctx context.Context) error {
	if err := debian.Ensure(ctx, os.Stderr, "yamllint"); err != nil {
		return err
	}
	const chart = "deploy/helm/isthmus/"
	files, err := filepath.Glob(chart + "ci/*-values.yaml")
	if err != nil {
		return err
	}
	files = append(files, chart+"Chart.yaml", chart+"values.yaml")
	return command(ctx, "yamllint", append([]string{"--strict", "--config-file", "tools/check/yamllint.yaml"}, files...)...)
}

// generated writes all generated files anew in a copy of the tree and compares.
func generated(ctx context.Context) error {
	copied, err := os.MkdirTemp("", "isthmus-generated-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(copied)
	if err := copyTree(".", copied); err != nil {
		return err
	}
	var said bytes.Buffer
	if err := gen.Run(ctx, copied, &said); err != nil {
		return fmt.Errorf("%s%w", said.Bytes(), err)
	}
	var faults []error
	for _, step := range gen.Steps {
		have, err := step.Files(".")
		if err != nil {
			return err
		}
		want, err := step.Files(copied)
		if err != nil {
			return err
		}
		for _, f := range compare(have, want) {
			faults = append(faults, fmt.Errorf("%s; run: go run ./tools/generate %s", f, step.Name))
		}
	}
	return errors.Join(faults...)
}

// compare returns the files that differ, sorted by path.
func compare(have, want map[string][]byte) []string {
	var faults []string
	for path, content := range want {
		switch old, ok := have[path]; {
		case !ok:
			faults = append(faults, path+" is missing")
		case !bytes.Equal(old, content):
			faults = append(faults, path+" is stale")
		}
	}
	for path := range have {
		if _, ok := want[path]; !ok {
			faults = append(faults, path+" is no longer generated")
		}
	}
	slices.Sort(faults)
	return faults
}

// copyTree copies the source files of the tree, without history and build results.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch {
		case entry.IsDir() && (name == ".git" || name == "bin"):
			return filepath.SkipDir
		case entry.IsDir():
			return os.MkdirAll(filepath.Join(to, name), 0o755)
		case !entry.Type().IsRegular():
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, name), content, 0o644)
	})
}

// command runs a program at the root. Its error carries the program's output.
func command(ctx context.Context, name string, args ...string) error {
	output, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s%s %s: %w", output, name, strings.Join(args, " "), err)
	}
	return nil
}
