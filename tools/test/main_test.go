package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
)

// Packages on labs are apart, long packages come first among the others, and all packages with a place of their own exist.
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
		t.Errorf("the others are %v, want first %v", others, long)
	}
	if len(others)+len(labs) != len(all) {
		t.Errorf("%d of %d packages have a place", len(others)+len(labs), len(all))
	}
}

// Packages that need neither privileges nor an API server are told from the others.
func TestByNeed(t *testing.T) {
	packages := []string{module + "dns/internal/zone", module + "controlplane/broker", module + "bpf", module + "gateway/desired"}
	units, others, err := byNeed(t.Context(), packages)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(units)
	slices.Sort(others)
	wantUnits, wantOthers := []string{packages[0], packages[3]}, []string{packages[2], packages[1]}
	if !slices.Equal(units, wantUnits) || !slices.Equal(others, wantOthers) {
		t.Errorf("got %v and %v, want %v and %v", units, others, wantUnits, wantOthers)
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
