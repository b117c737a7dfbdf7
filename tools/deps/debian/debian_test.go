package debian

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/await"
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

// fakeTools makes apt-get and dpkg two scripts, which run in a new folder that they find in $DIR.
func fakeTools(t *testing.T, aptGet, dpkg string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, script := range map[string]string{"apt-get": aptGet, "dpkg": dpkg} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("DIR", dir)
	return dir
}

// An installation that was killed is completed before the next one.
func TestHalfDoneInstallation(t *testing.T) {
	dir := fakeTools(t,
		`test -e $DIR/configured && exit; echo "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem."; exit 100`,
		`echo "$@" > $DIR/configured`)
	if err := AptGet(t.Context(), "install", "x"); err != nil {
		t.Fatal(err)
	}
	if asked, err := os.ReadFile(filepath.Join(dir, "configured")); err != nil || string(asked) != "--configure -a\n" {
		t.Errorf("dpkg ran with %q (%v)", asked, err)
	}
}

// The end of a context interrupts apt-get, which completes an installation, and does not kill it.
func TestInterruptedInstallation(t *testing.T) {
	dir := fakeTools(t, `
trap 'interrupted=1' INT
touch $DIR/begun
while kill -0 $PPID && ! test "$interrupted"; do sleep .05; done
touch $DIR/installed`, "")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error)
	go func() { done <- AptGet(ctx, "install", "x") }()
	await.True(t, "apt-get begins", func() bool { return exists(dir, "begun") })
	cancel()
	if err := <-done; err == nil {
		t.Error("no error tells that the context has ended")
	}
	if !exists(dir, "installed") {
		t.Error("the installation was killed")
	}
}

func exists(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}
