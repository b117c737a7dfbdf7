// Package report reads what `go test -json` says, shows what a person wants to see of it, and counts.
package report

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/generate/conformance"
)

// slow is how long a test must take for its end to be shown before that of its package.
const slow = 5 * time.Second

// event is one line of `go test -json` (see `go doc cmd/test2json`).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output and build-fail
	Test        string
	Elapsed     float64 // seconds
	Output      string
	Key, Value  string // of attr
	FailedBuild string // of a package that failed since this one could not be built
}

// key names a test; the test of a package itself is "".
type key struct{ pkg, test string }

// took is how long something took.
type took struct {
	what    string // "package", or "package test"
	seconds float64
}

// Report follows test runs. Make one with New, feed it with Read as often as there are runs.
type Report struct {
	// Passed, Failed and Skipped count tests. A test with subtests is not counted beside them, unless it
	// fails by itself. A package that fails outside of its tests counts as one failed test.
	Passed, Failed, Skipped int
	// Skips says which tests were skipped, and why.
	Skips []string
	// Unreached names the tests that passed without reaching a line of docs/conformance.md that they name.
	Unreached []string

	took    []took // packages and tests, of all runs
	out     io.Writer
	said    map[key][]string // output of tests that have not passed
	results map[key]string   // "pass", "fail" or "skip"
	build   map[string][]string
	marks   map[string][]conformance.Mark // by package, as Expect got them
	reached map[reached]bool
}

// New returns an empty report that shows progress on out: a line for each package, and everything that a
// failed test said.
func New(out io.Writer) *Report {
	return &Report{
		out: out, said: map[key][]string{}, results: map[key]string{}, build: map[string][]string{},
		marks: map[string][]conformance.Mark{}, reached: map[reached]bool{},
	}
}

// Read follows one run until its output ends. Lines that are no events are shown as they are.
func (r *Report) Read(from io.Reader) error {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(r.out, "%s", line)
			} else {
				r.take(e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the output of go test: %w", err)
		}
	}
}

func (r *Report) take(e event) {
	k := key{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		r.build[e.ImportPath] = append(r.build[e.ImportPath], e.Output)
	case "output":
		if strings.HasPrefix(e.Output, "=== ATTR") {
			break // the event attr, as text
		}
		r.said[k] = append(r.said[k], e.Output)
	case "attr":
		r.reach(e)
	case "pass", "fail", "skip":
		r.results[k] = e.Action
		if !strings.Contains(e.Test, "/") {
			r.took = append(r.took, took{strings.TrimSpace(short(e.Package) + " " + e.Test), e.Elapsed})
		}
		switch {
		case e.Test == "":
			r.finish(e)
		case e.Elapsed >= slow.Seconds():
			fmt.Fprintf(r.out, "     %s %s: %s after %.0fs\n", short(e.Package), e.Test, e.Action, e.Elapsed)
		}
	}
}

// finish counts and shows a package whose last event is e.
func (r *Report) finish(e event) {
	passed, failed, skipped := 0, 0, 0
	for _, k := range r.of(e.Package) {
		switch result := r.results[k]; {
		case result == "fail" && !r.below(k, "fail"):
			failed++
			fmt.Fprintf(r.out, "--- FAIL: %s %s\n%s", short(k.pkg), k.test, r.story(k))
		case r.below(k, ""):
			// Its subtests speak for it.
		case result == "pass":
			passed++
		case result == "skip":
			skipped++
			r.Skips = append(r.Skips, fmt.Sprintf("%s %s: %s", short(k.pkg), k.test, reason(r.said[k])))
		}
	}
	if e.Action == "fail" && failed == 0 {
		failed++
		fmt.Fprintf(r.out, "--- FAIL: %s\n%s", short(e.Package), strings.Join(r.build[e.FailedBuild], ""))
		for _, k := range r.unfinished(e.Package) { // a panic is the output of one of them
			fmt.Fprint(r.out, strings.Join(r.said[k], ""))
		}
		fmt.Fprint(r.out, strings.Join(r.said[key{e.Package, ""}], ""))
	}
	r.Passed, r.Failed, r.Skipped = r.Passed+passed, r.Failed+failed, r.Skipped+skipped
	if passed+failed+skipped > 0 {
		result := map[bool]string{true: "ok  ", false: "FAIL"}[failed == 0]
		elapsed := time.Duration(e.Elapsed * float64(time.Second)).Round(10 * time.Millisecond)
		fmt.Fprintf(r.out, "%s %-44s %8s  %d passed, %d failed, %d skipped\n", result, short(e.Package), elapsed, passed, failed, skipped)
	}
	r.checkMarks(e.Package)
	for _, k := range slices.Concat(r.of(e.Package), r.unfinished(e.Package), []key{{e.Package, ""}}) {
		delete(r.results, k)
		delete(r.said, k)
	}
}

// of returns the tests of a package, sorted.
func (r *Report) of(pkg string) []key {
	var keys []key
	for k := range r.results {
		if k.pkg == pkg && k.test != "" {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int { return strings.Compare(a.test, b.test) })
	return keys
}

// unfinished returns the tests of a package that have said something and have no result, sorted.
func (r *Report) unfinished(pkg string) []key {
	var keys []key
	for k := range r.said {
		if k.pkg == pkg && k.test != "" && r.results[k] == "" {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int { return strings.Compare(a.test, b.test) })
	return keys
}

// below reports whether a subtest of k has the result, or any when result is "".
func (r *Report) below(k key, result string) bool {
	for other, have := range r.results {
		if other.pkg == k.pkg && strings.HasPrefix(other.test, k.test+"/") && (result == "" || have == result) {
			return true
		}
	}
	return false
}

// story is what a test and those around it said.
func (r *Report) story(k key) string {
	var b strings.Builder
	for i, c := range k.test + "/" {
		if c == '/' {
			b.WriteString(strings.Join(r.said[key{k.pkg, k.test[:i]}], ""))
		}
	}
	return b.String()
}

// reason finds in a skipped test's output why it was skipped.
func reason(said []string) string {
	for _, line := range said {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			return line
		}
	}
	return "no reason given"
}

func short(pkg string) string {
	return strings.TrimPrefix(pkg, "github.com/isthmus-net/isthmus/")
}

// Slowest lists n packages and tests that took longest, the slowest first. A package takes as long as its tests
// and what is around them; a test waits for others that run beside it.
func (r *Report) Slowest(n int) []string {
	slices.SortStableFunc(r.took, func(a, b took) int { return cmp.Compare(b.seconds, a.seconds) })
	var lines []string
	for _, t := range r.took[:min(n, len(r.took))] {
		lines = append(lines, fmt.Sprintf("%4.0fs %s", t.seconds, t.what))
	}
	return lines
}

// Summary is the last line of a run.
func (r *Report) Summary() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", r.Passed, r.Failed, r.Skipped)
}
