package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/release/published"
)

// Earlier is the newest release or candidate, built from its commit.
type Earlier struct {
	Version string
	Chart   string // file
}

// Earlier builds the images and the chart of the newest release or candidate, and loads the images into every node. In a clone without that
// commit (a shallow one), it builds them from the working tree under the release's version, and says so.
func (tb *Testbed) Earlier(ctx context.Context, products ...string) (Earlier, error) {
	all, err := published.Releases()
	if err != nil {
		return Earlier{}, err
	}
	r := all[0]
	dir := filepath.Join(tb.bin, r.Version+"-"+r.Commit[:12])
	from, err := tb.sourcesOf(ctx, r, filepath.Join(dir, "source"))
	if err != nil {
		return Earlier{}, err
	}
	tb.Step("build and load the images of %s", r.Version)
	var archives, missing []string
	for _, p := range products {
		archive := filepath.Join(dir, p+".tar")
		archives = append(archives, archive)
		if _, err := os.Stat(archive); err != nil || from == tb.root {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		build := append([]string{"run", "./tools/images", "--tag", r.Version, "-o", dir}, missing...)
		if err := tb.compileIn(ctx, from, nil, build...); err != nil {
			return Earlier{}, fmt.Errorf("build images of %s: %w", r.Version, err)
		}
	}
	plain := strings.TrimPrefix(r.Version, "v")
	helm := exec.CommandContext(ctx, tb.Program("helm"), "package", filepath.Join(from, "deploy", "helm", "isthmus"),
		"--version", plain, "--app-version", r.Version, "--destination", dir)
	if _, err := process.Output(helm); err != nil {
		return Earlier{}, err
	}
	return Earlier{r.Version, filepath.Join(dir, "isthmus-"+plain+".tgz")}, tb.Lab.LoadImages(ctx, archives...)
}

// sourcesOf writes the sources of a release into a folder, unless they are there, and returns that folder; or the working tree, if the
// clone does not have the commit.
func (tb *Testbed) sourcesOf(ctx context.Context, r published.Release, to string) (string, error) {
	git := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Dir = tb.root
		return cmd
	}
	if _, err := process.Output(git("cat-file", "-e", r.Commit+"^{commit}")); err != nil {
		tb.Step("this clone has no commit %s of %s: the working tree takes its place", r.Commit, r.Version)
		return tb.root, nil //nolint:nilerr // said
	}
	if _, err := os.Stat(to); err == nil {
		return to, nil
	}
	fresh := to + ".new"
	if err := errors.Join(os.RemoveAll(fresh), os.MkdirAll(fresh, 0o755)); err != nil {
		return "", err
	}
	archive := filepath.Join(filepath.Dir(to), "source.tar")
	if _, err := process.Output(git("archive", "--output", archive, r.Commit)); err != nil {
		return "", err
	}
	if _, err := process.Output(exec.CommandContext(ctx, "tar", "--extract", "--file", archive, "--directory", fresh)); err != nil {
		return "", err
	}
	return to, errors.Join(os.Remove(archive), os.Rename(fresh, to))
}
