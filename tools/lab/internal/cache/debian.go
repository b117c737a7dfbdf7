package cache

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// hostPackages are what the machines of a lab use from the host's own Debian.
var hostPackages = []string{
	"containerd", "runc", "containernetworking-plugins", "iproute2", "iptables", "nftables", "conntrack", "bpftool", "curl",
}

// InstallHostPackages installs what is missing, with apt, and says so.
func (c Cache) InstallHostPackages(ctx context.Context) error {
	return debian.Ensure(ctx, reporter(c.Report), hostPackages...)
}

// reporter makes a writer of lines from a function that reports steps.
type reporter func(format string, args ...any)

// Write reports p, one or more whole lines.
func (r reporter) Write(p []byte) (int, error) {
	r("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// skipped are parts of packages that no pod needs: a path that contains one of these
// is left out. Perl comes with packages that use it in their install scripts only.
var skipped = []string{
	"/usr/share/doc/", "/usr/share/man/", "/usr/share/info/", "/usr/share/lintian/", "/usr/share/locale/", "/usr/share/zoneinfo/",
	"/usr/share/bash-completion/", "/usr/share/i18n/", "/usr/share/perl", "/usr/lib/systemd/", "/usr/include/", "/usr/share/gcc/",
	"/usr/bin/perl", "/perl/", "/perl-base/", "/perl5/", "/libperl.so", "/gconv/", "/boot/", "/home/", "/var/cache/", "/var/lib/dpkg/",
}

// unpack streams the files of a package into the layer. Paths are moved below /usr, as on
// a Debian with merged /usr, where /bin, /sbin and /lib* are links.
func unpack(ctx context.Context, deb string, layer *oci.Layer) error {
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	copyErr := copyFiles(tar.NewReader(out), layer)
	if copyErr != nil {
		io.Copy(io.Discard, out) //nolint:errcheck // let dpkg-deb end; copyErr counts
	}
	if err := errors.Join(copyErr, cmd.Wait()); err != nil {
		return fmt.Errorf("unpack %s: %w %s", filepath.Base(deb), err, complaints.String())
	}
	return nil
}

func copyFiles(in *tar.Reader, layer *oci.Layer) error {
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		h.Name = mergeUsr(h.Name)
		if h.Typeflag == tar.TypeLink {
			h.Linkname = mergeUsr(h.Linkname)
		}
		isSkipped := func(part string) bool { return strings.Contains("/"+h.Name+"/", part) }
		if h.Name == "" || slices.ContainsFunc(skipped, isSkipped) {
			continue
		}
		if h.Typeflag == tar.TypeLink && !layer.Has(h.Linkname) {
			continue // another name of a file that was skipped
		}
		if err := layer.Entry(h, in); err != nil {
			return err
		}
	}
}

// mergeUsr returns a path inside an image with merged /usr, without a leading slash.
func mergeUsr(name string) string {
	name = strings.TrimPrefix(filepath.Clean("/"+name), "/")
	top, _, _ := strings.Cut(name, "/")
	switch top {
	case "bin", "sbin", "lib", "lib32", "lib64", "libx32":
		return "usr/" + name
	}
	return name
}
