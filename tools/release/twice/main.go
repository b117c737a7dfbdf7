// Twice builds a release of the present commit twice, for all platforms, and compares the bytes of all files. The builds are in clones in
// two folders, and the second one has a build cache of its own, so that it takes nothing from the first.
//
//	go run ./tools/release/twice
//	go run ./tools/release/twice --platforms linux/amd64 --images agent
//
// TestRelease does the same for a part of a release.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/cli"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/process"
)

// version is the one that both releases have. As a pre-release it precedes every published one.
const version = "v0.0.0-dev"

func main() { cli.Main(command()) }

func command() *cobra.Command {
	var platforms, images string
	cmd := &cobra.Command{
		Use:     "twice",
		Short:   "Build a release of the present commit twice, and compare all files",
		Example: "  go run ./tools/release/twice",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var args []string
			for flag, value := range map[string]string{"--platforms": platforms, "--images": images} {
				if value != "" {
					args = append(args, flag, value)
				}
			}
			return run(cmd.Context(), cmd.OutOrStdout(), args)
		},
	}
	cmd.Flags().StringVar(&platforms, "platforms", "", "platforms to build for (default: all of a release)")
	cmd.Flags().StringVar(&images, "images", "", "images to build (default: all of a release)")
	return cmd
}

// run builds releases with args, and returns an error if they differ.
func run(ctx context.Context, out io.Writer, args []string) (err error) {
	start := time.Now()
	tmp, err := os.MkdirTemp("", "isthmus-twice-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	mod, err := process.Output(exec.CommandContext(ctx, "go", "env", "GOMOD"))
	if err != nil {
		return err
	}
	program := filepath.Join(tmp, "release")
	if _, err := process.Output(compile.Go(ctx, "build", "-o", program, "github.com/isthmus-net/isthmus/tools/release")); err != nil {
		return err
	}
	var sums [2]string
	for i, folder := range []string{"one", filepath.Join("another", "folder")} {
		clone, release := filepath.Join(tmp, folder), filepath.Join(tmp, folder+".release")
		if _, err := process.Output(exec.CommandContext(ctx, "git", "clone", "--quiet", "--no-hardlinks", filepath.Dir(mod), clone)); err != nil {
			return err
		}
		build := exec.CommandContext(ctx, program, append([]string{"--version", version, "--output", release}, args...)...)
		build.Dir, build.Stdout, build.Stderr = clone, out, os.Stderr
		if i == 1 {
			build.Env = append(os.Environ(), "GOCACHE="+filepath.Join(tmp, "cache"))
		}
		if err := build.Run(); err != nil {
			return fmt.Errorf("build %d: %w", i+1, err)
		}
		content, err := os.ReadFile(filepath.Join(release, "SHA256SUMS"))
		if err != nil {
			return err
		}
		sums[i] = string(content)
	}
	if names := differing(sums[0], sums[1]); len(names) > 0 {
		return fmt.Errorf("built twice, these files differ: %s", strings.Join(names, ", "))
	}
	fmt.Fprintf(out, "built twice in %s, all %d files have the same bytes\n", time.Since(start).Round(time.Second), strings.Count(sums[0], "\n"))
	return nil
}

// differing returns the names of files that two lists of checksums do not have in common, sorted.
func differing(a, b string) []string {
	var names []string
	for _, lists := range [][2]string{{a, b}, {b, a}} {
		there := strings.Split(lists[1], "\n")
		for line := range strings.Lines(lists[0]) {
			line = strings.TrimSpace(line)
			if _, name, ok := strings.Cut(line, "  "); ok && !slices.Contains(there, line) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}
