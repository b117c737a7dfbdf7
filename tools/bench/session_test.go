package main

import (
	"os"
	"path/filepath"
	"testing"
)

// A session is put before others where the kernel groups sessions, and then put back.
func TestPutFirst(t *testing.T) {
	for name, tt := range map[string]struct {
		said, during, after string
		fails               bool
	}{
		"groups":     {said: "/autogroup-15884 nice 3\n", during: "-20", after: "3"},
		"no groups":  {},
		"unreadable": {said: "nobody\n", during: "nobody\n", after: "nobody\n", fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "autogroup")
			if err := os.WriteFile(file, []byte(tt.said), 0o644); err != nil {
				t.Fatal(err)
			}
			undo, err := putFirst(file)
			if (err != nil) != tt.fails {
				t.Fatalf("error %v, want one: %v", err, tt.fails)
			}
			says(t, file, tt.during)
			if err := undo(); err != nil {
				t.Fatal(err)
			}
			says(t, file, tt.after)
		})
	}
	if undo, err := putFirst(filepath.Join(t.TempDir(), "none")); err != nil || undo() != nil {
		t.Errorf("a kernel without sessions' groups: %v", err)
	}
}

func says(t *testing.T, file, want string) {
	t.Helper()
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Errorf("it says %q, want %q", have, want)
	}
}
