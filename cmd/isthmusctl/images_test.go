package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// All that an archive names is in the registry afterwards, under the same digest; pushed again, nothing changes.
func TestPushImages(t *testing.T) {
	t.Parallel()
	index, err := random.Index(1000, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	chart, err := random.Image(1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	from := archiveOf(t, map[string]any{"isthmus/agent:v0.1.0": index, "charts/isthmus:0.1.0": chart})
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	to := strings.TrimPrefix(server.URL, "http://") + "/team"
	for range 2 {
		var out bytes.Buffer
		if err := pushImages(t.Context(), &out, from, to+"/", true); err != nil {
			t.Fatal(err)
		}
		for image, of := range map[string]interface{ Digest() (v1.Hash, error) }{"isthmus/agent:v0.1.0": index, "charts/isthmus:0.1.0": chart} {
			digest, err := of.Digest()
			if err != nil {
				t.Fatal(err)
			}
			ref, err := name.ParseReference(to + "/" + image)
			if err != nil {
				t.Fatal(err)
			}
			if have, err := remote.Head(ref, remote.WithContext(t.Context())); err != nil || have.Digest != digest {
				t.Errorf("%s: %+v, %v, want digest %s", ref, have, err, digest)
			}
			if want := fmt.Sprintf("%s/%s@%s\n", to, image, digest); !strings.Contains(out.String(), want) {
				t.Errorf("output %q, want %q in it", out.String(), want)
			}
		}
	}
}

// guarded starts a registry that one user may use, and returns its host.
func guarded(t *testing.T, user, password string) string {
	t.Helper()
	all := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name, secret, _ := r.BasicAuth(); name != user || secret != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		all.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// login writes a file as `docker login` and `helm registry login` do.
func login(t *testing.T, file, host, user, password string) {
	t.Helper()
	secret := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	if err := os.WriteFile(file, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, host, secret), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A registry with a password takes images with the credentials of docker's configuration, and gives a chart for those or Helm's own.
func TestCredentials(t *testing.T) {
	host := guarded(t, "robot", "secret")
	docker, helm, none := t.TempDir(), filepath.Join(t.TempDir(), "registry.json"), t.TempDir()
	login(t, filepath.Join(docker, "config.json"), host, "robot", "secret")
	login(t, helm, host, "robot", "secret")
	for _, variable := range []string{"DOCKER_CONFIG", "HOME", "XDG_RUNTIME_DIR", "HELM_CONFIG_HOME"} {
		t.Setenv(variable, none)
	}
	packed := &bytes.Buffer{}
	compressed := gzip.NewWriter(packed)
	w := tar.NewWriter(compressed)
	about := "apiVersion: v2\nname: isthmus\nversion: 0.1.0\n"
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "isthmus/Chart.yaml", Size: int64(len(about))})
	_, err2 := w.Write([]byte(about))
	if err := errors.Join(err, err2, w.Close(), compressed.Close()); err != nil {
		t.Fatal(err)
	}
	chart, err := mutate.AppendLayers(empty.Image, static.NewLayer(packed.Bytes(), "application/vnd.cncf.helm.chart.content.v1.tar+gzip"))
	if err != nil {
		t.Fatal(err)
	}
	chart = mutate.ConfigMediaType(mutate.MediaType(chart, types.OCIManifestSchema1), "application/vnd.cncf.helm.config.v1+json")
	from := archiveOf(t, map[string]any{"charts/isthmus:0.1.0": chart})
	push := func() error { return pushImages(t.Context(), io.Discard, from, host+"/team", true) }
	load := func() error {
		c, err := loadChart("oci://"+host+"/team/charts/isthmus:0.1.0", true)
		if err == nil && c.Metadata.Version != "0.1.0" {
			t.Errorf("it loads chart %+v", c.Metadata)
		}
		return err
	}
	for want, do := range map[string]func() error{"401 Unauthorized": push, "credential not found": load} {
		if err := do(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without credentials: %v, want %q", err, want)
		}
	}
	t.Setenv("DOCKER_CONFIG", docker)
	if err := errors.Join(push(), load()); err != nil {
		t.Errorf("with docker's credentials: %v", err)
	}
	t.Setenv("DOCKER_CONFIG", none)
	t.Setenv("HELM_REGISTRY_CONFIG", helm)
	if err := load(); err != nil {
		t.Errorf("load with Helm's credentials: %v", err)
	}
}

// A wrong archive or registry is named, and so is the flag.
func TestPushNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text, outside := filepath.Join(dir, "text"), filepath.Join(dir, "outside.tar")
	if err := os.WriteFile(text, []byte("no archive"), 0o600); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "../evil"}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(outside, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	good := archiveOf(t, map[string]any{"isthmus/agent:v0.1.0": empty.Image})
	for want, args := range map[string][2]string{
		"--from: open " + filepath.Join(dir, "none") + ": no such file": {filepath.Join(dir, "none"), "registry.example.org"},
		text + " is not the archive of a release":                       {text, "registry.example.org"},
		`it has the path "../evil"`:                                     {outside, "registry.example.org"},
		`registry "registry.example.org/Team"`:                          {good, "registry.example.org/Team"},
	} {
		if err := pushImages(t.Context(), io.Discard, args[0], args[1], false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
}

// archiveOf writes an OCI archive with images and indexes by name.
func archiveOf(t *testing.T, named map[string]any) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	to, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for name, of := range named {
		with := layout.WithAnnotations(map[string]string{ocispec.AnnotationRefName: name})
		switch of := of.(type) {
		case v1.ImageIndex:
			err = to.AppendIndex(of, with)
		case v1.Image:
			err = to.AppendImage(of, with)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "isthmus-images.tar")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	w := tar.NewWriter(out)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return file
}
