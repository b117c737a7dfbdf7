// Package conformance writes docs/conformance.md: for every line that Isthmus promises, the tests that show it, or the
// reason why none does.
//
// The lines stand in docs/conformance/*.yaml, one [Chapter] a file. Tests name them by calls of conformance.Holds (package
// tools/conformance), which [Marks] reads from the source. A line without a test needs a reason. A mark for a line that
// does not exist is an error.
package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Chapter is one text that Isthmus follows, line by line.
type Chapter struct {
	Title string `json:"title"`
	// About introduces the text to readers, in Markdown.
	About string `json:"about"`
	// Letter begins the ID of each line.
	Letter string `json:"letter"`
	Lines  []Line `json:"lines"`
}

// Line is one promise, in our own words.
type Line struct {
	// ID is the chapter's letter and a number.
	ID    string `json:"id"`
	About string `json:"about"`
	// Kind says how binding the line is, or its source.
	Kind string `json:"kind,omitempty"`
	// Switch names the setting under which the line holds, where settings change the behaviour.
	Switch string `json:"switch,omitempty"`
	// See names lines that say the same and have the tests. Those lines refer to no others.
	See []string `json:"see,omitempty"`
	// Outside says why the line asks nothing of Isthmus.
	Outside string `json:"outside,omitempty"`
	// Missing describes the test that remains to be written.
	Missing string `json:"missing,omitempty"`

	marks []Mark  // of the tests that show the line
	refs  []*Line // the lines of See
}

// Page returns docs/conformance.md for the repository at root. Its error joins all faults of the lines and of the marks.
func Page(root string) ([]byte, error) {
	chapters, err := load(filepath.Join(root, "docs/conformance"))
	if err != nil {
		return nil, err
	}
	marks, err := Marks(root)
	if err != nil {
		return nil, err
	}
	if err := link(chapters, marks); err != nil {
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

// link gives every line its marks and reports all faults.
func link(chapters []Chapter, marks []Mark) error {
	lines, err := index(chapters)
	errs := []error{err}
	for _, m := range marks {
		l, ok := lines[m.Line]
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %s names line %s, which does not exist", m.file, m.name(), m.Line))
			continue
		}
		l.marks = append(l.marks, m)
	}
	for _, c := range chapters {
		for i := range c.Lines {
			l := &c.Lines[i]
			slices.SortFunc(l.marks, compareMarks)
			l.marks = slices.Compact(l.marks)
			errs = append(errs, l.check(lines)...)
		}
	}
	return errors.Join(errs...)
}

// compareMarks orders marks of one line by file and test.
func compareMarks(a, b Mark) int {
	return cmp.Or(strings.Compare(a.file, b.file), strings.Compare(a.name(), b.name()))
}

// index returns all lines by ID, and reports IDs that do not rise within their chapter or that occur twice.
func index(chapters []Chapter) (map[string]*Line, error) {
	var errs []error
	lines := map[string]*Line{}
	for _, c := range chapters {
		last := 0
		for i := range c.Lines {
			l := &c.Lines[i]
			n, err := strconv.Atoi(strings.TrimPrefix(l.ID, c.Letter))
			switch {
			case err != nil || !strings.HasPrefix(l.ID, c.Letter):
				errs = append(errs, fmt.Errorf("line %q of %q: its ID must be %s and digits", l.ID, c.Title, c.Letter))
			case n <= last:
				errs = append(errs, fmt.Errorf("line %s: its number must be larger than that of the line before", l.ID))
			}
			if lines[l.ID] != nil {
				errs = append(errs, fmt.Errorf("line %s occurs twice", l.ID))
			}
			last = n
			lines[l.ID] = l
		}
	}
	return lines, errors.Join(errs...)
}

// check reports the faults of a line that has its marks, and finds the lines it refers to.
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
			fault("it refers to line %s, which does not exist", id)
			continue
		}
		if len(ref.See) > 0 {
			fault("it refers to line %s, which refers to others", id)
		}
		l.refs = append(l.refs, ref)
	}
	shown := len(l.marks) > 0 || len(l.See) > 0
	switch {
	case l.Outside != "" && (shown || l.Missing != ""):
		fault("it is outside, yet it has tests or is missing")
	case l.Missing != "" && len(l.marks) > 0:
		fault("%s shows it; remove missing", l.marks[0].name())
	case !shown && l.Outside == "" && l.Missing == "":
		fault(`no test shows it; write one that calls conformance.Holds(t, %q)`, l.ID)
	}
	return errs
}

// state is how far tests show a line.
type state int

// The columns of the summary.
const (
	tested state = iota
	outside
	missing
	states
)

// state returns the state of l. A line that refers to others is missing where one of them is, and outside where all are.
func (l *Line) state() state {
	if l.Missing != "" {
		return missing
	}
	if l.Outside != "" {
		return outside
	}
	least := outside
	if len(l.marks) > 0 {
		least = tested
	}
	for _, ref := range l.refs {
		switch ref.state() {
		case missing:
			return missing
		case tested:
			least = tested
		case outside, states:
		}
	}
	return least
}
