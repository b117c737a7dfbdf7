package main

import (
	"bytes"
	"crypto"
	"crypto/elliptic"
	"debug/elf"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/sigstore/sigstore/pkg/signature/dsse"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/images/product"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

const testVersion = "v0.0.1-rc.1"

// A release has all its files; their checksums, signatures and bills of materials hold, and the chart and the manifests name the images
// of its archive. A second one, of a copy of the sources in another folder, has the same bytes.
func TestRelease(t *testing.T) {
	netlab.Privileged(t) // apt's sandbox, for the gateway's image
	keyFile := filepath.Join(t.TempDir(), "release.key")
	private, _, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), func(bool) ([]byte, error) { return []byte("secret"), nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keyFile, private, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(passwordVariable, "secret")
	dir := releaseOf(t, "", settings{key: keyFile})

	t.Run("checksums", func(t *testing.T) { checkSums(t, dir) })
	t.Run("signatures", func(t *testing.T) { checkSignatures(t, dir) })
	t.Run("bills of materials", func(t *testing.T) { checkBills(t, dir) })
	t.Run("images", func(t *testing.T) { checkImages(t, dir) })
	t.Run("program", func(t *testing.T) {
		said, err := exec.CommandContext(t.Context(), filepath.Join(dir, "isthmusctl-linux-amd64"), "--version").CombinedOutput()
		if err != nil || !strings.Contains(string(said), testVersion+" (commit ") {
			t.Errorf("isthmusctl --version: %s (%v)", said, err)
		}
	})
	t.Run("gateway", func(t *testing.T) { checkMachine(t, dir) })
	t.Run("registry", func(t *testing.T) { checkRegistry(t, dir) })
	t.Run("again", func(t *testing.T) { checkAgain(t, dir) })
}

// releaseOf builds a release from a copy of this repository, or from itself, and returns its folder.
func releaseOf(t *testing.T, repository string, s settings) string {
	t.Helper()
	if repository != "" {
		t.Chdir(repository)
	}
	s.version, s.output, s.platforms, s.unclean = testVersion, filepath.Join(t.TempDir(), "release"), []string{"linux/amd64"}, true
	if s.images == nil {
		s.images = product.Names()
	}
	if err := build(t.Context(), t.Output(), s); err != nil {
		t.Fatal(err)
	}
	return s.output
}

func read(t *testing.T, path ...string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func untar(t *testing.T, archive, to string) {
	t.Helper()
	if said, err := exec.CommandContext(t.Context(), "tar", "-xf", archive, "-C", to).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, said)
	}
}

func checkSums(t *testing.T, dir string) {
	t.Helper()
	check := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", "--quiet", sumsFile)
	check.Dir = dir
	if said, err := check.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v\n%s", err, said)
	}
	var listed []string
	for line := range strings.Lines(string(read(t, dir, sumsFile))) {
		listed = append(listed, strings.TrimSpace(line[64:]))
	}
	want := []string{
		"image-agent-linux-amd64.spdx.json", "image-controller-linux-amd64.spdx.json", "image-gateway-controller-linux-amd64.spdx.json",
		"image-gateway-linux-amd64.spdx.json", "image-isthmusctl-linux-amd64.spdx.json", "isthmus-0.0.1-rc.1.tgz", "isthmus-crds.yaml",
		"isthmus-gateway-linux-amd64.spdx.json", "isthmus-gateway-linux-amd64.tar.gz", "isthmus-images.tar", "isthmus.krew.yaml", "isthmus.yaml", "isthmusctl-linux-amd64", "isthmusctl-linux-amd64.spdx.json", "isthmusctl-linux-amd64.tar.gz", "isthmusctl.rb",
	}
	if !slices.Equal(listed, want) {
		t.Errorf("files %q, want %q", listed, want)
	}
}

