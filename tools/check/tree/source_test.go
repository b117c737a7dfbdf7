package tree

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// root is where this package finds the repository.
const root = "../../.."

// sources calls check with every text file that people wrote, by its path from the root.
func sources(t *testing.T, check func(path string, content []byte)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if slices.Contains([]string{".git", "bin", "bpf/include"}, name) {
				return filepath.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || slices.Contains([]string{".o", ".sum", ".tmp"}, filepath.Ext(name)) {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Contains(content, []byte{0}) {
			check(name, content)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("walk the tree: %v", err)
	}
}

// TestNoLooseEnds refuses the words by which people leave work for later. They are put together here, so
// that this file passes.
func TestNoLooseEnds(t *testing.T) {
	t.Parallel()
	words := []string{"TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "Copyright " + "YEAR"}
	sources(t, func(path string, content []byte) {
		for i, line := range bytes.Split(content, []byte("\n")) {
			for _, w := range words {
				if bytes.Contains(line, []byte(w)) {
					t.Errorf("%s:%d says %s: do it, or write an issue and say nothing here", path, i+1, w)
				}
			}
		}
	})
}

// TestPackageNames refuses names that say nothing about what is inside.
func TestPackageNames(t *testing.T) {
	t.Parallel()
	all, err := packages()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	empty := []string{"util", "utils", "common", "helper", "helpers", "manager", "data", "info", "process", "handle", "misc"}
	for _, p := range all {
		if slices.Contains(empty, p.Name) {
			t.Errorf("%s: a package named %s says nothing about what is inside", p.ImportPath, p.Name)
		}
	}
}

// TestPackageDocs holds that a newcomer can read, for every package, what it is for.
func TestPackageDocs(t *testing.T) {
	t.Parallel()
	all, err := packages()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	for _, p := range all {
		if len(p.GoFiles) == 0 {
			continue
		}
		doc := ""
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Errorf("%s: %v", p.ImportPath, err)
				continue
			}
			if !ast.IsGenerated(f) {
				doc += f.Doc.Text()
			}
		}
		switch want := "Package " + p.Name + " "; {
		case p.Name == "main" && len(doc) < 20:
			t.Errorf("%s: no comment above `package main` says what the program does and how it is called", p.ImportPath)
		case p.Name != "main" && !strings.HasPrefix(doc, want):
			t.Errorf("%s: no file has a comment that begins with %q and says what goes in and what comes out", p.ImportPath, want)
		}
	}
}

// TestLicenceOfC holds that what the kernel loads carries a licence that lets it call GPL-only functions. Programs in
// testdata run on the kernel, as others do.
func TestLicenceOfC(t *testing.T) {
	t.Parallel()
	const want = "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause"
	seen := 0
	sources(t, func(path string, content []byte) {
		if ext := filepath.Ext(path); ext != ".c" && ext != ".h" || strings.Contains(path, "/testdata/") {
			return
		}
		seen++
		// A constraint that keeps the file from the Go tool may stand above.
		if !bytes.Contains(content[:min(len(content), 200)], []byte(want)) {
			t.Errorf("%s does not begin with %q", path, want)
		}
	})
	if seen == 0 {
		t.Error("found no C")
	}
}
