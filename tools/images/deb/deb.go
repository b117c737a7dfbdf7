// Package deb copies a program from a Debian package into an image, with the shared libraries that it needs and nothing else:
// no shell, no package manager.
//
// In: packages and the path of a program in one of them. Out: the program, its loader and its libraries in a layer.
package deb

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// libraries is the folder of libraries in an image, one of the loader's default folders.
const libraries = "/usr/lib/"

// Package is a Debian package of which an image has files.
type Package struct {
	Name, Version string
	Architecture  string // Debian's name of it, "all" included
}

// Add downloads the current versions of packages with all their dependencies, and copies the program at path into an image,
// under the same path. The architecture is Go's name of one; empty: this machine's. It returns the packages of the copied files,
// by name. It only works on a Debian machine.
func Add(ctx context.Context, l *oci.Layer, architecture, path string, packages ...string) (from []Package, err error) {
	tmp, err := os.MkdirTemp("", "isthmus-debs-*")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	debs, err := debian.DownloadWhole(ctx, tmp, architecture, packages...) // both have amd64 and arm64
	if err != nil {
		return nil, err
	}
	root := filepath.Join(tmp, "root")
	owners := map[string]Package{}
	for _, deb := range debs {
		if said, err := exec.CommandContext(ctx, "dpkg-deb", "--extract", deb, root).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("unpack %s: %w\n%s", filepath.Base(deb), err, said)
		}
		if err := own(ctx, owners, deb); err != nil {
			return nil, err
		}
	}
	copied, err := add(l, root, path)
	if err != nil {
		return nil, err
	}
	for _, file := range copied {
		if p, ok := owners[strings.TrimPrefix(file, root)]; ok && !slices.Contains(from, p) {
			from = append(from, p)
		}
	}
	slices.SortFunc(from, func(a, b Package) int { return strings.Compare(a.Name, b.Name) })
	return from, terms(l, root)
}

// own records the owner of the files of a package.
func own(ctx context.Context, owners map[string]Package, deb string) error {
	fields, err := exec.CommandContext(ctx, "dpkg-deb", "--show", "--showformat=${Package} ${Version} ${Architecture}", deb).Output()
	if err != nil {
		return fmt.Errorf("read %s: %w", filepath.Base(deb), err)
	}
	var p Package
	if _, err := fmt.Sscan(string(fields), &p.Name, &p.Version, &p.Architecture); err != nil {
		return fmt.Errorf("read %s: %w in %q", filepath.Base(deb), err, fields)
	}
	contents, err := exec.CommandContext(ctx, "dpkg-deb", "--contents", deb).Output()
	if err != nil {
		return fmt.Errorf("list %s: %w", filepath.Base(deb), err)
	}
	for line := range strings.Lines(string(contents)) { // mode, owner, size, date, time and path, of links also " -> " and the target
		if columns := strings.Fields(line); len(columns) >= 6 && columns[0][0] == '-' {
			owners[filepath.Clean("/"+columns[5])] = p
		}
	}
	return nil
}

// terms copies the packages' copyright files into an image.
func terms(l *oci.Layer, root string) error {
	found, err := filepath.Glob(filepath.Join(root, "usr/share/doc/*/copyright"))
	for _, file := range found {
		if info, statErr := os.Stat(file); statErr != nil || !info.Mode().IsRegular() {
			continue // a link to the file of another package
		}
		err = errors.Join(err, l.File(strings.TrimPrefix(file, root), file, 0o644))
	}
	return err
}

// add copies a program below root, and the libraries that it needs, into an image. It returns the copied files.
func add(l *oci.Layer, root, path string) (copied []string, err error) {
	have, err := sharedObjects(root)
	if err != nil {
		return nil, err
	}
	source := filepath.Join(root, path)
	loader, needed, err := read(source)
	if err != nil {
		return nil, err
	}
	put := func(name, file string, mode int64) error {
		copied = append(copied, file)
		return l.File(name, file, mode)
	}
	if err := put(path, source, 0o755); err != nil {
		return nil, err
	}
	if loader != "" {
		found, ok := have[filepath.Base(loader)]
		if !ok {
			return nil, fmt.Errorf("%s needs the loader %s, which no package contains", path, loader)
		}
		if err := put(loader, found, 0o755); err != nil {
			return nil, err
		}
	}
	for len(needed) > 0 {
		name := needed[0]
		needed = needed[1:]
		if l.Has(libraries+name) || name == filepath.Base(loader) {
			continue
		}
		found, ok := have[name]
		if !ok {
			return nil, fmt.Errorf("%s needs %s, which no package contains", path, name)
		}
		_, more, err := read(found)
		if err != nil {
			return nil, err
		}
		if err := put(libraries+name, found, 0o644); err != nil {
			return nil, err
		}
		needed = append(needed, more...)
	}
	return copied, nil
}

// read returns the loader of a program, empty for a library, and its needed libraries, sorted.
func read(file string) (loader string, needed []string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return "", nil, fmt.Errorf("read %s: %w", file, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, p.Filesz)
		if _, err := p.ReadAt(name, 0); err != nil {
			return "", nil, fmt.Errorf("read the loader of %s: %w", file, err)
		}
		loader = strings.TrimRight(string(name), "\x00")
	}
	if needed, err = f.ImportedLibraries(); err != nil {
		return "", nil, fmt.Errorf("read the needed libraries of %s: %w", file, err)
	}
	slices.Sort(needed)
	return loader, needed, nil
}

// sharedObjects maps the names of the libraries below root to their files, with links resolved. It leaves out folders that the
// loader does not search, such as those of plugins.
func sharedObjects(root string) (map[string]string, error) {
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.Contains(d.Name(), ".so") {
			return err
		}
		in, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		switch parts := strings.Split(strings.TrimPrefix(in, "usr/"), "/"); {
		case !strings.HasPrefix(parts[0], "lib"), len(parts) > 2:
			return nil
		case len(parts) == 2 && !strings.HasSuffix(parts[1], "-linux-gnu"):
			return nil
		}
		to, err := filepath.EvalSymlinks(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a link to a file of another package
		}
		if err == nil && found[d.Name()] == "" {
			found[d.Name()] = to
		}
		return err
	})
	return found, err
}
