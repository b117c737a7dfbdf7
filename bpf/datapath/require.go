package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// ErrUnsupported means that the node lacks a feature that Isthmus needs.
var ErrUnsupported = errors.New("node not supported")

// ErrIncompatible means that a pinned map of another Isthmus version has another layout.
var ErrIncompatible = errors.New("pinned map has another layout")

// ErrOccupied means that another program holds one of our hooks exclusively.
var ErrOccupied = errors.New("hook held exclusively by another program")

// need is a feature that the kernel must have. probe returns ebpf.ErrNotSupported when it is missing.
type need struct {
	what  string // reads well after "has no"
	probe func() error
}

// needs lists the features that the programs and maps use and that some kernels lack.
var needs = []need{
	{"BPF programs on socket addresses (CONFIG_CGROUP_BPF)", func() error { return features.HaveProgramType(ebpf.CGroupSockAddr) }},
	{"BPF socket storage", func() error { return features.HaveMapType(ebpf.SkStorage) }},
	{"BPF LRU hash maps", func() error { return features.HaveMapType(ebpf.LRUHash) }},
	{"BPF helper sk_storage_get", helper(asm.FnSkStorageGet)},
	{"BPF helper get_socket_cookie", helper(asm.FnGetSocketCookie)},
	{"BPF helper set_retval", helper(asm.FnSetRetval)},
}

// requireKernel reports the first of needs that the kernel lacks, or nil.
func requireKernel(needs []need) error {
	for _, n := range needs {
		err := n.probe()
		switch {
		case err == nil:
		case errors.Is(err, ebpf.ErrNotSupported):
			return fmt.Errorf("kernel %s has no %s; Isthmus needs Linux 6.1 or newer: %w", kernelRelease(), n.what, ErrUnsupported)
		case errors.Is(err, unix.EPERM):
			return fmt.Errorf("not permitted to use BPF; run as root or with the capabilities BPF, NET_ADMIN and PERFMON: %w", err)
		default:
			return fmt.Errorf("probe kernel %s for %s: %w", kernelRelease(), n.what, err)
		}
	}
	return nil
}

func helper(f asm.BuiltinFunc) func() error {
	return func() error { return features.HaveProgramHelper(ebpf.CGroupSockAddr, f) }
}

// haveTCX returns nil when the kernel has TCX.
func haveTCX() error {
	// The loopback device has this number in every network namespace.
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: ebpf.AttachTCXIngress})
	return err
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown release"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// requireBPFFS reports whether path is a BPF filesystem.
func requireBPFFS(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return fmt.Errorf("find the BPF filesystem %s: %w; mount it with: mount -t bpf bpf %s", path, err, path)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%s is not a BPF filesystem; mount one with: mount -t bpf bpf %s: %w", path, path, ErrUnsupported)
	}
	return nil
}

// cgroup is a folder of the cgroup v2 hierarchy.
type cgroup struct {
	path string
	id   uint64 // as links name it: the inode number
}

// findCgroup returns the cgroup v2 hierarchy that is mounted at root or at root/unified.
func findCgroup(root string) (cgroup, error) {
	for _, path := range []string{root, filepath.Join(root, "unified")} {
		var st unix.Statfs_t
		err := unix.Statfs(path, &st)
		if errors.Is(err, fs.ErrNotExist) || err == nil && st.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		if err != nil {
			return cgroup{}, fmt.Errorf("look for cgroup v2 at %s: %w", path, err)
		}
		dir, err := os.Stat(path)
		if err != nil {
			return cgroup{}, fmt.Errorf("look for cgroup v2 at %s: %w", path, err)
		}
		return cgroup{path: path, id: dir.Sys().(*syscall.Stat_t).Ino}, nil
	}
	return cgroup{}, fmt.Errorf("no cgroup v2 hierarchy at %s nor at %s/unified; mount one with: mount -t cgroup2 none %s: %w",
		root, root, root, ErrUnsupported)
}

// explain adds the program that prevents attaching to a hook of c to the error. The kernel refuses when the
// cgroup or one above it has a program that was attached without BPF_F_ALLOW_MULTI.
func (c cgroup) explain(h bpf.Hook, err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	for dir := c.path; ; dir = filepath.Dir(dir) {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
			return err
		}
		names, queryErr := programsAt(dir, h.Attach)
		if queryErr != nil {
			return errors.Join(err, queryErr)
		}
		if len(names) > 0 {
			return fmt.Errorf("%s is held by %s, attached exclusively to %s; detach it, or have its owner attach it with BPF_F_ALLOW_MULTI: %w",
				h.Name, strings.Join(names, " and "), dir, errors.Join(ErrOccupied, err))
		}
	}
}

// programsAt describes the programs at a hook of a cgroup.
func programsAt(dir string, at ebpf.AttachType) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer f.Close()
	found, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: at})
	if err != nil {
		return nil, fmt.Errorf("query programs of %s: %w", dir, err)
	}
	var names []string
	for _, p := range found.Programs {
		names = append(names, describeProgram(p.ID))
	}
	return names, nil
}

// describeProgram returns a program's number, and its name where the process may ask for it.
func describeProgram(id ebpf.ProgramID) string {
	text := fmt.Sprintf("program %d", id)
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return text // opening it by number needs SYS_ADMIN
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil || info.Name == "" {
		return text
	}
	return fmt.Sprintf("%s (%s)", text, info.Name)
}
