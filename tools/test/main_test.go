package main

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
)

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
