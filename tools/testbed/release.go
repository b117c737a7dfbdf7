package testbed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/isthmus-net/isthmus/tools/process"
)

// releaseVersion is the version of releases of the working tree. As a pre-release it precedes every published one.
const releaseVersion = "v0.0.0-dev"

// release builds a release of the working tree for this machine, unless there is one of the same sources.
func (tb *Testbed) release(ctx context.Context) error {
	dir, stamp := filepath.Join(tb.bin, "release"), filepath.Join(tb.bin, "release.sources")
	sources, err := tb.sources(ctx)
	if err != nil {
		return err
	}
	if built, err := os.ReadFile(stamp); err == nil && string(built) == sources {
		tb.Step("the release in %s is of these sources", dir)
	} else {
		tb.Step("build a release of the working tree")
		if err := errors.Join(os.RemoveAll(stamp), os.RemoveAll(dir)); err != nil {
			return err
		}
		if err := tb.compile(ctx, nil, "run", "./tools/release", "--version", releaseVersion, "--platforms", "linux/"+runtime.GOARCH,
			"--images", "agent,controller,isthmusctl", "--unclean", "--output", dir); err != nil {
			return err
		}
		if err := os.WriteFile(stamp, []byte(sources), 0o644); err != nil {
			return err
		}
	}
	program, err := os.ReadFile(filepath.Join(dir, "isthmusctl-linux-"+runtime.GOARCH))
	if err != nil {
		return err
	}
	to := tb.Program("isthmusctl")
	if err := os.WriteFile(to+".new", program, 0o755); err != nil {
		return err
	}
	return os.Rename(to+".new", to) // a running one keeps its file
}

// sources identifies the commit and the changes of the working tree.
func (tb *Testbed) sources(ctx context.Context) (string, error) {
	h := sha256.New()
	for _, args := range [][]string{
		{"rev-parse", "HEAD"},
		{"diff", "--binary", "HEAD"},
		{"ls-files", "--others", "--exclude-standard", "-z"},
	} {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Dir = tb.root
		out, err := process.Output(cmd)
		if err != nil {
			return "", err
		}
		h.Write([]byte(out))
		if args[0] != "ls-files" {
			continue
		}
		for name := range strings.SplitSeq(strings.Trim(out, "\x00"), "\x00") {
			content, err := os.ReadFile(filepath.Join(tb.root, name))
			if err != nil && name != "" && !errors.Is(err, fs.ErrNotExist) {
				return "", err
			}
			h.Write(content)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// publish pushes the release to the lab's registry.
func (tb *Testbed) publish(ctx context.Context) (err error) {
	if tb.registry, err = tb.Lab.StartRegistry(ctx); err != nil {
		return err
	}
	tb.Step("isthmusctl images push %s", tb.registry)
	_, err = process.Output(tb.Lab.FabricCommand(ctx, tb.Program("isthmusctl"), "images", "push", tb.registry,
		"--from", filepath.Join(tb.bin, "release", "isthmus-images.tar"), "--plain-http"))
	return err
}

// chart returns Helm's arguments for the chart: that of the release, with its images, or that of the working tree.
func (tb *Testbed) chart() []string {
	if tb.registry == "" {
		return []string{filepath.Join(tb.root, "deploy", "helm", "isthmus")}
	}
	return []string{
		"oci://" + tb.registry + "/charts/isthmus", "--version", strings.TrimPrefix(releaseVersion, "v"), "--plain-http",
		"--set", "image.registry=" + tb.registry,
	}
}
