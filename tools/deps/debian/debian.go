// Package debian installs and downloads Debian packages.
package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Ensure installs the missing packages among those named. It reports on progress what it installs. The error names the packages
// and the command to install them by hand.
func Ensure(ctx context.Context, progress io.Writer, packages ...string) error {
	missing, err := Missing(ctx, packages...)
	if err != nil || len(missing) == 0 {
		return err
	}
	list := strings.Join(missing, " ")
	if os.Geteuid() != 0 {
		return fmt.Errorf("packages %s are missing and only root can install them; run as root: apt-get install --no-install-recommends %s", list, list)
	}
	fmt.Fprintf(progress, "install Debian packages: %s\n", list)
	return AptGet(ctx, append([]string{"install", "--yes", "--no-install-recommends"}, missing...)...)
}

// serial serializes the package tools, some of which fail instead of waiting for a lock, such as debconf's.
var serial sync.Mutex

// Preseed answers the questions that packages ask during their installation, which otherwise get default answers. Each answer
// is a line of debconf-set-selections(1).
func Preseed(ctx context.Context, answers ...string) error {
	serial.Lock()
	defer serial.Unlock()
	cmd := exec.CommandContext(ctx, "debconf-set-selections")
	cmd.Stdin = strings.NewReader(strings.Join(answers, "\n") + "\n")
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("debconf-set-selections: %w\n%s", err, said)
	}
	return nil
}

// AptGet runs apt-get. If that fails it tries once more, after it updated the package lists, because those of a fresh machine may
// be empty or name removed versions, or after it configured packages that an installation left half-done when it was killed.
// Daemons of installed packages are not started. The error contains the end of apt-get's output.
func AptGet(ctx context.Context, args ...string) error { return aptGet(ctx, "", args...) }

// aptGet runs apt-get like AptGet, in the folder dir.
func aptGet(ctx context.Context, dir string, args ...string) error {
	serial.Lock()
	defer serial.Unlock()
	output, err := apt(ctx, dir, args...)
	if err == nil {
		return nil
	}
	const halfDone = "dpkg --configure -a" // what apt-get then asks for
	if strings.Contains(output, halfDone) {
		if said, err := command(ctx, "dpkg", "--configure", "-a").CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", halfDone, err, lastLines(said))
		}
	} else if output, err := apt(ctx, dir, "update"); err != nil {
		return fmt.Errorf("apt-get update: %w\n%s", err, output)
	}
	if output, err := apt(ctx, dir, args...); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, output)
	}
	return nil
}

// Archive is Debian's archive of packages for one architecture.
type Archive struct {
	options []string // of apt-get and apt-cache
}

// Open returns the archive for an architecture that Go and Debian name alike; empty: this machine's. This machine has no package
// lists of another architecture, so Open downloads those into the folder dir, where they must stay as long as the archive is used.
func Open(ctx context.Context, dir, architecture string) (Archive, error) {
	if architecture == "" || architecture == runtime.GOARCH {
		return Archive{}, nil
	}
	lists, status := filepath.Join(dir, "lists"), filepath.Join(dir, "status")
	if err := errors.Join(os.MkdirAll(filepath.Join(lists, "partial"), 0o755), os.WriteFile(status, nil, 0o644)); err != nil {
		return Archive{}, err
	}
	a := Archive{[]string{
		"-o", "APT::Architecture=" + architecture, "-o", "APT::Architectures=" + architecture,
		"-o", "Dir::State::lists=" + lists, "-o", "Dir::State::status=" + status,
		"-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=", rootReads,
	}}
	return a, AptGet(ctx, a.with("update")...)
}

// rootReads is an option of apt for folders in which apt's sandbox user may not write.
const rootReads = "--option=APT::Sandbox::User=root"

// with returns the archive's options and arguments.
func (a Archive) with(args ...string) []string { return slices.Concat(a.options, args) }

// Search returns the names of the packages whose name matches a regular expression.
func (a Archive) Search(ctx context.Context, pattern string) ([]string, error) {
	for _, refresh := range []bool{false, true} { // the package lists of a fresh machine may be empty
		if refresh {
			if err := AptGet(ctx, a.with("update")...); err != nil {
				return nil, err
			}
		}
		out, err := exec.CommandContext(ctx, "apt-cache", a.with("search", "--names-only", pattern)...).Output()
		if err != nil {
			return nil, fmt.Errorf("apt-cache search: %w", err)
		}
		var names []string
		for line := range strings.Lines(string(out)) {
			name, _, _ := strings.Cut(line, " ")
			names = append(names, name)
		}
		if len(names) > 0 {
			return names, nil
		}
	}
	return nil, nil
}

// Download downloads packages, without their dependencies, into the folder dir as *.deb files.
func (a Archive) Download(ctx context.Context, dir string, packages ...string) error {
	return aptGet(ctx, dir, a.with(append([]string{rootReads, "download"}, packages...)...)...)
}

// DownloadWhole downloads packages and all their dependencies into the folder dir, regardless of the packages installed on this
// machine: apt reads an empty status file. The architecture is that of Open. It returns the *.deb files.
func DownloadWhole(ctx context.Context, dir, architecture string, packages ...string) ([]string, error) {
	a, err := Open(ctx, dir, architecture)
	if err != nil {
		return nil, err
	}
	archives, status := filepath.Join(dir, "archives"), filepath.Join(dir, "status")
	if err := errors.Join(os.MkdirAll(filepath.Join(archives, "partial"), 0o755), os.WriteFile(status, nil, 0o644)); err != nil {
		return nil, err
	}
	args := []string{
		"-o", "Dir::State::status=" + status, "-o", "Dir::Cache::archives=" + archives, rootReads,
		"install", "--yes", "--download-only", "--no-install-recommends",
	}
	if err := AptGet(ctx, a.with(append(args, packages...)...)...); err != nil {
		return nil, err
	}
	debs, err := filepath.Glob(filepath.Join(archives, "*.deb"))
	if err == nil && len(debs) == 0 {
		err = fmt.Errorf("apt downloaded nothing for %s", strings.Join(packages, " "))
	}
	return debs, err
}

// Missing returns the packages that are not installed, sorted.
func Missing(ctx context.Context, packages ...string) ([]string, error) {
	var missing []string
	for _, p := range packages {
		status, err := exec.CommandContext(ctx, "dpkg-query", "--show", "--showformat=${db:Status-Status}", p).Output()
		if errors.Is(err, exec.ErrNotFound) {
			return nil, fmt.Errorf("this machine does not run Debian (no dpkg-query); install the content of package %s by hand, or use Debian 12", p)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil || string(status) != "installed" {
			missing = append(missing, p)
		}
	}
	slices.Sort(missing)
	return slices.Compact(missing), nil
}

// apt runs apt-get in the folder dir and returns the end of its output.
func apt(ctx context.Context, dir string, args ...string) (output string, err error) {
	cmd := command(ctx, "apt-get", append([]string{"--quiet", "--option=DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Dir = dir
	said, err := cmd.CombinedOutput()
	return lastLines(said), err
}

// command returns a command of the package tools. Packages do not start their daemons, and ask nothing. When ctx ends, or at an
// interrupt from the terminal, a download ends, but an installation is completed: apt-get ignores SIGINT during it.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	// RUNLEVEL=1 keeps packages from starting their daemons.
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "LC_ALL=C.UTF-8")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	return cmd
}

// lastLines returns the end of what a program said.
func lastLines(said []byte) string {
	lines := bytes.Split(bytes.TrimSpace(said), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-15):], []byte("\n")))
}
