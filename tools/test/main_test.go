package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
)

// Packages that bring up labs are told apart, of the others long ones come first, and those that have a place of their
// own are there.
func TestSplit(t *testing.T) {
	light, alone, err := split(t.Context(), []string{module + "tools/...", module + "dns", module + "controlplane/broker", module + "e2e/..."})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(alone, heavy) {
		t.Errorf("%v bring up labs, want %v", alone, heavy)
	}
	if light[0] != long[0] || slices.Index(light, module+"dns") < slices.Index(light, module+"tools/kernels") || !slices.Contains(light, module+"tools/lab/topology") {
		t.Errorf("the others come in the order %v", light)
	}
	have, _, err := split(t.Context(), []string{"github.com/isthmus-net/isthmus/..."})
	if err != nil {
		t.Fatal(err)
	}
	for _, pkg := range long {
		if !slices.Contains(have, pkg) {
			t.Errorf("there is no package %s that brings up no lab", pkg)
		}
	}
}

// Whoever has the machine has it until it is given back.
func TestHaveMachine(t *testing.T) {
	lock := filepath.Join(t.TempDir(), "lock")
	release, err := haveMachine(t.Context(), lock)
	if err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := haveMachine(gone, lock); !errors.Is(err, context.Canceled) {
		t.Errorf("a second run has it, too: %v", err)
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
		t.Errorf("who waited: %v", err)
	}
}
