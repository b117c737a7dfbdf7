// Package netlab provides Linux objects for tests and benchmarks of the dataplane, and removes them again: cgroups, BPF
// file systems, and network namespaces joined by veth. It does not touch the machine's own network, and two runs share
// nothing.
package netlab

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// unit is the environment variable that limits a run to the tests that need neither privileges nor an API server.
const unit = "ISTHMUS_UNIT"

// UnitOnly reports whether only tests run that need neither privileges nor an API server, as by make unit. Root has no
// privileges then.
func UnitOnly() bool { return os.Getenv(unit) == "1" }

// IsRoot reports whether tests may use the privileges of root.
func IsRoot() bool { return os.Geteuid() == 0 && !UnitOnly() }

// Privileged skips a test that needs root, as Skip does.
func Privileged(t testing.TB) {
	t.Helper()
	if !IsRoot() {
		Skip(t, "needs root")
	}
}

// Skip skips a test that lacks something. With REQUIRE_PRIVILEGED=1 in the environment it fails the test instead, so that a
// run which must be complete cannot pass by skipping; not in a run of unit tests only.
func Skip(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("REQUIRE_PRIVILEGED") == "1" && !UnitOnly() {
		t.Fatalf("%s, and REQUIRE_PRIVILEGED=1 forbids to skip", why)
	}
	t.Skip(why)
}

// MountBPFFS mounts a separate BPF file system on the empty folder dir, and returns a function that unmounts it.
func MountBPFFS(dir string) (unmount func() error, err error) {
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		return nil, fmt.Errorf("mount a BPF filesystem on %s: %w", dir, err)
	}
	return func() error {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
		return nil
	}, nil
}

// BPFFS returns the path of a BPF file system that exists as long as t.
func BPFFS(t testing.TB) string {
	t.Helper()
	Privileged(t)
	dir := t.TempDir()
	unmount, err := MountBPFFS(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unmount(); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Cgroup is a cgroup v2 folder below that of this process. A socket belongs for ever to the cgroup in which its process
// was when it opened it.
type Cgroup struct {
	Path string
	home string // the cgroup to return to
}

// NewCgroup creates an empty cgroup.
func NewCgroup() (*Cgroup, error) {
	home, err := ownCgroup()
	if err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(home, "isthmus-")
	if err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	return &Cgroup{Path: path, home: home}, nil
}

// Enter moves this process into c.
func (c *Cgroup) Enter() error { return moveTo(c.Path) }

// Leave moves this process back to its original cgroup.
func (c *Cgroup) Leave() error { return moveTo(c.home) }

// Close leaves c and removes it. Other processes in it must have ended.
func (c *Cgroup) Close() error {
	if err := c.Leave(); err != nil {
		return err
	}
	if err := os.Remove(c.Path); err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}

// NewTestCgroup returns a cgroup that exists as long as t, and moves the test process into it.
func NewTestCgroup(t testing.TB) *Cgroup {
	t.Helper()
	Privileged(t)
	c, err := NewCgroup()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := c.Enter(); err != nil {
		t.Fatal(err)
	}
	return c
}

func moveTo(path string) error {
	err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	if err != nil {
		return fmt.Errorf("move into cgroup: %w", err)
	}
	return nil
}

// ownCgroup returns the cgroup v2 folder of this process.
func ownCgroup() (string, error) {
	mount, err := cgroup2Mount()
	if err != nil {
		return "", err
	}
	lines, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("find own cgroup: %w", err)
	}
	for line := range strings.Lines(string(lines)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return filepath.Join(mount, path), nil
		}
	}
	return "", fmt.Errorf("find own cgroup: /proc/self/cgroup names no cgroup v2")
}

// cgroup2Mount returns the mount point of the cgroup v2 hierarchy.
func cgroup2Mount() (string, error) {
	for _, path := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return path, nil
		}
	}
	return "", fmt.Errorf("no cgroup v2 hierarchy at /sys/fs/cgroup nor at /sys/fs/cgroup/unified")
}
