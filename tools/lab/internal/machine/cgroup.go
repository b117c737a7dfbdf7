package machine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	cgroupRoot = "/sys/fs/cgroup"
	// leaf is the child cgroup with a machine's processes, on a host with only cgroup v2. There, a cgroup that delegates
	// controllers must not contain processes.
	leaf = "init.scope"
	// killTimeout is the timeout for the end of a machine's processes.
	killTimeout = 15 * time.Second
)

// Hierarchy is one cgroup hierarchy, as listed in /proc/self/cgroup.
type Hierarchy struct {
	V2      bool
	Options string // mount options of a v1 hierarchy: "cpu,cpuacct" or "none,name=systemd"
	Dir     string // name of its directory below /sys/fs/cgroup
	Path    string // cgroup of the calling process
}

// ErrNoCgroup2 is returned on a host without a cgroup v2 mount; BPF hooks need one.
var ErrNoCgroup2 = errors.New("no cgroup2 mount at /sys/fs/cgroup or /sys/fs/cgroup/unified: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")

// OnlyV2 reports whether the host (or machine) has only cgroup v2.
func OnlyV2() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupRoot, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// Hierarchies reads a file in the format of /proc/<pid>/cgroup, see cgroups(7).
func Hierarchies(file string) ([]Hierarchy, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []Hierarchy
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		id, rest, _ := strings.Cut(lines.Text(), ":")
		controllers, path, ok := strings.Cut(rest, ":")
		if !ok {
			return nil, fmt.Errorf("parse %s: line %q", file, lines.Text())
		}
		h := Hierarchy{Options: controllers, Dir: controllers, Path: path}
		if name, named := strings.CutPrefix(controllers, "name="); named {
			h.Options, h.Dir = "none,"+controllers, name
		}
		if id == "0" {
			h.V2, h.Dir = true, "unified"
		}
		all = append(all, h)
	}
	return all, lines.Err()
}

// cgroupDirs returns the machine's directory in every mounted hierarchy: a child of the caller's own cgroup, so that the
// caller's limits apply to the lab. It creates nothing.
func cgroupDirs(group string) ([]string, error) {
	all, err := Hierarchies("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	if OnlyV2() {
		// At the root of the hierarchy, because the caller's own cgroup contains the caller and cannot have children with
		// controllers.
		return []string{filepath.Join(cgroupRoot, group)}, nil
	}
	var dirs []string
	for _, h := range all {
		mount := filepath.Join(cgroupRoot, h.Dir)
		if h.V2 && !isCgroup2(mount) {
			return nil, ErrNoCgroup2
		}
		if _, err := os.Stat(mount); err != nil {
			continue // a hierarchy that is not mounted
		}
		dirs = append(dirs, filepath.Join(mount, h.Path, group))
	}
	return dirs, nil
}

func isCgroup2(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

func createCgroups(group string) ([]string, error) {
	dirs, err := cgroupDirs(group)
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
		// A new v1 cpuset is empty and no process can join it.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
			if err != nil || isCgroup2(dir) {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, file), parent, 0o644); err != nil {
				return nil, err
			}
		}
	}
	return dirs, nil
}

// Join moves the calling process into the cgroups of a machine.
func Join(dirs []string) error {
	for _, dir := range dirs {
		if inner := filepath.Join(dir, leaf); OnlyV2() && isCgroup2(inner) {
			dir = inner
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0o644); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	return nil
}

// DelegateV2 prepares the root cgroup of a machine on a host with only cgroup v2. It moves the calling process to a leaf and
// delegates every controller to the children. Call it inside the machine.
func DelegateV2(ctx context.Context) error {
	inner := filepath.Join(cgroupRoot, leaf)
	if err := os.MkdirAll(inner, 0o755); err != nil {
		return err
	}
	if err := Join([]string{inner}); err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(cgroupRoot, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for c := range strings.FieldsSeq(string(raw)) {
		// EBUSY until the process that spawned this one has ended.
		var err error
		if !poll(ctx, 5*time.Second, func() bool {
			err = os.WriteFile(filepath.Join(cgroupRoot, "cgroup.subtree_control"), []byte("+"+c), 0o644)
			return err == nil
		}) {
			return fmt.Errorf("delegate controller %s: %w", c, err)
		}
	}
	return nil
}

// removeCgroups kills all processes below the given directories, and removes the directories.
func removeCgroups(ctx context.Context, dirs []string) error {
	for _, dir := range dirs {
		err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0o644)
		// Only v2 has the file; os.WriteFile cannot create one on cgroupfs.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	for _, dir := range dirs {
		var err error
		if !poll(ctx, killTimeout, func() bool { err = removeTree(dir); return err == nil }) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
	}
	return nil
}

// removeTree removes a cgroup and its children, deepest first.
func removeTree(dir string) error {
	children, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, child := range children {
		if child.IsDir() {
			if err := removeTree(filepath.Join(dir, child.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w (%s)", err, dir)
	}
	return nil
}
