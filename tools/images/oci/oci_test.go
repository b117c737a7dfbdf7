package oci_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/images/oci"
)

func TestWriteIsReproducible(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string, touched time.Time) []byte {
		t.Helper()
		program := filepath.Join(dir, name)
		if err := os.WriteFile(program, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(program, touched, touched); err != nil {
			t.Fatal(err)
		}
		archive := program + ".tar"
		spec := oci.Spec{Names: []string{"isthmus/x:dev"}, Entrypoint: []string{"/x"}, Labels: map[string]string{"a": "1", "b": "2"}}
		if err := oci.Write(archive, spec, func(l *oci.Layer) error { return l.File("/opt/x", program, 0o755) }); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(archive)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	first := write("one", "same", time.Unix(1, 0))
	if !bytes.Equal(first, write("two", "same", time.Unix(2, 0))) {
		t.Error("same content, different archives")
	}
	if bytes.Equal(first, write("three", "other", time.Unix(1, 0))) {
		t.Error("other content, same archive")
	}
}

func TestReadReturnsWhatWriteNamed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.tar")
	names := []string{"isthmus/x:dev", "nicolaka/x"}
	if err := oci.Write(file, oci.Spec{Names: names}, func(*oci.Layer) error { return nil }); err != nil {
		t.Fatal(err)
	}
	images, err := oci.Read(file)
	if err != nil {
		t.Fatal(err)
	}
	var have, want []string
	for _, i := range images {
		have = append(have, i.Name)
	}
	for _, n := range names {
		full, err := oci.FullName(n)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, full)
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("names (-want +have):\n%s", diff)
	}
	if images[0].Digest != images[1].Digest || len(images[0].Digest) != len("sha256:")+64 {
		t.Errorf("digests %q and %q, want one sha256 for both", images[0].Digest, images[1].Digest)
	}
}

func TestWriteLeavesNothingWhenItFails(t *testing.T) {
	dir := t.TempDir()
	err := oci.Write(filepath.Join(dir, "x.tar"), oci.Spec{Names: []string{"x"}}, func(l *oci.Layer) error {
		return l.File("/x", filepath.Join(dir, "absent"), 0o755)
	})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("have %v, want not exist", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestFullName(t *testing.T) {
	for name, tc := range map[string]struct {
		in string
		ok bool
	}{
		"short":      {"x", true},
		"with tag":   {"isthmus/agent:dev", true},
		"upper case": {"isthmus/Agent", false},
		"empty":      {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			full, err := oci.FullName(tc.in)
			if (err == nil) != tc.ok {
				t.Fatalf("have %q, %v, want ok=%v", full, err, tc.ok)
			}
			if again, err := oci.FullName(full); tc.ok && (again != full || err != nil) {
				t.Errorf("the full name of %q is %q, %v", full, again, err)
			}
		})
	}
}
