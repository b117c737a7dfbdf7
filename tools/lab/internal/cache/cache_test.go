package cache

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/images/oci"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestKeySeesEveryInput(t *testing.T) {
	dir := t.TempDir()
	module := filepath.Join(dir, "module")
	write(t, filepath.Join(module, "go.mod"), "module x")
	write(t, filepath.Join(module, "sub/main.go"), "package main")
	key := func(texts ...string) string {
		k, err := Key(texts, module)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	base := key("go1.26", "-s")
	if again := key("go1.26", "-s"); again != base {
		t.Errorf("same inputs, keys %s and %s", base, again)
	}
	seen := map[string]string{base: "base"}
	for name, change := range map[string]func() string{
		"other flags":     func() string { return key("go1.26", "-w") },
		"moved text":      func() string { return key("go1.26-", "s") },
		"changed file":    func() string { write(t, filepath.Join(module, "go.mod"), "module y"); return key("go1.26", "-s") },
		"file below":      func() string { write(t, filepath.Join(module, "sub/main.go"), "package m"); return key("go1.26", "-s") },
		"additional file": func() string { write(t, filepath.Join(module, "x.go"), ""); return key("go1.26", "-s") },
	} {
		k := change()
		if other, clash := seen[k]; clash {
			t.Errorf("%s has the key of %s", name, other)
		}
		seen[k] = name
	}
	if _, err := Key(nil, filepath.Join(dir, "absent")); err == nil {
		t.Error("a missing input has a key")
	}
}

func TestEntryIsBuiltOnceAndWhole(t *testing.T) {
	c := Cache{Dir: t.TempDir()}
	builds := 0
	build := func(path string) error {
		builds++
		return os.WriteFile(path, []byte("x"), 0o644)
	}
	broken := errors.New("broken")
	half := func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o644), broken) }
	if _, err := c.entry("thing", "1", half); !errors.Is(err, broken) {
		t.Fatalf("have %v, want %v", err, broken)
	}
	old := filepath.Join(c.Dir, "thing-old")
	write(t, old, "")
	long := time.Now().Add(-2 * keepUnused)
	if err := os.Chtimes(old, long, long); err != nil {
		t.Fatal(err)
	}
	var first string
	for range 2 {
		path, err := c.entry("thing", "1", build)
		if err != nil {
			t.Fatal(err)
		}
		first = path
	}
	if builds != 1 {
		t.Errorf("built %d times, want once", builds)
	}
	left, err := filepath.Glob(filepath.Join(c.Dir, "*"))
	if diff := cmp.Diff([]string{first}, left); diff != "" || err != nil {
		t.Errorf("entries (-want +have): %v\n%s", err, diff)
	}
}

