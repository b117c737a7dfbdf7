package main

import "testing"

func TestIsHeavy(t *testing.T) {
	for pkg, want := range map[string]bool{
		module + "e2e":             true, // the promise itself brings up a lab
		module + "e2e/lab/cluster": true,
		module + "e2etools":        false,
		module + "dns":             false,
	} {
		if got := isHeavy(pkg); got != want {
			t.Errorf("isHeavy(%q) is %v", pkg, got)
		}
	}
}
