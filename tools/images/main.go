// Images builds the product's container images: a static binary each, from scratch.
//
//	go run ./tools/images -o DIR controller agent
//
// writes DIR/controller.tar and DIR/agent.tar, OCI archives named isthmus/controller:dev
// and isthmus/agent:dev. The same source gives the same bytes. No container engine is used.
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
	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// images are the products with an image, and the user each runs as.
var images = map[string]struct{ user, about string }{
	"controller":         {user: "65532:65532", about: "Isthmus controller: exports, imports and ClusterSetIPs of one cluster"},
	"gateway-controller": {user: "65532:65532", about: "Isthmus gateway controller: addresses of Services of type LoadBalancer"},
	// The kernel gives capabilities in a container to root alone; the chart drops all but the needed ones.
	"agent": {user: "0:0", about: "Isthmus agent: eBPF dataplane and DNS of one node"},
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
		Use:           "images [-o DIR] [--tag TAG] [controller] [agent] [gateway-controller]",
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

func build(ctx context.Context, out io.Writer, dir, name, tag string) (err error) {
	image, known := images[name]
	if !known {
		return fmt.Errorf("no image called %q, there are %s", name, strings.Join(slices.Sorted(maps.Keys(images)), ", "))
	}
	tmp, err := os.MkdirTemp("", "isthmus-image-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	program := "isthmus-" + name
	binary := filepath.Join(tmp, program)
	build := compile.Go(ctx, "build", "-ldflags=-s -w", "-o", binary, "github.com/isthmus-net/isthmus/cmd/"+program)
	build.Env = append(build.Env, "GOOS=linux")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", program, err, output)
	}
	archive := filepath.Join(dir, name+".tar")
	err = oci.Write(archive, oci.Spec{
		Names:      []string{"isthmus/" + name + ":" + tag},
		Entrypoint: []string{"/" + program},
		User:       image.user,
		Labels: map[string]string{
			"org.opencontainers.image.title":       program,
			"org.opencontainers.image.description": image.about,
			"org.opencontainers.image.licenses":    "Apache-2.0",
		},
	}, func(l *oci.Layer) error {
		return l.File("/"+program, binary, 0o755)
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, archive)
	return nil
}
