package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/lab/internal/kube"
)

// TestImage is the first name of the image of the tests' pods. The image has a shell, the usual network tools and our echo
// program.
const TestImage = "isthmus/testbox:dev"

// testImageNames are all names of the test image. The upstream MCS conformance suite uses the last two.
var testImageNames = []string{TestImage, "nicolaka/netshoot:v0.15", "alpine/socat:1.7.4.4"}

// testPackages go into the test image, with everything they depend on.
var testPackages = []string{
	"bash", "dash", "coreutils", "grep", "sed", "gawk", "procps", "iproute2", "iputils-ping",
	"curl", "bind9-dnsutils", "knot-dnsutils", "libc-bin", "netcat-openbsd", "socat", "iperf3",
}

// testLinks replace the links of Debian's alternatives, which package scripts would create.
var testLinks = map[string]string{
	"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64",
	"/usr/bin/nc": "nc.openbsd", "/usr/bin/awk": "gawk", "/usr/bin/sh": "dash",
}

// SystemImages returns the archives of the images that every node needs before it can run a pod.
func (c Cache) SystemImages(programs map[string]string) ([]string, error) {
	pause, err := c.binaryImage("pause", kube.PauseImage, programs["pause"])
	if err != nil {
		return nil, err
	}
	coredns, err := c.binaryImage("coredns", kube.CoreDNSImage, programs["coredns"])
	if err != nil {
		return nil, err
	}
	return []string{pause, coredns}, nil
}

// binaryImage packs one static program.
func (c Cache) binaryImage(name, image, program string) (string, error) {
	key, err := Key([]string{image}, program)
	if err != nil {
		return "", err
	}
	return c.entry("image-"+name, key, func(path string) error {
		return oci.Write(path, oci.Spec{Names: []string{image}, Entrypoint: []string{"/" + name}}, func(l *oci.Layer) error {
			return errors.Join(l.Dir("/tmp", 0o1777), l.File("/"+name, program, 0o755))
		})
	})
}

// TestImage returns the archive of the test image.
func (c Cache) TestImage(ctx context.Context, programs map[string]string) (string, error) {
	key, err := Key(slices.Concat(testPackages, testImageNames, skipped, []string{fmt.Sprint(testLinks)}), programs["echo"])
	if err != nil {
		return "", err
	}
	return c.entry("image-testbox", key, func(path string) (err error) {
		c.Report("making the test image from Debian packages")
		tmp, err := os.MkdirTemp("", "isthmus-debs-*")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
		debs, err := debian.DownloadWhole(ctx, tmp, "", testPackages...)
		if err != nil {
			return err
		}
		return oci.Write(path, oci.Spec{
			Names: testImageNames,
			Env:   []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		}, func(l *oci.Layer) error { return fillTestImage(ctx, l, debs, programs["echo"]) })
	})
}

func fillTestImage(ctx context.Context, l *oci.Layer, debs []string, echo string) error {
	for _, dir := range []string{"/dev", "/etc", "/proc", "/root", "/run", "/sys", "/var"} {
		if err := l.Dir(dir, 0o755); err != nil {
			return err
		}
	}
	for link, target := range testLinks {
		if err := l.Symlink(link, target); err != nil {
			return err
		}
	}
	err := errors.Join(
		l.Dir("/tmp", 0o1777),
		l.Text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"),
		l.Text("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
		l.Text("/etc/nsswitch.conf", "hosts: files dns\n"),
		l.File("/usr/local/bin/echo-server", echo, 0o755))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if err := unpack(ctx, deb, l); err != nil {
			return err
		}
	}
	for _, program := range []string{"sh", "bash", "curl", "dig", "nslookup", "kdig", "getent", "nc.openbsd", "socat", "gawk", "iperf3", "grep", "tr", "tail", "ip"} {
		if !l.Has("/usr/bin/"+program) && !l.Has("/usr/sbin/"+program) {
			return fmt.Errorf("packages %s hold no %s", strings.Join(testPackages, " "), filepath.Base(program))
		}
	}
	return nil
}
