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

// AttributeLeftOut is the key under which `go test -json` reports each line that a test leaves out.
const AttributeLeftOut = "conformance-left-out"

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

// LeaveOut records that this run of a test does not show these lines, because it was not asked to. The test then passes
// without its calls of Holds for them. For example, TestSecurityGroupsHold needs OVN, which only its own make target installs.
func LeaveOut(t testing.TB, lines ...string) {
	t.Helper()
	for _, line := range lines {
		t.Attr(AttributeLeftOut, line)
	}
}
