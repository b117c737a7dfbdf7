// Package conformance writes docs/conformance.md: for every line of what Isthmus promises, the tests that
// hold it, or why there is none.
//
// The lines stand in docs/conformance/*.yaml, a [Chapter] a file. The tests are found by name in the whole
// repository: a test whose name ends in numbers, such as TestUnionOfPorts_N26_N27, holds those lines. A line
// without a test, and without a reason for that, is an error; so is a test of a line that nobody wrote.
package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Chapter is one text whose lines are kept.
type Chapter struct {
	Title string `json:"title"`
	// About tells readers what the text is, in Markdown.
	About string `json:"about"`
	// Letter begins the number of each of its lines.
	Letter string `json:"letter"`
	Lines  []Line `json:"lines"`
}

// Line is one thing that is promised, in words of our own.
type Line struct {
	// ID is the chapter's letter and a number.
	ID    string `json:"id"`
	About string `json:"about"`
	// Kind is how binding the line is, or where it comes from.
	Kind string `json:"kind,omitempty"`
	// Switch says by which setting the line holds, where settings lead to different behaviour.
	Switch string `json:"switch,omitempty"`
	// Tests names tests that hold the line although their names do not say so.
	Tests []string `json:"tests,omitempty"`
	// See names lines that say the same and have the tests; they see no others themselves.
	See []string `json:"see,omitempty"`
	// Waits names the part of Isthmus that the line, or the rest of it, waits for; Why says what is left.
	Waits string `json:"waits,omitempty"`
	// Outside says why the line is nothing for us to do.
	Outside string `json:"outside,omitempty"`
	// Missing says which test is still to be written.
	Missing string `json:"missing,omitempty"`
	Why     string `json:"why,omitempty"`

	found []test  // that hold the line
	refs  []*Line // of See
}

// parts are what a line may wait for.
var parts = []string{"dns", "dataplane"}

// Page returns docs/conformance.md for the repository at root. Its error joins everything that is wrong
// with the lines and with the names of tests.
func Page(root string) ([]byte, error) {
	chapters, err := load(filepath.Join(root, "docs/conformance"))
	if err != nil {
		return nil, err
	}
	tests, err := findTests(root)
	if err != nil {
		return nil, err
	}
	if err := link(chapters, tests); err != nil {
		return nil, err
	}
	return page(chapters), nil
}

// load reads all chapters in dir, in the order of their files' names.
func load(dir string) ([]Chapter, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(paths) == 0 {
		return nil, fmt.Errorf("no chapter in %s (%w)", dir, errors.Join(err, os.ErrNotExist))
	}
	var chapters []Chapter
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		var c Chapter
		if err := yaml.UnmarshalStrict(text, &c); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		chapters = append(chapters, c)
	}
	return chapters, nil
}

// link gives every line its tests and reports all faults.
func link(chapters []Chapter, tests []test) error {
	var errs []error
	lines := map[string]*Line{}
	for i := range chapters {
		c := &chapters[i]
		last := 0
		for j := range c.Lines {
			l := &c.Lines[j]
			n, err := strconv.Atoi(strings.TrimPrefix(l.ID, c.Letter))
			switch {
			case err != nil || !strings.HasPrefix(l.ID, c.Letter):
				errs = append(errs, fmt.Errorf("line %q of %q: its number must be %s and digits", l.ID, c.Title, c.Letter))
			case n <= last:
				errs = append(errs, fmt.Errorf("line %s: its number must be larger than the one before", l.ID))
			}
			if lines[l.ID] != nil {
				errs = append(errs, fmt.Errorf("line %s is there twice", l.ID))
			}
			last = n
			lines[l.ID] = l
		}
	}
	byName := map[string][]test{}
	for _, t := range tests {
		byName[t.name] = append(byName[t.name], t)
		for _, id := range t.holds {
			l, ok := lines[id]
			if !ok {
				errs = append(errs, fmt.Errorf("%s: %s names line %s, which there is not", t.file, t.name, id))
				continue
			}
			l.found = append(l.found, t)
		}
	}
	for _, c := range chapters {
		for i := range c.Lines {
			l := &c.Lines[i]
			for _, name := range l.Tests {
				if len(byName[name]) == 0 {
					errs = append(errs, fmt.Errorf("line %s: no test is called %s", l.ID, name))
				}
				l.found = append(l.found, byName[name]...)
			}
			slices.SortFunc(l.found, test.compare)
			errs = append(errs, l.check(lines)...)
		}
	}
	return errors.Join(errs...)
}

// check reports what is wrong with a line whose tests are known, and finds the lines it refers to.
func (l *Line) check(lines map[string]*Line) []error {
	var errs []error
	fault := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("line %s: "+format, append([]any{l.ID}, args...)...))
	}
	if l.About == "" {
		fault("about is empty")
	}
	for _, id := range l.See {
		ref, ok := lines[id]
		if !ok {
			fault("it refers to line %s, which there is not", id)
			continue
		}
		if len(ref.See) > 0 {
			fault("it refers to line %s, which refers to others", id)
		}
		l.refs = append(l.refs, ref)
	}
	if l.Waits != "" && !slices.Contains(parts, l.Waits) {
		fault("it waits for %q, which is none of %v", l.Waits, parts)
	}
	if (l.Waits != "") != (l.Why != "") {
		fault("waits and why belong together")
	}
	held := len(l.found) > 0 || len(l.See) > 0
	switch {
	case l.Outside != "" && (held || l.Waits != "" || l.Missing != ""):
		fault("it is outside, and yet it has tests, waits or is missing")
	case l.Missing != "" && len(l.found) > 0:
		fault("it has tests now (%s); take missing out", l.found[0].name)
	case !held && l.Waits == "" && l.Outside == "" && l.Missing == "":
		fault("no test holds it; write one whose name ends in _%s", l.ID)
	}
	return errs
}

// state is how far a line is held.
type state int

// The columns of the summary.
const (
	tested state = iota
	partly       // tested, and the rest waits
	waiting
	outside
	missing
	states
)

// state returns how far l is held. Where it refers to others, the least of what they and its own tests are.
func (l *Line) state() state {
	switch {
	case l.Missing != "":
		return missing
	case l.Outside != "":
		return outside
	case l.Waits != "" && len(l.found)+len(l.refs) == 0:
		return waiting
	}
	seen := map[state]bool{tested: len(l.found) > 0, waiting: l.Waits != ""}
	for _, ref := range l.refs {
		seen[ref.state()] = true
	}
	delete(seen, outside) // what is left is what there is to hold
	switch {
	case seen[missing]:
		return missing
	case seen[partly], seen[waiting] && seen[tested]:
		return partly
	case seen[waiting]:
		return waiting
	case seen[tested]:
		return tested
	}
	return outside
}
