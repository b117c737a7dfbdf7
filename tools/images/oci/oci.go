// Package oci makes container images, without a container engine. An image has one layer, which the caller fills. The same input
// produces the same bytes.
//
// In: a Spec and a function that fills the layer. Out: an image, or a tar file with it in the OCI image layout, which `ctr images
// import` and other engines accept. Names may be short, as in a pod; the archive contains the full form that a kubelet looks for.
package oci

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// NameAnnotation is the annotation in which containerd expects the full name of an image:
// https://github.com/containerd/containerd/blob/main/core/images/annotations.go
const NameAnnotation = "io.containerd.image.name"

// Spec describes an image except for its files.
type Spec struct {
	Names      []string // at least one, "isthmus/agent:dev"; short forms allowed
	Entrypoint []string
	Env        []string
	User       string // "uid:gid", empty means root
	Labels     map[string]string
	// Architecture is that of the programs, as Go names it; empty: this machine's.
	Architecture string
	// Created is the time that the image states; zero: none.
	Created time.Time
}

// Image is an image in an OCI archive, under one of its names.
type Image struct {
	Name   string // full form
	Digest string // of the manifest, "sha256:..."
}

// FullName returns the name under which containerd stores an image, such as docker.io/nicolaka/netshoot:v0.15 for
// nicolaka/netshoot:v0.15. A missing tag means "latest".
func FullName(name string) (string, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return "", fmt.Errorf("image name %q: %w", name, err)
	}
	return reference.TagNameOnly(named).String(), nil
}

// Write writes the archive to file, replacing it atomically.
func Write(file string, spec Spec, fill func(*Layer) error) (err error) {
	if len(spec.Names) == 0 {
		return errors.New("image without a name")
	}
	// The temporary directory is beside the target, so that renaming stays within one file system.
	tmp, err := os.MkdirTemp(filepath.Dir(file), ".oci-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	layer, err := writeLayer(filepath.Join(tmp, "layer"), fill)
	if err != nil {
		return fmt.Errorf("layer of %s: %w", spec.Names[0], err)
	}
	img, err := assemble(spec, layer)
	if err != nil {
		return fmt.Errorf("image %s: %w", spec.Names[0], err)
	}
	archive := filepath.Join(tmp, "archive")
	if err := writeArchive(archive, spec.Names, img, layer); err != nil {
		return fmt.Errorf("archive %s: %w", file, err)
	}
	return os.Rename(archive, file)
}

// Compressed returns an image with a compressed layer, as registries hold it. Its layer is in memory.
func Compressed(spec Spec, fill func(*Layer) error) (img v1.Image, err error) {
	tmp, err := os.MkdirTemp("", "isthmus-oci-*")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	plain, err := writeLayer(filepath.Join(tmp, "layer"), fill)
	if err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	var content bytes.Buffer
	w := gzip.NewWriter(&content)
	if err := copyFile(w, plain.path); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	return assemble(spec, layer)
}

// Read returns the named images of an archive.
func Read(file string) ([]Image, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%s is not an OCI archive: no index.json", file)
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		if path.Clean(h.Name) != "index.json" {
			continue
		}
		index, err := v1.ParseIndexManifest(in)
		if err != nil {
			return nil, fmt.Errorf("index of %s: %w", file, err)
		}
		var images []Image
		for _, m := range index.Manifests {
			if name := m.Annotations[NameAnnotation]; name != "" {
				images = append(images, Image{Name: name, Digest: m.Digest.String()})
			}
		}
		if len(images) == 0 {
			return nil, fmt.Errorf("%s names no image", file)
		}
		return images, nil
	}
}

func assemble(spec Spec, layer v1.Layer) (v1.Image, error) {
	img, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layer)
	if err != nil {
		return nil, err
	}
	img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Architecture, config.OS = cmp.Or(spec.Architecture, runtime.GOARCH), "linux"
	config.Created = v1.Time{Time: spec.Created}
	config.Config = v1.Config{
		Entrypoint: spec.Entrypoint,
		Env:        spec.Env,
		User:       spec.User,
		Labels:     spec.Labels,
	}
	return mutate.ConfigFile(img, config)
}

