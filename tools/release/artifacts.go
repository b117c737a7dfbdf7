package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/images/product"
)

// homepage is where the project lives; documents of a release name it.
const homepage = "https://github.com/isthmus-net/isthmus"

// imagesFile is the OCI archive with all images, the chart, and their signatures.
const imagesFile = "isthmus-images.tar"

// artifacts builds the images, the chart and the manifests, which name the images by digest, and imagesFile.
func (r *release) artifacts(ctx context.Context) (err error) {
	tmp, err := os.MkdirTemp("", "isthmus-release-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	folder := filepath.Join(tmp, "layout")
	to, err := layout.Write(folder, empty.Index)
	if err != nil {
		return err
	}
	digests := map[string]string{}
	built, err := r.build(ctx, tmp)
	if err != nil {
		return err
	}
	for i, name := range r.images {
		index := built[i]
		digest, err := index.Digest()
		if err != nil {
			return err
		}
		digests["isthmus/"+name] = digest.String()
		if err := to.AppendIndex(index, named("isthmus/"+name, r.version)); err != nil {
			return err
		}
		if err := r.signImage(to, "isthmus/"+name, digest); err != nil {
			return err
		}
	}
	r.step("  chart and manifests")
	if err := r.chart(ctx, tmp, to, digests); err != nil {
		return err
	}
	return archive(folder, r.path(imagesFile), r.stamp.Date)
}

// build builds all images, beside each other: much of it waits for downloads, and linkers use one CPU.
func (r *release) build(ctx context.Context, tmp string) ([]v1.ImageIndex, error) {
	built := make([]v1.ImageIndex, len(r.images))
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(2)
	for i, name := range r.images {
		all.Go(func() (err error) {
			built[i], err = r.image(ctx, filepath.Join(tmp, name), name)
			r.step("  %s", name)
			return err
		})
	}
	return built, all.Wait()
}

// named gives an image its names in the archive: that for skopeo and the like, and that for containerd.
func named(repository, tag string) layout.Option {
	short := repository + ":" + tag
	full, _ := oci.FullName(short) // of a constant, and of a version that was checked
	return layout.WithAnnotations(map[string]string{
		ocispec.AnnotationRefName: short,
		oci.NameAnnotation:        full,
	})
}

// image builds the image of a product for all architectures.
func (r *release) image(ctx context.Context, dir, name string) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var labels map[string]string
	for _, architecture := range r.architectures() {
		into := filepath.Join(dir, architecture)
		if err := os.MkdirAll(into, 0o755); err != nil {
			return nil, err
		}
		built, err := product.Compile(ctx, into, name, architecture, r.stamp)
		if err != nil {
			return nil, err
		}
		labels = r.annotations(built.Spec.Labels)
		built.Spec.Labels = labels
		img, err := oci.Compressed(built.Spec, func(l *oci.Layer) error { return built.Fill(ctx, l) })
		if err != nil {
			return nil, fmt.Errorf("image %s for %s: %w", name, architecture, err)
		}
		img = mutate.Annotations(img, labels).(v1.Image) //nolint:forcetypeassert // it returns what it was given
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: architecture}},
		})
		if err := r.describe(billOf(name, architecture), built.Program, built.Packages); err != nil {
			return nil, err
		}
		if name == "gateway" {
			if err := r.machine(architecture, built.Program); err != nil {
				return nil, err
			}
		}
	}
	return mutate.Annotations(index, labels).(v1.ImageIndex), nil //nolint:forcetypeassert // it returns what it was given
}

// billOf names the bill of materials of an image.
func billOf(name, architecture string) string {
	return "image-" + name + "-linux-" + architecture
}

// annotations returns what an image states about itself, by the keys of the OCI image specification.
func (r *release) annotations(own map[string]string) map[string]string {
	all := map[string]string{
		ocispec.AnnotationCreated:       r.stamp.Date.Format(time.RFC3339),
		ocispec.AnnotationRevision:      r.stamp.Commit,
		ocispec.AnnotationVersion:       r.version,
		ocispec.AnnotationSource:        homepage,
		ocispec.AnnotationURL:           homepage,
		ocispec.AnnotationDocumentation: homepage + "/tree/" + r.version + "/docs",
		ocispec.AnnotationVendor:        "Isthmus",
	}
	maps.Copy(all, own)
	return all
}

// archive writes the files of a folder into a tar, sorted by name.
func archive(folder, to string, date time.Time) error {
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	err = filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: filepath.ToSlash(name), Mode: 0o644, Size: info.Size(), ModTime: date, Format: tar.FormatUSTAR,
		}); err != nil {
			return err
		}
		in, err := os.Open(path)
		if err != nil {
			return err
		}
		defer in.Close()
		_, err = io.Copy(w, in)
		return err
	})
	return errors.Join(err, w.Close(), out.Close())
}
