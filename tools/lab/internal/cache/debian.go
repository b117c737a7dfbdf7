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

// hostPackages are the packages of the host's Debian that the machines of a lab use.
var hostPackages = []string{
	"containerd", "runc", "containernetworking-plugins", "iproute2", "iptables", "nftables", "conntrack", "bpftool", "curl",
}

// InstallHostPackages installs missing host packages with apt, and reports them.
func (c Cache) InstallHostPackages(ctx context.Context) error {
	return debian.Ensure(ctx, reporter(c.Report), hostPackages...)
}

// reporter is an io.Writer that passes lines to a function.
type reporter func(format string, args ...any)

// Write reports p, one or more whole lines.
func (r reporter) Write(p []byte) (int, error) {
	r("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// skipped are parts of paths: files of packages whose path contains one of them are left out, because no pod needs them. Perl
// is a dependency of packages that use it only in their install scripts.
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
		io.Copy(io.Discard, out) //nolint:errcheck // so that dpkg-deb ends; copyErr is the error that counts
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
			continue // a hard link to a skipped file
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
