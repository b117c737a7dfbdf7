package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
)

// The large lab is the last phase, alone, and patient packages are the one before it. Long packages come first in theirs, and all
// packages with a place of their own exist.
func TestPhases(t *testing.T) {
	all, err := withTests(t.Context(), []string{module + "..."})
	if err != nil {
		t.Fatal(err)
	}
	busy, waiting, lab := phases(all)
	if !slices.Equal(waiting, patient) || !slices.Equal(lab, []string{onLab}) {
		t.Errorf("the last phases are %v and %v, want %v and %s", waiting, lab, patient, onLab)
	}
	if !slices.Equal(busy[:len(long)], long) || !slices.Contains(busy, module+"dns") || !slices.Contains(busy, module+"tools/lab/topology") {
		t.Errorf("the first phase is %v, want first %v", busy, long)
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