func checkSignatures(t *testing.T, dir string) {
	t.Helper()
	public, err := cryptoutils.UnmarshalPEMToPublicKey(read(t, dir, publicKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := signature.LoadVerifier(public, crypto.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	sums := read(t, dir, sumsFile)
	signed, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(read(t, dir, signatureFile))))
	if err != nil {
		t.Fatal(err)
	}
	if err := verifier.VerifySignature(bytes.NewReader(signed), bytes.NewReader(sums)); err != nil {
		t.Errorf("signature of the checksums: %v", err)
	}
	if err := verifier.VerifySignature(bytes.NewReader(signed), bytes.NewReader(sums[1:])); err == nil {
		t.Error("the signature holds for other checksums as well")
	}
	envelope := read(t, dir, provenanceFile)
	if err := dsse.WrapVerifier(verifier).VerifySignature(bytes.NewReader(envelope), nil); err != nil {
		t.Errorf("signature of the provenance: %v", err)
	}
	s := provenanceOf(t, envelope)
	if have, want := len(s.Subject), bytes.Count(sums, []byte("\n")); have != want || len(s.Predicate.BuildDefinition.ResolvedDependencies) != 1 {
		t.Errorf("the provenance is about %d files of %d", have, want)
	}
	images := unpack(t, dir)
	signatures := 0
	for name, d := range images.byName(t) {
		repository, tag, _ := strings.Cut(name, ":")
		if strings.HasPrefix(tag, "sha256-") {
			continue
		}
		signatures++
		payload, annotation := images.attached(t, repository, d.Digest, "sig")
		signed, err := base64.StdEncoding.DecodeString(annotation)
		if err != nil {
			t.Fatal(err)
		}
		if err := verifier.VerifySignature(bytes.NewReader(signed), bytes.NewReader(payload)); err != nil || !bytes.Contains(payload, []byte(d.Digest.String())) {
			t.Errorf("signature of %s: %v in %s", name, err, payload)
		}
		envelope, _ := images.attached(t, repository, d.Digest, "att")
		if err := dsse.WrapVerifier(verifier).VerifySignature(bytes.NewReader(envelope), nil); err != nil {
			t.Errorf("signature of the provenance of %s: %v", name, err)
		}
		if s := provenanceOf(t, envelope); len(s.Subject) != 1 || s.Subject[0].Digest["sha256"] != d.Digest.Hex {
			t.Errorf("the provenance of %s is about %v", name, s.Subject)
		}
	}
	if signatures != 6 {
		t.Errorf("%d artifacts are signed, want five images and the chart", signatures)
	}
}

// provenanceOf returns the statement in an envelope.
func provenanceOf(t *testing.T, envelope []byte) (s statement) {
	t.Helper()
	var sealed struct{ Payload []byte }
	if err := errors.Join(json.Unmarshal(envelope, &sealed), json.Unmarshal(sealed.Payload, &s)); err != nil {
		t.Fatal(err)
	}
	return s
}

// The archive for virtual machines has a static program that runs as it is, and the unit that starts it.
func checkMachine(t *testing.T, dir string) {
	t.Helper()
	to := t.TempDir()
	untar(t, filepath.Join(dir, "isthmus-gateway-linux-amd64.tar.gz"), to)
	if !bytes.Equal(read(t, to, "isthmus-gateway.service"), read(t, "../../deploy/systemd/isthmus-gateway.service")) {
		t.Error("the unit is not that of deploy/systemd")
	}
	if !bytes.Equal(read(t, to, "LICENSE"), read(t, "../../LICENSE")) {
		t.Error("the licence is not that of the repository")
	}
	program := filepath.Join(to, "isthmus-gateway")
	said, err := exec.CommandContext(t.Context(), program, "--version").CombinedOutput()
	if err != nil || !strings.Contains(string(said), testVersion+" (commit ") {
		t.Errorf("isthmus-gateway --version: %s (%v)", said, err)
	}
	f, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if libraries, err := f.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it needs libraries of the machine: %q, %v", libraries, err)
	}
}

func checkBills(t *testing.T, dir string) {
	t.Helper()
	bills, err := filepath.Glob(filepath.Join(dir, "*"+sbomSuffix))
	if err != nil || len(bills) != 7 {
		t.Fatalf("%q, want seven bills of materials", bills)
	}
	for _, bill := range bills {
		doc, err := spdxjson.Read(bytes.NewReader(read(t, bill)))
		if err != nil {
			t.Fatalf("%s: %v", filepath.Base(bill), err)
		}
		if err := spdxlib.ValidateDocument(doc); err != nil {
			t.Errorf("%s: %v", filepath.Base(bill), err)
		}
		for _, want := range []string{"stdlib", "golang.org/x/sys"} {
			if !strings.Contains(string(read(t, bill)), `"name": "`+want+`"`) {
				t.Errorf("%s does not name %s", filepath.Base(bill), want)
			}
		}
	}
	if gateway := string(read(t, dir, "image-gateway-linux-amd64.spdx.json")); !strings.Contains(gateway, "pkg:deb/debian/keepalived@") {
		t.Error("the gateway's bill of materials does not name keepalived")
	}
}

