package main

import (
	"os"
	"path/filepath"
	"testing"
)

// A serving gateway leaves a mark for its successor. A mark of another boot does not count.
func TestMark(t *testing.T) {
	m := mark(filepath.Join(t.TempDir(), "serving"))
	check := func(want bool, when string) {
		t.Helper()
		if have, err := m.isSet(); err != nil || have != want {
			t.Errorf("%s: %t, %v, want %t", when, have, err, want)
		}
	}
	check(false, "before")
	if err := m.set(); err != nil {
		t.Fatal(err)
	}
	check(true, "after a predecessor")
	for _, other := range []string{"", "6f1c6d1e-0d2c-4c0e-9d4b-1f6f3a3f9a55\n"} {
		if err := os.WriteFile(string(m), []byte(other), 0o600); err != nil {
			t.Fatal(err)
		}
		check(false, "after another boot")
	}
}
