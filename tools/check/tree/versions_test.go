package tree

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"
)

// The tree's other modules require the same versions as go.mod, so that a new machine compiles client-go once. Kubernetes
// keeps the versions of its release, and the linters keep theirs.
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
				t.Errorf("%s/go.mod requires %s %s, go.mod %s: go get the newer version in the module with the older one, and run go mod tidy", dir, path, version, want)
			}
		}
		if shared == 0 {
			t.Errorf("%s/go.mod shares no module with go.mod", dir)
		}
	}
}

// versions returns the versions that a module requires, by path.
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
