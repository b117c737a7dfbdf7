// Package cache builds and caches the files that all labs on this machine share: Kubernetes binaries from the pinned modules in
// tools/lab/components, the lab's own small programs, and the images that nodes start with.
//
// Each entry is a directory or file whose name ends in a hash of all of its inputs. A current entry is therefore never rebuilt,
// and an outdated one always is. Entries unused for keepUnused are removed when their successor is built.
package cache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const keepUnused = 7 * 24 * time.Hour

// Cache is a directory of build results, and the module that they are built from.
type Cache struct {
	Dir        string
	Source     string               // root of the Go module
	Kubernetes string               // a folder with the programs of a Kubernetes release, and perhaps other prebuilt programs; empty: build all
	Report     func(string, ...any) // one line of progress
}

// KubernetesVariable names the environment variable with Cache.Kubernetes.
const KubernetesVariable = "ISTHMUS_LAB_KUBERNETES"

// entry returns the path of an entry, and calls build if the entry does not exist. build creates the given path; it is renamed
// to the entry's path when it is complete.
func (c Cache) entry(name string, key string, build func(path string) error) (string, error) {
	path := filepath.Join(c.Dir, name+"-"+key)
	now := time.Now()
	if err := os.Chtimes(path, now, now); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(c.Dir, ".new-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	fresh := filepath.Join(tmp, "entry")
	if err := build(fresh); err != nil {
		return "", err
	}
	if err := os.Rename(fresh, path); err != nil {
		return "", err
	}
	return path, c.prune(name, path)
}

// prune removes old entries of a name, except the given one.
func (c Cache) prune(name, except string) error {
	siblings, err := filepath.Glob(filepath.Join(c.Dir, name+"-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range siblings {
		st, err := os.Stat(s)
		if err == nil && s != except && time.Since(st.ModTime()) > keepUnused {
			errs = append(errs, os.RemoveAll(s))
		}
	}
	return errors.Join(errs...)
}

// Lock prevents concurrent builds by other programs, until the caller calls unlock.
func (c Cache) Lock() (unlock func(), err error) {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(c.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		c.Report("waiting for another lab to finish building")
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	return func() { f.Close() }, nil
}

// Key returns a hash of texts and of the content of files. A directory stands for all files below it.
func Key(texts []string, files ...string) (string, error) {
	sum := sha256.New()
	for _, t := range texts {
		fmt.Fprintf(sum, "%d:%s\n", len(t), t)
	}
	for _, file := range files {
		err := filepath.WalkDir(file, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			content, err := os.Open(path)
			if err != nil {
				return err
			}
			defer content.Close()
			rel, err := filepath.Rel(filepath.Dir(file), path)
			if err != nil {
				return err
			}
			fmt.Fprintf(sum, "file %s\n", rel)
			_, err = io.Copy(sum, content)
			return err
		})
		if err != nil {
			return "", fmt.Errorf("cache key: %w", err)
		}
	}
	return hex.EncodeToString(sum.Sum(nil))[:16], nil
}

// SourceDir returns the root of the module of Isthmus: the nearest directory with its go.mod, from the given one upwards.
func SourceDir(from string) (string, error) {
	const want = "module github.com/isthmus-net/isthmus\n"
	for dir := from; ; dir = filepath.Dir(dir) {
		raw, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.Contains(string(raw)+"\n", want) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no checkout of isthmus at or above %s: run the lab from inside one", from)
		}
	}
}

// goVersion is part of every key, because another compiler builds other binaries.
func goVersion(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOVERSION").Output()
	if err != nil {
		return "", fmt.Errorf("run go: %w (the lab builds Kubernetes from Go modules: install Go and put it on PATH)", err)
	}
	return strings.TrimSpace(string(out)), nil
}
