package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/compile"
)

// programs builds isthmusctl for each platform, as a program and as an archive with the licence.
func (r *release) programs(ctx context.Context) error {
	licence, err := os.ReadFile(filepath.Join(r.root, "LICENSE"))
	if err != nil {
		return err
	}
	for _, platform := range r.platforms {
		system, architecture, _ := strings.Cut(platform, "/")
		name, suffix := nameOf(platform), ""
		if system == "windows" {
			suffix = ".exe"
		}
		build := compile.Go(ctx, "build", r.stamp.LinkerFlags(), "-o", r.path(name+suffix), "github.com/isthmus-net/isthmus/cmd/isthmusctl")
		build.Dir = r.root
		build.Env = append(build.Env, "GOOS="+system, "GOARCH="+architecture)
		if output, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", name, err, output)
		}
		program, err := os.ReadFile(r.path(name + suffix))
		if err != nil {
			return err
		}
		pack := tarball
		if system == "windows" {
			pack = zipFile
		}
		archive, err := pack(r.stamp.Date, []file{{"isthmusctl" + suffix, 0o755, program}, {"LICENSE", 0o644, licence}})
		if err != nil {
			return err
		}
		if err := os.WriteFile(r.path(archiveOf(platform)), archive, 0o644); err != nil {
			return err
		}
		if err := r.describe(name, r.path(name+suffix), nil); err != nil {
			return err
		}
	}
	return nil
}

// nameOf returns the name of isthmusctl for a platform, without the suffix of an executable.
func nameOf(platform string) string { return "isthmusctl-" + strings.ReplaceAll(platform, "/", "-") }

// archiveOf returns the name of the archive with isthmusctl for a platform.
func archiveOf(platform string) string {
	if strings.HasPrefix(platform, "windows/") {
		return nameOf(platform) + ".zip"
	}
	return nameOf(platform) + ".tar.gz"
}

// file is one file of an archive.
type file struct {
	name    string
	mode    int64
	content []byte
}

// tarball returns a compressed tar.
func tarball(date time.Time, files []file) ([]byte, error) {
	var out bytes.Buffer
	compressed := gzip.NewWriter(&out)
	w := tar.NewWriter(compressed)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.content)), ModTime: date, Format: tar.FormatUSTAR,
		}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := errors.Join(w.Close(), compressed.Close())
	return out.Bytes(), err
}

// zipFile returns a zip file.
func zipFile(date time.Time, files []file) ([]byte, error) {
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, f := range files {
		into, err := w.CreateHeader(&zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: date})
		if err != nil {
			return nil, err
		}
		if _, err := into.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}
