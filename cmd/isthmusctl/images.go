package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
)

func imagesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "images",
		Short:   "Copy the images and the chart of a release",
		Example: "  isthmusctl images push registry.example.org/team --from isthmus-images.tar",
		Args:    usage.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(imagesPushCommand())
	return cmd
}

func imagesPushCommand() *cobra.Command {
	var from string
	var plain bool
	cmd := &cobra.Command{
		Use:   "push REGISTRY --from FILE",
		Short: "Push the images and the chart of a release to a registry",
		Long: `Push the images and the chart of a release, with their signatures, to a registry. REGISTRY is a host, or a host and a
path; the chart's value image.registry is the same. Digests stay what they are. Credentials are those of "docker login" or "podman login"
on this machine. Content that the registry has already is not sent again.`,
		Example: `  isthmusctl images push registry.example.org/team --from isthmus-images.tar
  isthmusctl images push registry.internal:5000 --from isthmus-images.tar --plain-http`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("name one registry, such as registry.example.org/team; see %s --help", cmd.CommandPath())
			}
			if strings.Contains(args[0], "://") {
				return fmt.Errorf("registry %q: name the host and path alone; --plain-http is for a registry without TLS", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return pushImages(cmd.Context(), cmd.OutOrStdout(), from, args[0], plain)
		},
	}
	cmd.Flags().StringVar(&from, "from", "isthmus-images.tar", "archive of the release")
	cmd.Flags().BoolVar(&plain, "plain-http", false, "the registry has no TLS")
	return cmd
}

// pushImages pushes all that an archive names to a registry, and prints where each went.
func pushImages(ctx context.Context, out io.Writer, from, registry string, plain bool) (err error) {
	tmp, err := os.MkdirTemp("", "isthmus-images-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	if err := unpackImages(from, tmp); err != nil {
		return fmt.Errorf("--from: %w", err)
	}
	index, err := layout.ImageIndexFromPath(tmp)
	if err != nil {
		return fmt.Errorf("--from %s: it is not the archive of a release: %w", from, err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return fmt.Errorf("--from %s: it is not the archive of a release: %w", from, err)
	}
	pusher, err := remote.NewPusher(remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return err
	}
	var how []name.Option
	if plain {
		how = append(how, name.Insecure)
	}
	for _, d := range manifest.Manifests {
		text := strings.TrimSuffix(registry, "/") + "/" + d.Annotations[ocispec.AnnotationRefName]
		ref, err := name.NewTag(text, append(how, name.StrictValidation)...)
		if err != nil {
			return fmt.Errorf("registry %q: %w", registry, err)
		}
		image, err := imageOf(index, d)
		if err != nil {
			return fmt.Errorf("--from %s: %w", from, err)
		}
		if err := pusher.Push(ctx, ref, image); err != nil {
			return fmt.Errorf("push %s: %w", ref, err)
		}
		fmt.Fprintf(out, "%s@%s\n", ref, d.Digest)
	}
	return nil
}

// imageOf returns an image, or an index of the images of several architectures.
func imageOf(index v1.ImageIndex, d v1.Descriptor) (remote.Taggable, error) {
	if d.MediaType.IsIndex() {
		return index.ImageIndex(d.Digest)
	}
	return index.Image(d.Digest)
}

// unpackImages unpacks an OCI archive into a folder.
func unpackImages(file, to string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s is not the archive of a release: %w", file, err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if !filepath.IsLocal(h.Name) {
			return fmt.Errorf("%s is not the archive of a release: it has the path %q", file, h.Name)
		}
		if err := unpackFile(in, filepath.Join(to, filepath.FromSlash(h.Name)), h.Size); err != nil {
			return err
		}
	}
}

func unpackFile(in io.Reader, path string, size int64) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.CopyN(out, in, size)
	return errors.Join(err, out.Close())
}
