// Package mermaid proves that the Mermaid diagrams of documents parse. It takes a tree with Markdown documents, and gives
// the diagrams that Mermaid refuses, each with its file and line.
//
// Mermaid is JavaScript, so the package installs Node from Debian where the machine has none, and the pinned packages of
// package-lock.json into the user's cache, once.
package mermaid

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

//go:embed package.json package-lock.json parse.mjs
var files embed.FS

// diagram is one block of Mermaid in a document.
type diagram struct {
	path string // relative to the root
	line int    // of its first line
	text string
}

// broken are diagrams that must not parse. A parser that accepts them proves nothing about the others.
var broken = []string{
	"flowchart LR\n    a[agent --> b[broker]",
	"sequenceDiagram\n    agent->>broker hello",
}

// Check parses every diagram of the Markdown documents below root. It writes what it installs on progress. Its error joins
// the diagrams that do not parse.
func Check(ctx context.Context, root string, progress io.Writer) error {
	diagrams, err := find(root)
	if err != nil || len(diagrams) == 0 {
		return err
	}
	dir, err := install(ctx, progress)
	if err != nil {
		return err
	}
	texts := slices.Clone(broken)
	for _, d := range diagrams {
		texts = append(texts, d.text)
	}
	faults, err := parse(ctx, dir, texts)
	if err != nil {
		return err
	}
	if slices.Contains(faults[:len(broken)], "") {
		return errors.New("mermaid accepts a broken diagram, so its verdict on the others is worth nothing")
	}
	var errs []error
	for i, d := range diagrams {
		if fault := faults[len(broken)+i]; fault != "" {
			errs = append(errs, fmt.Errorf("%s:%d: this diagram does not parse: %s", d.path, d.line, fault))
		}
	}
	return errors.Join(errs...)
}

// find returns the diagrams of all Markdown documents below root.
func find(root string) ([]diagram, error) {
	var found []diagram
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && path != root && (entry.Name() == "bin" || entry.Name()[0] == '.') {
			return filepath.SkipDir
		}
		if entry.IsDir() || filepath.Ext(path) != ".md" {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		for _, d := range blocks(string(content)) {
			d.path = relative
			found = append(found, d)
		}
		return nil
	})
	return found, err
}

// blocks returns the diagrams of one document, without its path. A block that does not end is one, too.
func blocks(text string) []diagram {
	var found []diagram
	var open *diagram
	for i, line := range strings.SplitAfter(text, "\n") {
		switch trimmed := strings.TrimSpace(line); {
		case open == nil && trimmed == "```mermaid":
			open = &diagram{line: i + 2}
		case open != nil && trimmed == "```":
			found = append(found, *open)
			open = nil
		case open != nil:
			open.text += line
		}
	}
	if open != nil {
		found = append(found, *open)
	}
	return found
}

// install returns a folder that holds parse.mjs and the packages it needs. The folder's name changes with its content.
func install(ctx context.Context, progress io.Writer) (string, error) {
	if err := ensureNode(ctx, progress); err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	sum := sha256.New()
	names, err := fs.Glob(files, "*")
	if err != nil {
		return "", err
	}
	contents := map[string][]byte{}
	for _, name := range names {
		if contents[name], err = files.ReadFile(name); err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d\n%s", name, len(contents[name]), contents[name])
	}
	dir := filepath.Join(cache, "isthmus", fmt.Sprintf("mermaid-%x", sum.Sum(nil)[:8]))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	fmt.Fprintf(progress, "install mermaid into %s\n", dir)
	return dir, installTo(ctx, dir, contents)
}

// installTo makes dir, whole or not at all.
func installTo(ctx context.Context, dir string, contents map[string][]byte) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	partial, err := os.MkdirTemp(filepath.Dir(dir), "partial-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(partial)
	for name, content := range contents {
		if err := os.WriteFile(filepath.Join(partial, name), content, 0o644); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	cmd.Dir = partial
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w\n%s", err, output)
	}
	if err := os.Rename(partial, dir); err != nil && !errors.Is(err, fs.ErrExist) { // another run was faster
		return err
	}
	return nil
}

// ensureNode installs Node and npm from Debian unless the machine has them from any source.
func ensureNode(ctx context.Context, progress io.Writer) error {
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			return debian.Ensure(ctx, progress, "nodejs", "npm")
		}
	}
	return nil
}

// parse returns for each text why Mermaid refuses it, or "".
func parse(ctx context.Context, dir string, texts []string) ([]string, error) {
	input, err := json.Marshal(texts)
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "node", "parse.mjs")
	cmd.Dir, cmd.Stdin, cmd.Stderr = dir, bytes.NewReader(input), &stderr
	output, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("node parse.mjs: %w\n%s", err, stderr.Bytes())
	}
	var faults []string
	if err := json.Unmarshal(output, &faults); err != nil {
		return nil, fmt.Errorf("read the answer of parse.mjs: %w\n%s", err, output)
	}
	if len(faults) != len(texts) {
		return nil, fmt.Errorf("parse.mjs answered for %d of %d diagrams", len(faults), len(texts))
	}
	return faults, nil
}