// images is an unpacked archive of images.
type images struct {
	dir  string
	path layout.Path
}

func unpack(t *testing.T, release string) images {
	t.Helper()
	i := images{dir: t.TempDir()}
	untar(t, filepath.Join(release, imagesFile), i.dir)
	var err error
	if i.path, err = layout.FromPath(i.dir); err != nil {
		t.Fatal(err)
	}
	return i
}

// byName returns the descriptors of the archive.
func (i images) byName(t *testing.T) map[string]v1.Descriptor {
	t.Helper()
	index, err := i.path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]v1.Descriptor{}
	for _, d := range manifest.Manifests {
		all[d.Annotations[ocispec.AnnotationRefName]] = d
	}
	return all
}

func (i images) blob(t *testing.T, digest v1.Hash) []byte {
	t.Helper()
	return read(t, i.dir, "blobs", digest.Algorithm, digest.Hex)
}

// attached returns the content of the artifact about an image, and the signature in its annotations.
func (i images) attached(t *testing.T, repository string, digest v1.Hash, suffix string) (content []byte, signature string) {
	t.Helper()
	name := repository + ":" + strings.ReplaceAll(digest.String(), ":", "-") + "." + suffix
	d, ok := i.byName(t)[name]
	if !ok {
		t.Fatalf("there is no %s", name)
	}
	img, err := i.path.Image(d.Digest)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	layer := manifest.Layers[0]
	return i.blob(t, layer.Digest), layer.Annotations[signatureAnnotation]
}

// The archive is a valid OCI layout, and the chart and the manifests name its images by digest.
func checkImages(t *testing.T, dir string) {
	t.Helper()
	have := unpack(t, dir)
	index, err := have.path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	chart := have.byName(t)["charts/isthmus:0.0.1-rc.1"]
	if chart.MediaType != types.OCIManifestSchema1 {
		t.Errorf("the chart is %+v", chart)
	}
	manifests := string(read(t, dir, manifestsFile))
	for _, name := range []string{"agent", "controller", "gateway", "gateway-controller"} {
		d := have.byName(t)["isthmus/"+name+":"+testVersion]
		of, err := index.ImageIndex(d.Digest)
		if err != nil {
			t.Fatalf("image of %s: %v", name, err)
		}
		if err := validate.Index(of); err != nil {
			t.Errorf("image of %s: %v", name, err)
		}
		rendered := "isthmus/" + name + ":" + testVersion + "@" + d.Digest.String()
		if strings.HasPrefix(name, "gateway") {
			continue // not part of the default installation
		}
		if !strings.Contains(manifests, "image: "+rendered+"\n") {
			t.Errorf("the manifests do not name %s", rendered)
		}
	}
	// As values they would survive an upgrade with --reuse-values, and pin the images of the former release.
	values := helm(t, "show", "values", filepath.Join(dir, "isthmus-0.0.1-rc.1.tgz"))
	if said, err := values.CombinedOutput(); err != nil || strings.Contains(string(said), "@sha256") || !strings.Contains(string(said), "\n  digests: {}\n") {
		t.Errorf("the digests are values of the chart (%v):\n%s", err, said)
	}
	packed := helm(t, "template", "isthmus",
		filepath.Join(dir, "isthmus-0.0.1-rc.1.tgz"), "--set", "image.registry=registry.example.org/team")
	said, err := packed.CombinedOutput()
	if err != nil || !strings.Contains(string(said), "image: registry.example.org/team/isthmus/agent:"+testVersion+"@sha256:") {
		t.Errorf("the packed chart: %v\n%s", err, said)
	}
}

