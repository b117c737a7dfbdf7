package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCompare(t *testing.T) {
	t.Parallel()
	have := map[string][]byte{"same": []byte("1"), "old": []byte("1"), "gone": []byte("1")}
	want := map[string][]byte{"same": []byte("1"), "old": []byte("2"), "new": []byte("1")}
	if diff := cmp.Diff([]string{"gone is no longer generated", "new is missing", "old is stale"}, compare(have, want)); diff != "" {
		t.Errorf("faults (-want +have):\n%s", diff)
	}
}

func TestCopyTree(t *testing.T) {
	t.Parallel()
	from, to := t.TempDir(), t.TempDir()
	for _, name := range []string{"a", "dir/b", "bin/program", ".git/HEAD"} {
		path := filepath.Join(from, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := copyTree(from, to); err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, name := range []string{"a", "dir/b", "bin/program", ".git/HEAD"} {
		if content, err := os.ReadFile(filepath.Join(to, name)); err == nil && string(content) == name {
			have = append(have, name)
		}
	}
	if diff := cmp.Diff([]string{"a", "dir/b"}, have); diff != "" {
		t.Errorf("copied (-want +have):\n%s", diff)
	}
}
