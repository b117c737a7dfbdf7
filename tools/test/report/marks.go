package report

import (
	"fmt"
	"strings"

	lines "github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/generate/conformance"
)

// reached names a line that a test or one of its subtests reported by conformance.Holds or conformance.LeaveOut.
type reached struct{ pkg, test, line string }

// Expect tells the report which lines of docs/conformance.md each test names. A test that passes without reaching one of
// its calls of conformance.Holds, and does not leave them out, is then among Unreached.
func (r *Report) Expect(marks []conformance.Mark) {
	for _, m := range marks {
		r.marks[m.Package] = append(r.marks[m.Package], m)
	}
}

// reach records a line that a test shows or leaves out.
func (r *Report) reach(e event) {
	if e.Key == lines.Attribute || e.Key == lines.AttributeLeftOut {
		test, _, _ := strings.Cut(e.Test, "/")
		r.reached[reached{e.Package, test, e.Value}] = true
	}
}

// checkMarks records the marks that passed tests of a package did not reach. A test that skipped a part is not checked.
func (r *Report) checkMarks(pkg string) {
	told := map[reached]bool{}
	for _, m := range r.marks[pkg] {
		k, mark := key{pkg, m.Test}, reached{pkg, m.Test, m.Line}
		if r.results[k] != "pass" || r.below(k, "skip") || r.reached[mark] || told[mark] {
			continue
		}
		told[mark] = true
		r.Unreached = append(r.Unreached, fmt.Sprintf("%s %s passed and did not reach conformance.Holds(t, %q)", short(pkg), m.Test, m.Line))
	}
}
