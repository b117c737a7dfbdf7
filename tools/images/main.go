// Images builds the product's container images for this machine.
//
//	go run ./tools/images -o DIR controller agent
//
// writes DIR/controller.tar and DIR/agent.tar, OCI archives named isthmus/controller:dev and isthmus/agent:dev.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/tools/cli"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/images/product"
)

func main() { cli.Main(command()) }

func command() *cobra.Command {
	var dir, tag string
	cmd := &cobra.Command{
		Use:     "images [-o DIR] [--tag TAG] [controller] [agent] [gateway] [gateway-controller]",
		Short:   "Build the product's container images as OCI archives",
		Example: "  go run ./tools/images -o bin/images controller agent",
		RunE: func(cmd *cobra.Command, names []string) error {
			if len(names) == 0 {
				names = product.Names()
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
	tmp, err := os.MkdirTemp("", "isthmus-image-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	image, err := product.Compile(ctx, tmp, name, "", compile.Version{})
	if err != nil {
		return err
	}
	image.Spec.Names = []string{"isthmus/" + name + ":" + tag}
	archive := filepath.Join(dir, name+".tar")
	if err := oci.Write(archive, image.Spec, func(l *oci.Layer) error { return image.Fill(ctx, l) }); err != nil {
		return err
	}
	fmt.Fprintln(out, archive)
	return nil
}
