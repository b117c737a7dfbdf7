package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/test/report"
)

const (
	// fuzzTime is how long each fuzz target runs beyond its seeds, which run with the other tests.
	fuzzTime = time.Second
	// soakFuzzTime is the same for a soak.
	soakFuzzTime = time.Minute
)

// fuzzTarget is a function FuzzXxx of a package's tests.
type fuzzTarget struct{ pkg, name string }

// fuzzFunction matches the first line of a fuzz target, as gofmt writes it.
var fuzzFunction = regexp.MustCompile(`(?m)^func (Fuzz(?:[^a-z\W]\w*)?)\(\w+ \*testing\.F\)`)

// fuzzTargets finds the fuzz targets of packages in the source of their tests.
func fuzzTargets(ctx context.Context, packages []string) ([]fuzzTarget, error) {
	const format = `{{$p := .}}{{range .TestGoFiles}}{{$p.ImportPath}} {{$p.Dir}} {{.}}
{{end}}{{range .XTestGoFiles}}{{$p.ImportPath}} {{$p.Dir}} {{.}}
{{end}}`
	out, err := goList(ctx, append([]string{"-f", format}, packages...)...)
	if err != nil {
		return nil, err
	}
	var targets []fuzzTarget
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			continue // between packages
		}
		source, err := os.ReadFile(filepath.Join(fields[1], fields[2]))
		if err != nil {
			return nil, err
		}
		for _, match := range fuzzFunction.FindAllSubmatch(source, -1) {
			targets = append(targets, fuzzTarget{fields[0], string(match[1])})
		}
	}
	return targets, nil
}

// fuzzAll fuzzes each target of packages for a time, one after another: a target uses all CPUs. An input that fails is a failed
// test, and the fuzzer writes it below the package's testdata/fuzz, to be committed with the fix.
func fuzzAll(ctx context.Context, r *report.Report, env, packages []string, each time.Duration) error {
	targets, err := fuzzTargets(ctx, packages)
	if err != nil || len(targets) == 0 {
		return err
	}
	step("fuzz %d targets for %s each, beyond their seeds", len(targets), each)
	env = append(slices.Clip(env), "CGO_ENABLED=0") // one build for soaks and others
	for _, t := range targets {
		before := r.Passed + r.Failed + r.Skipped
		if err := t.fuzz(ctx, r, env, each); err != nil {
			return err
		}
		if r.Passed+r.Failed+r.Skipped == before {
			return fmt.Errorf("%s of %s did not run", t.name, t.pkg)
		}
	}
	return nil
}

// fuzz runs one target. A failure is in the report, so it is no error.
func (t fuzzTarget) fuzz(ctx context.Context, r *report.Report, env []string, each time.Duration) error {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "test", "-json", "-vet=off", "-timeout="+packageLimit.String(),
		"-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+each.String(), t.pkg)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &out
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	runErr := cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	failed := r.Failed
	events := out.Bytes()
	if endedLate(events) {
		events, runErr = t.passed(each), nil
	}
	if err := r.Read(bytes.NewReader(events)); err != nil {
		return err
	}
	if exit := (*exec.ExitError)(nil); runErr != nil && (!errors.As(runErr, &exit) || r.Failed == failed) {
		return fmt.Errorf("fuzz %s of %s: %w\n%s", t.name, t.pkg, runErr, events)
	}
	return nil
}

// endedLate reports whether a fuzzer failed only because the time was over while an input ran, as on a busy machine. Go fixed
// that in 1.27 (go.dev/issue/75804). An input that fails is always written.
func endedLate(events []byte) bool {
	return bytes.Contains(events, []byte("context deadline exceeded")) && !bytes.Contains(events, []byte("Failing input written to"))
}

// passed returns the events of a run in which the target found nothing.
func (t fuzzTarget) passed(each time.Duration) []byte {
	const event = `{"Action":"pass","Package":%q,"Test":%q,"Elapsed":%g}` + "\n"
	return fmt.Appendf(nil, event+event, t.pkg, t.name, each.Seconds(), t.pkg, "", each.Seconds())
}
