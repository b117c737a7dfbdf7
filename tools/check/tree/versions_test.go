package tree

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"
)

// What other modules of the tree need too is of our versions there: else a new machine compiles all of client-go once for each.
// Kubernetes itself has the versions of its release, and the linters have theirs.
func TestModulesShareVersions(t *testing.T) {
	t.Parallel()
	ours := versions(t, root)
	for _, dir := range []string{"tools/lab/components/coredns", "tools/lab/components/etcd", "tools/helm"} {
		theirs := versions(t, filepath.Join(root, dir))
		shared := 0
		for path, version := range theirs {
			want, ok := ours[path]
			if !ok {
				continue
			}
			shared++
			if version != want {
				t.Errorf("%s/go.mod needs %s %s, go.mod %s: go get the newer one where the older one is, and go mod tidy", dir, path, version, want)
			}
		}
		if shared == 0 {
			t.Errorf("%s/go.mod shares nothing with go.mod", dir)
		}
	}
}

// versions returns what a module requires.
func versions(t *testing.T, dir string) map[string]string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json")
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("read %s/go.mod: %v", dir, err)
	}
	var mod struct {
		Require []struct{ Path, Version string }
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, r := range mod.Require {
		all[r.Path] = r.Version
	}
	return all
}
