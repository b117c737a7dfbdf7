// Images builds the product's container images. Each contains a static binary and nothing else. The gateway's image also
// contains Debian 12's keepalived with the libraries that it needs.
//
//	go run ./tools/images -o DIR controller agent
//
// writes DIR/controller.tar and DIR/agent.tar, OCI archives named isthmus/controller:dev and isthmus/agent:dev. The same source
// and the same Debian packages produce the same bytes. No container engine is needed.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/images/deb"
	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// image describes the image of a product.
type image struct {
	user, about string
	program     string // path of the Debian program that the product calls; empty: none
}

// images maps products to their images.
var images = map[string]image{
	"controller":         {user: "65532:65532", about: "Isthmus controller: exports, imports and ClusterSetIPs of one cluster"},
	"gateway-controller": {user: "65532:65532", about: "Isthmus gateway controller: addresses of Services of type LoadBalancer"},
	// In a container the kernel gives capabilities to root only; the chart drops all unneeded ones.
	"agent":   {user: "0:0", about: "Isthmus agent: eBPF dataplane and DNS of one node"},
	"gateway": {user: "0:0", about: "Isthmus gateway: balances and announces VIPs of Services", program: "/usr/sbin/keepalived"},
}

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var dir, tag string
	cmd := &cobra.Command{
		Use:           "images [-o DIR] [--tag TAG] [controller] [agent] [gateway] [gateway-controller]",
		Short:         "Build the product's container images as OCI archives",
		Example:       "  go run ./tools/images -o bin/images controller agent",
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, names []string) error {
			if len(names) == 0 {
				names = slices.Sorted(maps.Keys(images))
			}
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			for _, name := range names {
				if err := build(cmd.Context(), cmd.OutOrStdout(), dir, name, tag); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&dir, "output", "o", "bin/images", "directory for the archives")
	cmd.Flags().StringVar(&tag, "tag", "dev", "tag of the images")
	return cmd
}

func build(ctx context.Context, out io.Writer, dir, product, tag string) (err error) {
	image, known := images[product]
	if !known {
		return fmt.Errorf("no image is named %q; available: %s", product, strings.Join(slices.Sorted(maps.Keys(images)), ", "))
	}
	tmp, err := os.MkdirTemp("", "isthmus-image-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	name := "isthmus-" + product
	binary := filepath.Join(tmp, name)
	build := compile.Go(ctx, "build", "-ldflags=-s -w", "-o", binary, "github.com/isthmus-net/isthmus/cmd/"+name)
	build.Env = append(build.Env, "GOOS=linux")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", name, err, output)
	}
	archive := filepath.Join(dir, product+".tar")
	err = oci.Write(archive, oci.Spec{
		Names:      []string{"isthmus/" + product + ":" + tag},
		Entrypoint: []string{"/" + name},
		Env:        environment(image),
		User:       image.user,
		Labels: map[string]string{
			"org.opencontainers.image.title":       name,
			"org.opencontainers.image.description": image.about,
			"org.opencontainers.image.licenses":    licences(image),
		},
	}, func(l *oci.Layer) error {
		if err := l.File("/"+name, binary, 0o755); err != nil || image.program == "" {
			return err
		}
		return deb.Add(ctx, l, image.program, filepath.Base(image.program))
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, archive)
	return nil
}

// environment returns the PATH by which a product finds the program that it calls.
func environment(i image) []string {
	if i.program == "" {
		return nil
	}
	return []string{"PATH=" + filepath.Dir(i.program)}
}

// licences returns the SPDX expression of an image's licences. The texts of the Debian packages' licences are in usr/share/doc.
func licences(i image) string {
	if i.program == "" {
		return "Apache-2.0"
	}
	return "Apache-2.0 AND GPL-2.0-or-later"
}
