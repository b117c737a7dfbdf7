package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
)

// Labs are apart from all other packages; long packages come first, and all packages with a place of their own exist.
func TestSplit(t *testing.T) {
	all, err := withTests(t.Context(), []string{module + "..."})
	if err != nil {
		t.Fatal(err)
	}
	onLabs, others := split(all)
	if !slices.Equal(onLabs, labs) {
		t.Errorf("on labs are %v, want %v", onLabs, labs)
	}
	if !slices.Equal(others[:len(long)], long) || !slices.Contains(others, module+"dns") || !slices.Contains(others, module+"tools/lab/topology") {
		t.Errorf("beside labs are %v, want first %v", others, long)
	}
	if n := len(onLabs) + len(others); n != len(all) {
		t.Errorf("%d of %d packages have a place", n, len(all))
	}
}

// One run at a time has the machine.
func TestHaveMachine(t *testing.T) {
	lock := filepath.Join(t.TempDir(), "lock")
	release, err := haveMachine(t.Context(), lock)
	if err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := haveMachine(gone, lock); !errors.Is(err, context.Canceled) {
		t.Errorf("a second run has the machine too: %v", err)
	}
	had := make(chan error, 1)
	go func() {
		release, err := haveMachine(t.Context(), lock)
		if err == nil {
			err = release()
		}
		had <- err
	}()
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if err := <-had; err != nil {
		t.Errorf("the run that waited: %v", err)
	}
}
