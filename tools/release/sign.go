package main

import (
	"bytes"
	"context"
	"crypto"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/sigstore/sigstore/pkg/signature/dsse"
)

// passwordVariable is the environment variable with the password of an encrypted key, as for cosign.
const passwordVariable = "COSIGN_PASSWORD"

// Files that exist only with a key.
const (
	publicKeyFile  = "isthmus.pub"
	signatureFile  = sumsFile + ".sig"
	provenanceFile = "isthmus.intoto.jsonl"
)

// key signs a release.
type key struct {
	signature.SignerVerifier
	public []byte // PEM
}

// readKey reads a private key: PKCS #8, PKCS #1 or SEC 1 in PEM, or an encrypted one of cosign.
func readKey(file string) (*key, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--key: %w", err)
	}
	private, err := cryptoutils.UnmarshalPEMToPrivateKey(text, func(bool) ([]byte, error) { return []byte(os.Getenv(passwordVariable)), nil })
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w; the password of an encrypted key is read from %s", file, err, passwordVariable)
	}
	signer, err := signature.LoadSignerVerifier(private, crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w", file, err)
	}
	public, err := signer.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w", file, err)
	}
	text, err = cryptoutils.MarshalPublicKeyToPEM(public)
	return &key{signer, text}, err
}

// signImage adds cosign's signature of an image, and its provenance, to the images
// (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md and ATTESTATION_SPEC.md).
func (r *release) signImage(to layout.Path, repository string, digest v1.Hash) error {
	if r.key == nil {
		return nil
	}
	var payload struct {
		Critical struct {
			Identity struct {
				Reference string `json:"docker-reference"`
			} `json:"identity"`
			Image struct {
				Digest string `json:"docker-manifest-digest"`
			} `json:"image"`
			Type string `json:"type"`
		} `json:"critical"`
		Optional map[string]string `json:"optional"`
	}
	payload.Critical.Identity.Reference = repository
	payload.Critical.Image.Digest = digest.String()
	payload.Critical.Type = "cosign container image signature"
	text, err := json.Marshal(payload)
	if err != nil {
		return err
	}
	signed, err := r.key.SignMessage(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("sign %s: %w", repository, err)
	}
	envelope, err := r.provenance(subject{repository, map[string]string{digest.Algorithm: digest.Hex}})
	if err != nil {
		return err
	}
	return errors.Join(
		attach(to, repository, digest, "sig", static.NewLayer(text, "application/vnd.dev.cosign.simplesigning.v1+json"),
			map[string]string{signatureAnnotation: base64.StdEncoding.EncodeToString(signed)}),
		attach(to, repository, digest, "att", static.NewLayer(envelope, "application/vnd.dsse.envelope.v1+json"),
			map[string]string{signatureAnnotation: "", "predicateType": predicateType}),
	)
}

// signatureAnnotation is the annotation of a layer with cosign's signature of its content. It is empty if the content has its own.
const signatureAnnotation = "dev.cosignproject.cosign/signature"

// attach adds an artifact about an image, under the tag that cosign derives from the digest.
func attach(to layout.Path, repository string, digest v1.Hash, suffix string, layer v1.Layer, annotations map[string]string) error {
	id, err := layer.DiffID()
	if err != nil {
		return err
	}
	config, err := json.Marshal(v1.ConfigFile{RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{id}}})
	if err != nil {
		return err
	}
	img, err := newArtifact(types.OCIConfigJSON, config, nil, []v1.Layer{layer}, annotations)
	if err != nil {
		return err
	}
	return to.AppendImage(img, layout.WithAnnotations(map[string]string{
		ocispec.AnnotationRefName: repository + ":" + strings.ReplaceAll(digest.String(), ":", "-") + "." + suffix,
	}))
}

// sign signs the checksums, and states what the release was built from. Without a key it says that nothing is signed.
func (r *release) sign(context.Context) error {
	if r.key == nil {
		r.step("  nothing is signed, because there is no --key")
		return nil
	}
	sums, err := os.ReadFile(r.path(sumsFile))
	if err != nil {
		return err
	}
	signed, err := r.key.SignMessage(bytes.NewReader(sums))
	if err != nil {
		return fmt.Errorf("sign %s: %w", sumsFile, err)
	}
	var files []subject
	for line := range strings.Lines(string(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		files = append(files, subject{name, map[string]string{"sha256": sum}})
	}
	envelope, err := r.provenance(files...)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(r.path(signatureFile), []byte(base64.StdEncoding.EncodeToString(signed)+"\n"), 0o644),
		os.WriteFile(r.path(publicKeyFile), r.key.public, 0o644),
		os.WriteFile(r.path(provenanceFile), append(envelope, '\n'), 0o644),
	)
}

// statement is an in-toto statement (https://in-toto.io/Statement/v1) with SLSA provenance (https://slsa.dev/spec/v1.0/provenance).
type statement struct {
	Type          string     `json:"_type"`
	Subject       []subject  `json:"subject"`
	PredicateType string     `json:"predicateType"`
	Predicate     provenance `json:"predicate"`
}

// subject is a file or an image of the release.
type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

type provenance struct {
	BuildDefinition struct {
		BuildType            string            `json:"buildType"`
		ExternalParameters   map[string]string `json:"externalParameters"`
		ResolvedDependencies []dependency      `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder struct {
			ID string `json:"id"`
		} `json:"builder"`
	} `json:"runDetails"`
}

type dependency struct {
	URI    string            `json:"uri"`
	Digest map[string]string `json:"digest"`
}

// predicateType is that of SLSA provenance.
const predicateType = "https://slsa.dev/provenance/v1"

// provenance returns the signed statement about the source of files or images, as a DSSE envelope
// (https://github.com/secure-systems-lab/dsse).
func (r *release) provenance(of ...subject) ([]byte, error) {
	s := statement{Type: "https://in-toto.io/Statement/v1", Subject: of, PredicateType: predicateType}
	definition := &s.Predicate.BuildDefinition
	definition.BuildType = homepage + "/tree/" + r.version + "/tools/release"
	definition.ExternalParameters = map[string]string{"version": r.version, "platforms": strings.Join(r.platforms, ",")}
	definition.ResolvedDependencies = []dependency{{"git+" + homepage + "@refs/tags/" + r.version, map[string]string{"gitCommit": r.stamp.Commit}}}
	s.Predicate.RunDetails.Builder.ID = homepage + "/tree/" + r.version + "/tools/release"
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	envelope, err := dsse.WrapSigner(r.key, "application/vnd.in-toto+json").SignMessage(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("sign the provenance: %w", err)
	}
	return envelope, nil
}
