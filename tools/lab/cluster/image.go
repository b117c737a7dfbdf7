package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// LoadImages gives every node the images of OCI archives (see tools/images). What a node
// has with the same digest is skipped. Nothing is loaded when an archive cannot be read or a
// node does not run.
func (l *Lab) LoadImages(ctx context.Context, archives ...string) error {
	for _, archive := range archives {
		if _, err := oci.Read(archive); err != nil {
			return err
		}
	}
	if err := l.usable(); err != nil {
		return err
	}
	if err := l.nodesRun(); err != nil {
		return err
	}
	nodes, ctx := errgroup.WithContext(ctx)
	for _, n := range l.topology.Nodes() {
		nodes.Go(func() error { return l.importImages(ctx, n.Name, archives) })
	}
	return nodes.Wait()
}

// nodesRun returns an error unless there are nodes and all of them run.
func (l *Lab) nodesRun() error {
	nodes := l.topology.Nodes()
	var dead []string
	for _, n := range nodes {
		if !l.machine(n.Name).Running() {
			dead = append(dead, n.Name)
		}
	}
	switch len(dead) {
	case len(nodes):
		return fmt.Errorf("lab %q (%s) has no running nodes", l.name, l.topology)
	case 0:
		return nil
	default:
		return fmt.Errorf("lab %q: not running: %s", l.name, strings.Join(dead, ", "))
	}
}

func (l *Lab) importImages(ctx context.Context, node string, archives []string) error {
	have, err := l.imagesOf(ctx, node)
	if err != nil {
		return fmt.Errorf("images of %s: %w", node, err)
	}
	for _, archive := range archives {
		images, err := oci.Read(archive)
		if err != nil {
			return err
		}
		current := true
		for _, image := range images {
			current = current && have[image.Name] == image.Digest
		}
		if current {
			continue
		}
		if err := l.importArchive(ctx, node, archive); err != nil {
			return fmt.Errorf("import %s on %s: %w", archive, node, err)
		}
	}
	return nil
}

// importArchive leaves the unpacking to the first container, which most nodes never see.
func (l *Lab) importArchive(ctx context.Context, node, archive string) error {
	in, err := os.Open(archive) // by us: the file may be where the machine cannot see it
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = l.ctr(ctx, node, in, "images", "import", "--no-unpack", "-")
	return err
}

// imagesOf returns the digests of a node's images by name. It waits for containerd.
func (l *Lab) imagesOf(ctx context.Context, node string) (map[string]string, error) {
	var listing string
	err := waitFor(ctx, "containerd", func(ctx context.Context) (err error) {
		listing, err = l.ctr(ctx, node, nil, "images", "list")
		return err
	})
	if err != nil {
		return nil, err
	}
	return parseImages(listing), nil
}

// parseImages reads the table of `ctr images list`: REF TYPE DIGEST SIZE ...
func parseImages(listing string) map[string]string {
	have := map[string]string{}
	for line := range strings.Lines(listing) {
		if f := strings.Fields(line); len(f) > 2 && strings.HasPrefix(f[2], "sha256:") {
			have[f[0]] = f[2]
		}
	}
	return have
}

func (l *Lab) ctr(ctx context.Context, node string, stdin *os.File, args ...string) (string, error) {
	cmd := l.NodeCommand(ctx, node, append([]string{l.settings.Programs["ctr"], "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io"}, args...)...)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if stdin != nil {
		cmd.Stdin = stdin
	}
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("ctr %s: %w: %s", strings.Join(args, " "), err, complaints.String())
	}
	return out.String(), nil
}
