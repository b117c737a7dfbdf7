package kernel

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// module is a module with its content.
type module struct {
	name    string
	content []byte
}

// tree is a kernel's module folder, and the modules taken from it.
type tree struct {
	paths  map[string]string // by name
	loaded []module
}

// index finds all modules below dir.
func (t *tree) index(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if name, suffix, ok := strings.Cut(d.Name(), ".ko"); ok && (suffix == "" || suffix == ".xz") {
			t.paths[canonical(name)] = path
		}
		return nil
	})
}

// canonical returns the kernel's spelling of a module name; file names may contain hyphens.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

// add takes a module, and its dependencies before it. Dependencies of modules have no cycles.
func (t *tree) add(ctx context.Context, name string) error {
	if slices.ContainsFunc(t.loaded, func(m module) bool { return m.name == name }) {
		return nil
	}
	path, ok := t.paths[name]
	if !ok {
		return fmt.Errorf("no module %s", name)
	}
	content, err := read(ctx, path)
	if err != nil {
		return fmt.Errorf("read module %s: %w", name, err)
	}
	needs, err := depends(content)
	if err != nil {
		return fmt.Errorf("read module %s: %w", name, err)
	}
	for _, n := range needs {
		if err := t.add(ctx, n); err != nil {
			return fmt.Errorf("module %s needs %s: %w", name, n, err)
		}
	}
	t.loaded = append(t.loaded, module{name, content})
	return nil
}

// read returns a module's content, uncompressed.
func read(ctx context.Context, path string) ([]byte, error) {
	if !strings.HasSuffix(path, ".xz") {
		return os.ReadFile(path)
	}
	return exec.CommandContext(ctx, "xz", "--decompress", "--stdout", path).Output()
}

// depends returns the dependencies of a module: the comma-separated value of depends= in its section .modinfo, which consists
// of zero-terminated "key=value" strings.
func depends(content []byte) ([]string, error) {
	object, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	section := object.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no section .modinfo")
	}
	said, err := section.Data()
	if err != nil {
		return nil, err
	}
	for line := range strings.SplitSeq(string(said), "\x00") {
		if list, ok := strings.CutPrefix(line, "depends="); ok && list != "" {
			var names []string
			for n := range strings.SplitSeq(list, ",") {
				names = append(names, canonical(n))
			}
			return names, nil
		}
	}
	return nil, nil
}
