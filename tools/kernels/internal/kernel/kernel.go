// Package kernel downloads and caches Debian's kernels for virtual machines: an image to boot, and the modules that a test
// needs with their dependencies.
package kernel

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
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

// ID names a kernel of Debian.
type ID struct {
	Series       string // such as "6.12"
	Architecture string // such as "arm64", as Go and Debian name it
}

// Kernel is a bootable kernel.
type Kernel struct {
	Release string   // as uname prints it
	Image   string   // path of the compressed kernel
	Modules []string // paths of uncompressed modules, in load order
}

// Get returns the newest kernel of a series with the named modules, cached in dir. A cached kernel is never updated; remove its
// folder to get a newer one. Get is safe for concurrent use.
func Get(ctx context.Context, dir string, id ID, modules []string, progress io.Writer) (Kernel, error) {
	sum := sha256.Sum256([]byte(strings.Join(modules, " ")))
	entry := filepath.Join(dir, "kernel-"+id.Series+"-"+id.Architecture+"-"+hex.EncodeToString(sum[:4]))
	k, err := open(entry)
	if !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	if err := fetch(ctx, entry, id, modules, progress); err != nil {
		return Kernel{}, fmt.Errorf("fetch Linux %s for %s: %w", id.Series, id.Architecture, err)
	}
	return open(entry)
}

// The files of a cache entry. Modules are numbered in load order.
const (
	imageFile     = "vmlinuz"
	releaseFile   = "release"
	modulesFolder = "modules"
)

// open returns the kernel of an entry.
func open(entry string) (Kernel, error) {
	release, err := os.ReadFile(filepath.Join(entry, releaseFile))
	if err != nil {
		return Kernel{}, err
	}
	modules, err := filepath.Glob(filepath.Join(entry, modulesFolder, "*.ko"))
	if err != nil {
		return Kernel{}, err
	}
	return Kernel{Release: string(release), Image: filepath.Join(entry, imageFile), Modules: slices.Sorted(slices.Values(modules))}, nil
}

// fetch creates an entry. The entry gets its name once it is complete.
func fetch(ctx context.Context, entry string, id ID, modules []string, progress io.Writer) (err error) {
	if err := debian.Ensure(ctx, progress, "xz-utils"); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(entry), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(entry), ".new-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	archive, err := debian.Open(ctx, tmp, id.Architecture)
	if err != nil {
		return err
	}
	pkg, err := newest(ctx, archive, id)
	if err != nil {
		return err
	}
	fmt.Fprintf(progress, "fetch Debian package %s\n", pkg)
	if err := archive.Download(ctx, tmp, pkg); err != nil {
		return err
	}
	root, fresh := filepath.Join(tmp, "root"), filepath.Join(tmp, "entry")
	if err := unpack(ctx, tmp, root); err != nil {
		return err
	}
	if err := keep(ctx, root, fresh, modules); err != nil {
		return fmt.Errorf("package %s: %w", pkg, err)
	}
	if err := os.Rename(fresh, entry); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// newest returns the name of the newest package with a kernel for virtual machines.
func newest(ctx context.Context, archive debian.Archive, id ID) (string, error) {
	pattern := fmt.Sprintf(`^linux-image-%s\.[0-9]+[-+][a-z0-9]+-cloud-%s$`, regexp.QuoteMeta(id.Series), id.Architecture)
	names, err := archive.Search(ctx, pattern)
	if err != nil {
		return "", err
	}
	if len(names) == 0 {
		return "", fmt.Errorf("no package matches %s; Debian 12 has one", pattern)
	}
	return slices.MaxFunc(names, byNumbers), nil
}

// byNumbers compares two names by the numbers that they contain, in order.
func byNumbers(a, b string) int { return slices.Compare(numbers(a), numbers(b)) }

func numbers(s string) []int {
	var all []int
	for _, digits := range regexp.MustCompile(`[0-9]+`).FindAllString(s, -1) {
		if n, err := strconv.Atoi(digits); err == nil {
			all = append(all, n)
		}
	}
	return all
}

// unpack unpacks the only package in dir into root.
func unpack(ctx context.Context, dir, root string) error {
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) != 1 {
		return fmt.Errorf("want one package, have %v", debs)
	}
	if output, err := exec.CommandContext(ctx, "dpkg-deb", "--extract", debs[0], root).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w\n%s", filepath.Base(debs[0]), err, output)
	}
	return nil
}

// keep creates an entry from the needed files of an unpacked package.
func keep(ctx context.Context, root, entry string, modules []string) error {
	const prefix = "vmlinuz-"
	images, err := filepath.Glob(filepath.Join(root, "boot", prefix+"*"))
	if err != nil {
		return err
	}
	if len(images) != 1 {
		return fmt.Errorf("want one %s*, have %v", prefix, images)
	}
	release := strings.TrimPrefix(filepath.Base(images[0]), prefix)
	folder := filepath.Join(entry, modulesFolder)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	t := &tree{paths: map[string]string{}}
	if err := t.index(filepath.Join(root, "lib", "modules", release)); err != nil {
		return err
	}
	for _, m := range modules {
		if err := t.add(ctx, m); err != nil {
			return err
		}
	}
	for i, m := range t.loaded {
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%02d-%s.ko", i, m.name)), m.content, 0o644); err != nil {
			return err
		}
	}
	return errors.Join(
		os.Rename(images[0], filepath.Join(entry, imageFile)),
		os.WriteFile(filepath.Join(entry, releaseFile), []byte(release), 0o644),
	)
}
