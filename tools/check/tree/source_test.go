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

// root is the path of the repository from this package.
const root = "../../.."

// sources calls check with every text file of the tree, by its path from the root.
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
		if !entry.Type().IsRegular() || slices.Contains([]string{".o", ".sum", ".tmp"}, filepath.Ext(name)) || entry.Name() == "package-lock.json" {
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

// Markers of unfinished work are refused. This file builds the words from halves, so that it passes.
func TestNoLooseEnds(t *testing.T) {
	t.Parallel()
	words := []string{"TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "Copyright " + "YEAR"}
	sources(t, func(path string, content []byte) {
		for i, line := range bytes.Split(content, []byte("\n")) {
			for _, w := range words {
				if bytes.Contains(line, []byte(w)) {
					t.Errorf("%s:%d says %s: finish it, or file an issue and remove the marker", path, i+1, w)
				}
			}
		}
	})
}

// Package names that describe no content are refused.
func TestPackageNames(t *testing.T) {
	t.Parallel()
	all, err := packages()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	empty := []string{"util", "utils", "common", "helper", "helpers", "manager", "data", "info", "handle", "misc"}
	for _, p := range all {
		if slices.Contains(empty, p.Name) {
			t.Errorf("%s: a package named %s does not describe its content", p.ImportPath, p.Name)
		}
	}
}

// Every package has a doc comment that a newcomer can begin with.
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
			t.Errorf("%s: a comment above `package main` must say what the program does and how to call it", p.ImportPath)
		case p.Name != "main" && !strings.HasPrefix(doc, want):
			t.Errorf("%s: a comment must begin with %q and say what goes in and what comes out", p.ImportPath, want)
		}
	}
}

// Every eBPF program carries a licence that lets it call the kernel's GPL-only functions. C in testdata runs in user space.
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
