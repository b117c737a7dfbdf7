// Package product makes the images of Isthmus. Each contains a static program and nothing else; the gateway's also contains Debian
// 12's keepalived with the libraries that it needs.
//
// In: the name of a product and the architecture. Out: what package oci needs to write its image. The same source and the same
// Debian packages produce the same bytes.
package product

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/images/deb"
	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// product describes an image.
type product struct {
	user, about string
	program     string // path of the Debian program that the product calls; empty: none
}

var products = map[string]product{
	"isthmusctl":         {user: "65532:65532", about: "isthmusctl: shows and changes the state of Isthmus in a cluster"},
	"controller":         {user: "65532:65532", about: "Isthmus controller: exports, imports and ClusterSetIPs of one cluster"},
	"gateway-controller": {user: "65532:65532", about: "Isthmus gateway controller: addresses of Services of type LoadBalancer"},
	// In a container the kernel gives capabilities to root only; the chart drops all unneeded ones.
	"agent":   {user: "0:0", about: "Isthmus agent: eBPF dataplane and DNS of one node"},
	"gateway": {user: "0:0", about: "Isthmus gateway: balances and announces VIPs of Services", program: "/usr/sbin/keepalived"},
}

// Names lists the products, sorted.
func Names() []string { return slices.Sorted(maps.Keys(products)) }

// ProgramOf returns the name of a product's program.
func ProgramOf(name string) string {
	if name == "isthmusctl" {
		return name
	}
	return "isthmus-" + name
}

// Image is what an image of a product is made of.
type Image struct {
	// Spec lacks the names of the image.
	Spec oci.Spec
	// Program is the compiled program on this machine.
	Program string
	// Packages are the Debian packages with files in the image. Fill sets them.
	Packages []deb.Package

	debian string
}

// Compile compiles the program of a product into dir, for an architecture that Go and Debian name alike; empty: this machine's.
func Compile(ctx context.Context, dir, name, architecture string, version compile.Version) (*Image, error) {
	p, known := products[name]
	if !known {
		return nil, fmt.Errorf("no image is named %q; available: %s", name, strings.Join(Names(), ", "))
	}
	program := ProgramOf(name)
	i := &Image{Program: filepath.Join(dir, program), debian: p.program, Spec: oci.Spec{
		Architecture: architecture, Created: version.Date,
		Entrypoint: []string{"/" + program}, User: p.user,
		Labels: map[string]string{
			ocispec.AnnotationTitle:       program,
			ocispec.AnnotationDescription: p.about,
			ocispec.AnnotationLicenses:    "Apache-2.0",
		},
	}}
	if p.program != "" { // the texts of the Debian packages' licences are in usr/share/doc
		i.Spec.Env = []string{"PATH=" + filepath.Dir(p.program)}
		i.Spec.Labels[ocispec.AnnotationLicenses] = "Apache-2.0 AND GPL-2.0-or-later"
	}
	build := compile.Go(ctx, "build", version.LinkerFlags(), "-o", i.Program, "github.com/isthmus-net/isthmus/cmd/"+program)
	build.Env = append(build.Env, "GOOS=linux")
	if architecture != "" {
		build.Env = append(build.Env, "GOARCH="+architecture)
	}
	if output, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build %s: %w\n%s", program, err, output)
	}
	return i, nil
}

// Others returns the paths of the image's programs besides its entry point.
func (i *Image) Others() []string {
	if i.debian == "" {
		return nil
	}
	return []string{i.debian}
}

// Fill writes the image's files.
func (i *Image) Fill(ctx context.Context, l *oci.Layer) (err error) {
	if err = l.File("/"+filepath.Base(i.Program), i.Program, 0o755); err != nil || i.debian == "" {
		return err
	}
	i.Packages, err = deb.Add(ctx, l, i.Spec.Architecture, i.debian, filepath.Base(i.debian))
	return err
}