func writeArchive(file string, names []string, img v1.Image, layer *layerFile) error {
	manifest, err := img.RawManifest()
	if err != nil {
		return err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	for _, name := range names {
		full, err := FullName(name)
		if err != nil {
			return err
		}
		index.Manifests = append(index.Manifests, v1.Descriptor{
			MediaType:   types.OCIManifestSchema1,
			Size:        int64(len(manifest)),
			Digest:      digest,
			Annotations: map[string]string{NameAnnotation: full},
		})
	}
	indexJSON, err := json.Marshal(index)
	if err != nil {
		return err
	}

	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	err = errors.Join(
		addBytes(w, "oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)),
		addBytes(w, "index.json", indexJSON),
		addBytes(w, blob(digest.Hex), manifest),
		addBytes(w, blob(hash(config)), config),
		addFile(w, blob(layer.sum), layer.path, 0o644),
		w.Close(),
	)
	return errors.Join(err, out.Close())
}

func blob(hex string) string { return "blobs/sha256/" + hex }

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func addBytes(w *tar.Writer, name string, b []byte) error {
	if err := w.WriteHeader(header(name, int64(len(b)), 0o644)); err != nil {
		return err
	}
	_, err := w.Write(b)
	return err
}

func addFile(w *tar.Writer, name, file string, mode int64) error {
	st, err := os.Stat(file)
	if err != nil {
		return err
	}
	if err := w.WriteHeader(header(name, st.Size(), mode)); err != nil {
		return err
	}
	return copyFile(w, file)
}

func copyFile(w io.Writer, file string) error {
	in, err := os.Open(file)
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = io.Copy(w, in)
	return err
}

// header sets the same owner and time for every file, so that archives depend on content alone.
func header(name string, size, mode int64) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: mode, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
}

// Layer receives the files of an image. Paths are absolute paths in the image. Missing parent directories are created. The
// first entry of a path wins; later ones are dropped.
type Layer struct {
	w    *tar.Writer
	seen map[string]bool
}

// File copies a file of the host into the image.
func (l *Layer) File(name, source string, mode int64) error {
	name, fresh, err := l.claim(name)
	if err != nil || !fresh {
		return err
	}
	return addFile(l.w, name, source, mode)
}

// Text writes a small file.
func (l *Layer) Text(name, content string) error {
	name, fresh, err := l.claim(name)
	if err != nil || !fresh {
		return err
	}
	return addBytes(l.w, name, []byte(content))
}

// Symlink creates a symbolic link from name to target.
func (l *Layer) Symlink(name, target string) error {
	return l.Entry(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

// Dir creates a directory.
func (l *Layer) Dir(name string, mode int64) error {
	return l.Entry(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}, nil)
}

// Entry copies an entry of another tar, with owner and time normalized.
func (l *Layer) Entry(h *tar.Header, content io.Reader) error {
	name, fresh, err := l.claim(h.Name)
	if err != nil || !fresh {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		name += "/"
	}
	own := header(name, h.Size, h.Mode)
	own.Typeflag = h.Typeflag
	own.Linkname = h.Linkname
	if h.Typeflag == tar.TypeLink {
		own.Linkname = clean(h.Linkname)
	}
	if err := l.w.WriteHeader(own); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	if _, err := io.Copy(l.w, content); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	return nil
}

// Has reports whether the layer contains a path already.
func (l *Layer) Has(name string) bool { return l.seen[clean(name)] }

// claim returns the name inside the tar, and whether it is new. It creates the parents.
func (l *Layer) claim(name string) (string, bool, error) {
	name = clean(name)
	if name == "" || l.seen[name] {
		return name, false, nil
	}
	if parent := path.Dir(name); parent != "." {
		if err := l.Dir(parent, 0o755); err != nil {
			return name, false, err
		}
	}
	l.seen[name] = true
	return name, true, nil
}

// clean returns the same name for "./usr/bin/", "/usr/bin" and "usr/bin".
func clean(name string) string {
	return strings.TrimPrefix(path.Clean("/"+name), "/")
}

// layerFile is an uncompressed layer in a file. It implements go-containerregistry's v1.Layer.
type layerFile struct {
	path string
	sum  string
	size int64
}

func writeLayer(file string, fill func(*Layer) error) (*layerFile, error) {
	out, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	sum := sha256.New()
	w := tar.NewWriter(io.MultiWriter(out, sum))
	if err := fill(&Layer{w: w, seen: map[string]bool{}}); err != nil {
		return nil, err
	}
	if err := errors.Join(w.Close(), out.Close()); err != nil {
		return nil, err
	}
	st, err := os.Stat(file)
	if err != nil {
		return nil, err
	}
	return &layerFile{path: file, sum: hex.EncodeToString(sum.Sum(nil)), size: st.Size()}, nil
}

func (l *layerFile) Digest() (v1.Hash, error)             { return v1.Hash{Algorithm: "sha256", Hex: l.sum}, nil }
func (l *layerFile) DiffID() (v1.Hash, error)             { return l.Digest() }
func (l *layerFile) Compressed() (io.ReadCloser, error)   { return os.Open(l.path) }
func (l *layerFile) Uncompressed() (io.ReadCloser, error) { return os.Open(l.path) }
func (l *layerFile) Size() (int64, error)                 { return l.size, nil }
func (l *layerFile) MediaType() (types.MediaType, error)  { return types.OCIUncompressedLayer, nil }
