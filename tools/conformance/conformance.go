// Package conformance lets a test name the lines of docs/conformance.md that it shows:
//
//	if have := imported.Spec.Ports; !slices.Equal(have, want) {
//		t.Errorf("ports: %v, want %v", have, want)
//	}
//	conformance.Holds(t, "N26", "N27")
//
// The generator of that page (tools/generate/conformance) finds the calls in the source. `make test` proves that each
// test which passed also reached its calls.
package conformance

import "testing"

// Attribute is the key under which `go test -json` reports each line that a test shows.
const Attribute = "conformance"

// Holds records that the assertion beside the call shows these lines of docs/conformance.md.
//
// The generator reads the source and does not run it. So the call stands inside the test function, not in a function
// that the test calls, and the lines are string literals.
func Holds(t testing.TB, lines ...string) {
	t.Helper()
	for _, line := range lines {
		t.Attr(Attribute, line)
	}
}
