package deb_test

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-net/isthmus/tools/images/deb"
	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// A program runs from its image, which contains no other executable. Its package's copyright file is included.
func TestRunsAlone(t *testing.T) {
	netlab.Privileged(t)
	archive := filepath.Join(t.TempDir(), "image.tar")
	var packages []deb.Package
	if err := oci.Write(archive, oci.Spec{Names: []string{"isthmus/x:dev"}}, func(l *oci.Layer) error {
		var err error
		packages, err = deb.Add(t.Context(), l, "", "/usr/sbin/keepalived", "keepalived")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"keepalived", "libc6", "libssl3"} {
		if !slices.ContainsFunc(packages, func(p deb.Package) bool { return p.Name == name && p.Version != "" && p.Architecture == runtime.GOARCH }) {
			t.Errorf("packages %v, want %s among them", packages, name)
		}
	}
	root := unpack(t, archive)
	run := exec.CommandContext(t.Context(), "/usr/sbin/keepalived", "--version")
	run.SysProcAttr, run.Dir = &syscall.SysProcAttr{Chroot: root}, "/"
	if said, err := run.CombinedOutput(); err != nil || !strings.Contains(string(said), "Keepalived v2.2") {
		t.Errorf("from the image: %v\n%s", err, said)
	}
	var can []string
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if info, infoErr := d.Info(); err == nil && infoErr == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			can = append(can, strings.TrimPrefix(path, root))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if len(can) != 2 || can[1] != "/usr/sbin/keepalived" || !strings.HasPrefix(filepath.Base(can[0]), "ld-linux") {
		t.Errorf("executables in the image: %v", can)
	}
	if _, err := os.Stat(filepath.Join(root, "usr/share/doc/keepalived/copyright")); err != nil {
		t.Error(err)
	}
	if err := oci.Write(archive, oci.Spec{Names: []string{"isthmus/x:dev"}}, func(l *oci.Layer) error {
		_, err := deb.Add(t.Context(), l, "", "/usr/sbin/none-such", "keepalived")
		return err
	}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a program that no package contains: %v", err)
	}
}

// unpack returns a folder with the files of an archive's only layer, which is its largest blob.
func unpack(t *testing.T, archive string) string {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	layer := filepath.Join(t.TempDir(), "layer.tar")
	largest := int64(-1)
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Size <= largest {
			continue
		}
		largest = h.Size
		b, err := io.ReadAll(in)
		if err == nil {
			err = os.WriteFile(layer, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	root := t.TempDir()
	if said, err := exec.CommandContext(t.Context(), "tar", "--extract", "--file", layer, "--directory", root).CombinedOutput(); err != nil {
		t.Fatalf("unpack the layer: %v\n%s", err, said)
	}
	return root
}