// The released isthmusctl pushes the archive to a registry, from which Helm installs the chart.
func checkRegistry(t *testing.T, dir string) {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	to := strings.TrimPrefix(server.URL, "http://") + "/team"
	push := exec.CommandContext(t.Context(), filepath.Join(dir, "isthmusctl-linux-amd64"), "images", "push", to, "--from", filepath.Join(dir, imagesFile), "--plain-http")
	said, err := push.CombinedOutput()
	if err != nil || strings.Count(string(said), ".sig@sha256:") != 6 || strings.Count(string(said), ".att@sha256:") != 6 || strings.Count(string(said), "\n") != 18 {
		t.Fatalf("isthmusctl images push: %v\n%s", err, said)
	}
	install := helm(t, "template", "isthmus",
		"oci://"+to+"/charts/isthmus", "--version", "0.0.1-rc.1", "--plain-http", "--set", "image.registry="+to)
	said, err = install.CombinedOutput()
	if err != nil || !strings.Contains(string(said), "image: "+to+"/isthmus/controller:"+testVersion+"@sha256:") {
		t.Errorf("helm template: %v\n%s", err, said)
	}
}

// checkAgain builds the release in another folder, and compares everything that does not name the images which are left out.
func checkAgain(t *testing.T, first string) {
	t.Helper()
	copied := filepath.Join(t.TempDir(), "elsewhere")
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"git", "clone", "--quiet", "--no-hardlinks", root, copied},
		{"sh", "-c", "cd '" + root + "' && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t '" + copied + "'"},
	} {
		if said, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v\n%s", args, err, said)
		}
	}
	second := releaseOf(t, copied, settings{images: []string{"agent"}}) // one is enough, and takes a fifth of the time
	const agent = "isthmus/agent:" + testVersion
	if a, b := unpack(t, first).byName(t)[agent], unpack(t, second).byName(t)[agent]; a.Digest != b.Digest {
		t.Errorf("built twice, %s has the digests %s and %s", agent, a.Digest, b.Digest)
	}
	sums := string(read(t, first, sumsFile))
	for line := range strings.Lines(string(read(t, second, sumsFile))) {
		switch name := strings.TrimSpace(line[66:]); name {
		case imagesFile, manifestsFile, "isthmus-0.0.1-rc.1.tgz": // they name the other images
		default:
			if !strings.Contains(sums, line) {
				t.Errorf("built twice, %s differs", name)
			}
		}
	}
}

// Wrong settings of a user are reported before anything is built.
func TestSettings(t *testing.T) {
	t.Parallel()
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	private, _, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), nil)
	if err != nil {
		t.Fatal(err)
	}
	unpublished := filepath.Join(t.TempDir(), "release.key")
	if err := os.WriteFile(unpublished, private, 0o600); err != nil {
		t.Fatal(err)
	}
	good := settings{version: "v1.2.3", output: full, platforms: everywhere, unclean: true}
	for _, tt := range []struct {
		want   string
		change func(*settings)
	}{
		{`--version "1.2.3": want a semantic version with a v`, func(s *settings) { s.version = "1.2.3" }},
		{`--version "v1.2": want a semantic version with a v`, func(s *settings) { s.version = "v1.2" }},
		{"--output is missing", func(s *settings) { s.output = "" }},
		{"the folder is not empty; remove it, or name another", func(*settings) {}},
		{`--platforms: "linux/riscv64" is none of linux/amd64`, func(s *settings) { s.platforms = []string{"linux/riscv64"} }},
		{`--images: "agnet" is none of agent, controller`, func(s *settings) { s.images = []string{"agnet"} }},
		{"--platforms: name at least one of Linux", func(s *settings) { s.platforms = []string{"darwin/arm64"} }},
		{"its public key is not the newest of tools/release/published/KEYS", func(s *settings) { s.key, s.unclean = unpublished, false }},
		{"--key " + filepath.Join(full, "x") + ": PEM decoding failed", func(s *settings) { s.key = filepath.Join(full, "x") }},
	} {
		s := good
		tt.change(&s)
		if err := build(t.Context(), t.Output(), s); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", s, err, tt.want)
		}
	}
}

// helm is a command of the pinned Helm.
func helm(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	program, err := compile.Helm(t.Context(), "../..")
	if err != nil {
		t.Fatal(err)
	}
	return exec.CommandContext(t.Context(), program, args...)
}
