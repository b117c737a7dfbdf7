package cache

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// hostPackages are what the machines of a lab use from the host's own Debian.
var hostPackages = []string{
	"containerd", "runc", "containernetworking-plugins", "iproute2", "iptables", "nftables", "conntrack", "bpftool", "curl",
}

// InstallHostPackages installs what is missing, with apt, and says so.
func (c Cache) InstallHostPackages(ctx context.Context) error {
	missing, err := missingPackages(ctx, hostPackages)
	if err != nil || len(missing) == 0 {
		return err
	}
	c.Report("installing Debian packages: %s", strings.Join(missing, " "))
	install := append([]string{"install", "--yes", "--no-install-recommends"}, missing...)
	// The lists may be absent or old: refresh them only when needed.
	if err := apt(ctx, install...); err == nil {
		return nil
	}
	if err := apt(ctx, "update"); err != nil {
		return err
	}
	return apt(ctx, install...)
}

func missingPackages(ctx context.Context, names []string) ([]string, error) {
	// dpkg-query fails for unknown packages and still prints the others.
	out, err := exec.CommandContext(ctx, "dpkg-query", append([]string{"-W", "-f", "${Package} ${db:Status-Status}\n"}, names...)...).Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("the lab needs a Debian machine: %w", err)
	}
	installed := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutSuffix(strings.TrimSpace(line), " installed"); ok {
			installed[name] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return installed[n] }), nil
}

func apt(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-qq", "-o", "DPkg::Lock::Timeout=300"}, args...)...)
	// RUNLEVEL=1 keeps packages from starting their daemons: the lab runs its own.
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// download fetches packages and all they depend on into dir, whatever the host has
// installed: apt is shown an empty status file.
func (c Cache) download(ctx context.Context, dir string, packages []string) ([]string, error) {
	archives := filepath.Join(dir, "archives")
	if err := os.MkdirAll(filepath.Join(archives, "partial"), 0o755); err != nil {
		return nil, err
	}
	status := filepath.Join(dir, "status")
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return nil, err
	}
	args := append([]string{
		"-o", "Dir::State::status=" + status, "-o", "Dir::Cache::archives=" + archives,
		// apt drops to a user of its own that may not write here.
		"-o", "APT::Sandbox::User=root",
		"install", "--yes", "--download-only", "--no-install-recommends",
	}, packages...)
	if err := apt(ctx, args...); err != nil {
		if err := apt(ctx, "update"); err != nil {
			return nil, err
		}
		if err := apt(ctx, args...); err != nil {
			return nil, err
		}
	}
	debs, err := filepath.Glob(filepath.Join(archives, "*.deb"))
	if err == nil && len(debs) == 0 {
		err = fmt.Errorf("apt downloaded nothing for %s", strings.Join(packages, " "))
	}
	return debs, err
}

// skipped are parts of packages nobody needs in a pod: a path that contains one of these
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
