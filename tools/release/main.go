// Release builds everything that users install, into one folder: isthmusctl for each platform, images for amd64 and arm64, the gateway for
// virtual machines, the chart with the images' digests, manifests, bills of materials, checksums, and signatures if there is a key. Nothing
// else of the repository is needed to install Isthmus.
//
//	go run ./tools/release --version v0.1.0 --output DIR --key release.key
//
// The same commit gives the same bytes in every folder, apart from signatures and as long as Debian's packages stay the same. All dates
// are the commit's.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/cli"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/images/product"
	"github.com/isthmus-net/isthmus/tools/release/published"
)

func main() { cli.Main(command()) }

// settings are what the user asks for.
type settings struct {
	version, output, key string
	platforms            []string // of isthmusctl; their Linux ones are those of the images
	images               []string // names of products
	unclean              bool
}

// everywhere are the platforms of a release.
var everywhere = []string{"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64", "windows/amd64", "windows/arm64"}

// semantic matches the versions of releases (https://semver.org, with "v").
var semantic = regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$`)

func command() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "release --version VERSION --output DIR [--key FILE]",
		Short: "Build everything that users install into one folder",
		Example: "  go run ./tools/release --version v0.1.0 --output ../release\n" +
			"  go run ./tools/release --version v0.1.0 --output ../release --key ../release.key    # its password is in COSIGN_PASSWORD",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if s.unclean && s.key != "" {
				return errors.New("--unclean: a signature would claim a commit that the files are not built from; leave out --key")
			}
			return build(cmd.Context(), cmd.OutOrStdout(), s)
		},
	}
	cmd.Flags().StringVar(&s.version, "version", "", "version, such as v0.1.0")
	cmd.Flags().StringVarP(&s.output, "output", "o", "", "folder of the release, which is new or empty")
	cmd.Flags().StringVar(&s.key, "key", "", "file with the private key of signatures, PEM or as cosign writes it; empty: nothing is signed")
	cmd.Flags().StringSliceVar(&s.platforms, "platforms", everywhere, "platforms of isthmusctl; the images are built for the Linux ones")
	cmd.Flags().StringSliceVar(&s.images, "images", product.Names(), "images to build; the chart names others by tag, without a digest")
	cmd.Flags().BoolVar(&s.unclean, "unclean", false, "build a working tree with uncommitted changes, for tests")
	return cmd
}

// release is a release being built.
type release struct {
	settings

	root  string // of the repository
	stamp compile.Version
	key   *key // nil: nothing is signed
	out   io.Writer
	start time.Time

	helmProgram string // "" until it is needed
}

func (r *release) step(format string, args ...any) {
	fmt.Fprintf(r.out, "[%4.0fs] %s\n", time.Since(r.start).Seconds(), fmt.Sprintf(format, args...))
}

// path returns the path of a file of the release.
func (r *release) path(name string) string { return filepath.Join(r.output, name) }

// build builds a release.
func build(ctx context.Context, out io.Writer, s settings) error {
	if err := s.check(); err != nil {
		return err
	}
	r := &release{settings: s, out: out, start: time.Now()}
	var err error
	if s.key != "" {
		if r.key, err = readKey(s.key); err != nil {
			return err
		}
		if err := published.CheckKey(r.key.public); err != nil && !s.unclean {
			return fmt.Errorf("--key %s: %w", s.key, err)
		}
	}
	if err := r.source(ctx); err != nil {
		return err
	}
	if err := emptyFolder(s.output); err != nil {
		return err
	}
	for _, step := range []struct {
		about string
		run   func(context.Context) error
	}{
		{"isthmusctl for " + strings.Join(s.platforms, ", "), r.programs},
		{"images, and the chart with their digests", r.artifacts},
		{"checksums", r.sums},
		{"signatures and provenance", r.sign},
	} {
		r.step("%s", step.about)
		if err := step.run(ctx); err != nil {
			return err
		}
	}
	r.step("%s of commit %.12s is in %s", s.version, r.stamp.Commit, s.output)
	return nil
}

// check returns the fault of the settings.
func (s settings) check() error {
	if !semantic.MatchString(s.version) {
		return fmt.Errorf("--version %q: want a semantic version with a v, such as v0.1.0", s.version)
	}
	if s.output == "" {
		return errors.New("--output is missing: name a new or empty folder")
	}
	for _, name := range s.images {
		if !slices.Contains(product.Names(), name) {
			return fmt.Errorf("--images: %q is none of %s", name, strings.Join(product.Names(), ", "))
		}
	}
	linux := false
	for _, p := range s.platforms {
		system, architecture, ok := strings.Cut(p, "/")
		if !ok || architecture != "amd64" && architecture != "arm64" || system != "linux" && system != "darwin" && system != "windows" {
			return fmt.Errorf("--platforms: %q is none of %s", p, strings.Join(everywhere, ", "))
		}
		linux = linux || system == "linux"
	}
	if !linux {
		return errors.New("--platforms: name at least one of Linux, because images are built for it")
	}
	return nil
}

// emptyFolder makes a folder, or checks that it is empty: a file of another release must not end up among the checksums.
func emptyFolder(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("--output %s: the folder is not empty; remove it, or name another", dir)
	}
	return err
}

// architectures returns those of the images.
func (s settings) architectures() []string {
	var have []string
	for _, p := range s.platforms {
		if architecture, ok := strings.CutPrefix(p, "linux/"); ok {
			have = append(have, architecture)
		}
	}
	return have
}
