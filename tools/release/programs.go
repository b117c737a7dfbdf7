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

// licence is the licence's file in the repository, and in every archive.
const licence = "LICENSE"

// programs builds isthmusctl for each platform, as a program and as an archive with the licence.
func (r *release) programs(ctx context.Context) error {
	for _, platform := range r.platforms {
		system, architecture, _ := strings.Cut(platform, "/")
		name, suffix := nameOf(platform), ""
		if system == "windows" {
			suffix = ".exe"
		}
		program := r.path(name + suffix)
		build := compile.Go(ctx, "build", r.stamp.LinkerFlags(), "-o", program, "github.com/isthmus-net/isthmus/cmd/isthmusctl")
		build.Dir = r.root
		build.Env = append(build.Env, "GOOS="+system, "GOARCH="+architecture)
		if output, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", name, err, output)
		}
		if err := errors.Join(r.pack(archiveOf(platform), file{"isthmusctl" + suffix, 0o755, program}), r.describe(name, program, nil)); err != nil {
			return err
		}
	}
	return nil
}

// unit is the file of a gateway's systemd unit in the repository.
const unit = "deploy/systemd/isthmus-gateway.service"

// machine writes what a virtual machine needs to be a gateway: the program of the gateway's image, its systemd unit, and the licence.
func (r *release) machine(architecture, program string) error {
	name := "isthmus-gateway-linux-" + architecture
	return errors.Join(
		r.pack(name+".tar.gz", file{"isthmus-gateway", 0o755, program}, file{filepath.Base(unit), 0o644, filepath.Join(r.root, unit)}),
		r.describe(name, program, nil),
	)
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
	name   string
	mode   int64
	source string // path on this machine
}

// pack writes an archive with files and the licence: a zip file or a compressed tar, as its name says.
func (r *release) pack(name string, files ...file) error {
	format := tarball
	if strings.HasSuffix(name, ".zip") {
		format = zipFile
	}
	archive, err := format(r.stamp.Date, append(files, file{licence, 0o644, filepath.Join(r.root, licence)}))
	if err != nil {
		return err
	}
	return os.WriteFile(r.path(name), archive, 0o644)
}

// tarball returns a compressed tar.
func tarball(date time.Time, files []file) ([]byte, error) {
	var out bytes.Buffer
	compressed := gzip.NewWriter(&out)
	w := tar.NewWriter(compressed)
	for _, f := range files {
		content, err := os.ReadFile(f.source)
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(content)), ModTime: date, Format: tar.FormatUSTAR,
		}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
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
		content, err := os.ReadFile(f.source)
		if err != nil {
			return nil, err
		}
		into, err := w.CreateHeader(&zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: date})
		if err != nil {
			return nil, err
		}
		if _, err := into.Write(content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}
