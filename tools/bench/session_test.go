package main

import (
	"os"
	"path/filepath"
	"testing"
)

// The session gets the highest priority if the kernel groups sessions, and its former one afterwards.
func TestPrioritize(t *testing.T) {
	for name, tt := range map[string]struct {
		content, during, after string
		fails                  bool
	}{
		"groups":     {content: "/autogroup-15884 nice 3\n", during: "-20", after: "3"},
		"no groups":  {},
		"unreadable": {content: "nobody\n", during: "nobody\n", after: "nobody\n", fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "autogroup")
			if err := os.WriteFile(file, []byte(tt.content), 0o644); err != nil {
				t.Fatal(err)
			}
			undo, err := prioritize(file)
			if (err != nil) != tt.fails {
				t.Fatalf("error %v, want one: %v", err, tt.fails)
			}
			checkContent(t, file, tt.during)
			if err := undo(); err != nil {
				t.Fatal(err)
			}
			checkContent(t, file, tt.after)
		})
	}
	if undo, err := prioritize(filepath.Join(t.TempDir(), "none")); err != nil || undo() != nil {
		t.Errorf("a kernel that does not group sessions: %v", err)
	}
}

func checkContent(t *testing.T, file, want string) {
	t.Helper()
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Errorf("content %q, want %q", have, want)
	}
}
