package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/release/published"
)

// source finds the repository, and the commit that it is at.
func (r *release) source(ctx context.Context) error {
	mod, err := said(ctx, "", "go", "env", "GOMOD")
	if err != nil {
		return err
	}
	r.root = filepath.Dir(mod)
	changes, err := said(ctx, r.root, "git", "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" && !r.unclean {
		return fmt.Errorf("the working tree has uncommitted changes, and a release is of a commit:\n%s", changes)
	}
	line, err := said(ctx, r.root, "git", "log", "-1", "--format=%H %ct")
	if err != nil {
		return err
	}
	r.stamp = compile.Version{Release: r.version}
	var seconds int64
	if _, err := fmt.Sscan(line, &r.stamp.Commit, &seconds); err != nil {
		return fmt.Errorf("git log says %q: %w", line, err)
	}
	r.stamp.Date = time.Unix(seconds, 0).UTC()
	return published.Check(r.version, r.stamp.Commit)
}

// said runs a program in a folder, and returns its trimmed output.
func said(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := process.Output(cmd)
	return strings.TrimSpace(out), err
}
