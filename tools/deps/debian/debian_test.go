package debian

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMissing(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("dpkg-query"); err != nil {
		netlab.Skip(t, "not a Debian machine")
	}
	have, err := Missing(t.Context(), "no-such-package-b", "dpkg", "no-such-package-a", "no-such-package-a")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"no-such-package-a", "no-such-package-b"}, have); diff != "" {
		t.Errorf("missing (-want +have):\n%s", diff)
	}
}

// Packages of another architecture are found and downloaded, on a machine that has only packages of its own.
func TestOtherArchitecture(t *testing.T) {
	netlab.Privileged(t) // apt's sandbox
	other := "arm64"
	if runtime.GOARCH == other {
		other = "amd64"
	}
	archive, err := Open(t.Context(), t.TempDir(), other)
	if err != nil {
		t.Fatal(err)
	}
	named, err := archive.Search(t.Context(), "^linux-image-6\\.1\\.[0-9-]+-cloud-(amd64|arm64)$")
	if err != nil {
		t.Fatal(err)
	}
	if len(named) == 0 || slices.ContainsFunc(named, func(name string) bool { return !strings.HasSuffix(name, other) }) {
		t.Errorf("kernels %q, want those for %s", named, other)
	}
	dir := t.TempDir()
	if err := archive.Download(t.Context(), dir, "zlib1g"); err != nil {
		t.Fatal(err)
	}
	if debs, err := filepath.Glob(filepath.Join(dir, "zlib1g_*_"+other+".deb")); len(debs) != 1 {
		t.Errorf("downloaded %q (%v), want one package for %s", debs, err, other)
	}
}
