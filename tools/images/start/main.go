// Start builds the product's images and starts the programs of each once, with --version. Images of another architecture than this
// machine's run under emulation.
//
//	go run ./tools/images/start --architecture arm64
//
// It needs root on Debian 12: a program runs in its image's files alone, with chroot(2). The emulator is unpacked into a temporary
// folder and not installed, so this machine does not begin to run programs of other architectures.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/cli"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/images/product"
)

// emulators names QEMU's programs that run static and dynamic programs of an architecture, by Go's name of it.
var emulators = map[string]string{"amd64": "qemu-x86_64-static", "arm64": "qemu-aarch64-static"}

func main() { cli.Main(command()) }

func command() *cobra.Command {
	s := &starter{}
	cmd := &cobra.Command{
		Use:     "start [--architecture ARCHITECTURE] [IMAGE ...]",
		Short:   "Start the programs of the product's images once",
		Example: "  go run ./tools/images/start --architecture arm64 gateway",
		RunE: func(cmd *cobra.Command, names []string) error {
			if len(names) == 0 {
				names = product.Names()
			}
			s.out = cmd.OutOrStdout()
			return s.run(cmd.Context(), names)
		},
	}
	cmd.Flags().StringVar(&s.architecture, "architecture", runtime.GOARCH, "architecture of the images, amd64 or arm64")
	return cmd
}

// starter starts programs of one architecture.
type starter struct {
	architecture string
	emulator     string // a file; empty: this machine runs the programs itself
	dir          string // a temporary folder
	out          io.Writer
}

func (s *starter) run(ctx context.Context, names []string) (err error) {
	if s.dir, err = os.MkdirTemp("", "isthmus-start-*"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.dir)) }()
	if s.architecture != runtime.GOARCH {
		if s.emulator, err = s.fetch(ctx); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := s.start(ctx, name); err != nil {
			return fmt.Errorf("image %s for %s: %w", name, s.architecture, err)
		}
	}
	return nil
}

// fetch downloads the emulator and returns its file.
func (s *starter) fetch(ctx context.Context) (string, error) {
	program, ok := emulators[s.architecture]
	if !ok {
		return "", fmt.Errorf("no emulator of %q is known", s.architecture)
	}
	var archive debian.Archive
	if err := archive.Download(ctx, s.dir, "qemu-user-static"); err != nil {
		return "", err
	}
	debs, err := filepath.Glob(filepath.Join(s.dir, "*.deb"))
	if err != nil {
		return "", err
	}
	root := filepath.Join(s.dir, "emulator")
	if said, err := exec.CommandContext(ctx, "dpkg-deb", append([]string{"--extract"}, append(debs, root)...)...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("unpack the emulator: %w\n%s", err, said)
	}
	return filepath.Join(root, "usr/bin", program), nil
}

// start builds an image and starts its programs: the product's own, and Debian's if it has one.
func (s *starter) start(ctx context.Context, name string) error {
	dir := filepath.Join(s.dir, name)
	root := filepath.Join(dir, "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	image, err := product.Compile(ctx, dir, name, s.architecture, compile.Version{})
	if err != nil {
		return err
	}
	if err := unpack(ctx, image, root); err != nil {
		return err
	}
	for _, program := range append(image.Spec.Entrypoint, image.Others()...) {
		said, err := s.version(ctx, root, program)
		if err != nil {
			return fmt.Errorf("%s --version: %w\n%s", program, err, said)
		}
		first, _, _ := strings.Cut(said, "\n")
		fmt.Fprintf(s.out, "%-18s %-5s %-27s %s\n", name, s.architecture, program, first)
	}
	return nil
}

// unpack writes the files of an image below root.
func unpack(ctx context.Context, i *product.Image, root string) error {
	i.Spec.Names = []string{"isthmus/start:dev"}
	image, err := oci.Compressed(i.Spec, func(l *oci.Layer) error { return i.Fill(ctx, l) })
	if err != nil {
		return err
	}
	files := mutate.Extract(image)
	defer files.Close()
	tar := exec.CommandContext(ctx, "tar", "--extract", "--directory", root)
	tar.Stdin = files
	if said, err := tar.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack: %w\n%s", err, said)
	}
	return nil
}

// version runs a program of an image with --version and returns its output, which must not be empty.
func (s *starter) version(ctx context.Context, root, program string) (string, error) {
	args := []string{program, "--version"}
	if s.emulator != "" {
		const inside = "/emulator"
		if err := os.Link(s.emulator, filepath.Join(root, inside)); err != nil && !errors.Is(err, os.ErrExist) {
			return "", err
		}
		args = append([]string{inside}, args...)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.SysProcAttr, cmd.Dir, cmd.Env = &syscall.SysProcAttr{Chroot: root}, "/", []string{}
	said, err := cmd.CombinedOutput()
	if err == nil && len(said) == 0 {
		err = errors.New("it wrote nothing")
	}
	return string(said), err
}