// With Cache.Kubernetes, the cache uses a release's programs if all of them exist and have the lab's minor version. It uses
// other programs of the folder that it finds, and builds the rest.
func TestGivenKubernetes(t *testing.T) {
	part := components()[0]
	folder := func(version string, programs ...string) string {
		dir := t.TempDir()
		for _, p := range programs {
			write(t, filepath.Join(dir, p), "#!/bin/sh\necho "+p+" "+version+"\n")
			if err := os.Chmod(filepath.Join(dir, p), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	for name, test := range map[string]struct {
		folder string
		want   string // part of the error
	}{
		"a release":     {folder("v1.37.99", part.programs...), ""},
		"another minor": {folder("v1.36.3", part.programs...), "want a v1.37.x"},
		"one missing":   {folder("v1.37.1", part.programs[1:]...), "no such file"},
	} {
		c := Cache{Dir: t.TempDir(), Kubernetes: test.folder, Report: t.Logf}
		dir, err := c.given(t.Context(), part, "")
		if test.want != "" {
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), KubernetesVariable) {
				t.Errorf("%s: %v, want %s and %q", name, err, KubernetesVariable, test.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, p := range part.programs {
			if said, err := exec.CommandContext(t.Context(), filepath.Join(dir, p)).Output(); string(said) != p+" v1.37.99\n" {
				t.Errorf("%s: %s says %q, %v", name, p, said, err)
			}
		}
	}
	c := Cache{Dir: t.TempDir(), Kubernetes: folder("3.6", "etcd"), Report: t.Logf}
	for _, part := range components()[1:] {
		if given := c.gives(part); given != (part.name == "etcd") {
			t.Errorf("of a folder with etcd alone, %s is taken: %t", part.name, given)
		} else if given {
			if _, err := c.given(t.Context(), part, ""); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestSourceDir(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module github.com/isthmus-net/isthmus\n\ngo 1.26.0\n")
	write(t, filepath.Join(dir, "tools/lab/components/x/go.mod"), "module github.com/isthmus-net/isthmus/tools/lab/components/x\n")
	have, err := SourceDir(filepath.Join(dir, "tools/lab/components/x"))
	if have != dir || err != nil {
		t.Errorf("have %q, %v, want %q", have, err, dir)
	}
	if _, err := SourceDir(t.TempDir()); err == nil {
		t.Error("found a checkout where there is none")
	}
}

func TestReadBuild(t *testing.T) {
	var compiled atomic.Int64
	rest := readBuild(strings.NewReader("fmt\nk8s.io/api/core/v1\n# broken\n./x.go:1: syntax error here\n"), &compiled)
	if compiled.Load() != 2 || rest != "# broken\n./x.go:1: syntax error here\n" {
		t.Errorf("have %d packages and %q", compiled.Load(), rest)
	}
}

// Packages from before and after the /usr merge are unpacked into one tree.
func TestCopyFiles(t *testing.T) {
	var deb bytes.Buffer
	w := tar.NewWriter(&deb)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./bin/nc.openbsd", Typeflag: tar.TypeReg, Mode: 0o755},
		{Name: "./bin/hard", Typeflag: tar.TypeLink, Linkname: "./bin/nc.openbsd", Mode: 0o755},
		{Name: "./usr/share/doc/x/alias", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "./usr/bin/alias", Typeflag: tar.TypeLink, Linkname: "./usr/share/doc/x/alias", Mode: 0o755},
		{Name: "./lib64/ld.so", Typeflag: tar.TypeSymlink, Linkname: "/lib/x/ld.so", Mode: 0o777},
		{Name: "./usr/share/doc/x/copyright", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "./usr/bin/nc.openbsd", Typeflag: tar.TypeReg, Mode: 0o700},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "x.tar")
	err := oci.Write(archive, oci.Spec{Names: []string{"x"}}, func(l *oci.Layer) error {
		if err := copyFiles(tar.NewReader(&deb), l); err != nil {
			return err
		}
		for path, want := range map[string]bool{
			"/usr/bin/nc.openbsd": true, "/usr/bin/hard": true, "/usr/lib64/ld.so": true,
			"/bin": false, "/bin/nc.openbsd": false, "/usr/share/doc/x/copyright": false, "/usr/bin/alias": false,
		} {
			if have := l.Has(path); have != want {
				t.Errorf("%s is in the image: %v, want %v", path, have, want)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestRoomFor(t *testing.T) {
	for fs, all := range map[string]map[uint64]bool{
		t.TempDir():  {1 << 60: false},
		memory:       {1 << 60: false},
		"/proc":      {1: false},
		"/nonesuch/": {1: false},
	} {
		for bytes, want := range all {
			if roomFor(fs, bytes) != want {
				t.Errorf("room for %d bytes in %s: want %t", bytes, fs, want)
			}
		}
	}
}

// Two caches have two folders. One of a build that was killed is empty again.
func TestScratch(t *testing.T) {
	parent := t.TempDir()
	one, ok := Cache{Dir: "/one"}.scratchIn(parent)
	if !ok {
		t.Fatal("there is no folder")
	}
	write(t, filepath.Join(one, "left"), "")
	two, ok := Cache{Dir: "/two"}.scratchIn(parent)
	if _, err := os.Stat(filepath.Join(one, "left")); !ok || one == two || err != nil {
		t.Errorf("%s and %s, %t, %v", one, two, ok, err)
	}
	again, ok := Cache{Dir: "/one"}.scratchIn(parent)
	if left, err := os.ReadDir(again); !ok || again != one || err != nil || len(left) > 0 {
		t.Errorf("%s after %s, %t, has %v, %v", again, one, ok, left, err)
	}
}
