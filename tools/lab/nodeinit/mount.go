package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/lab/internal/machine"
)

// mountAll builds the machine's private view of the file system, so that every well-known
// path (/var/lib/kubelet, /run/containerd, /etc/cni/net.d, /sys/fs/cgroup, /sys/fs/bpf)
// is the machine's own and unmodified manifests work. Nothing is created on the host
// outside dir, and nothing reaches the host's mount namespace.
func mountAll(dir string, spec machine.Spec) error {
	steps := []struct {
		what string
		do   func() error
	}{
		{"cut propagation to the host", func() error { return propagate(unix.MS_SLAVE) }},
		{"/proc", func() error { return mount("proc", "/proc", "proc", 0, "") }},
		{"host name", func() error { return unix.Sethostname([]byte(spec.Name)) }},
		{"/run", mountRun},
		{"/sys", mountSys},
		{"/var/lib and /var/log", func() error { return mountVar(dir) }},
		{"/etc", func() error { return mountEtc(dir, spec) }},
		{"/proc/sys", maskSysctls},
		// The kubelet and Bidirectional mounts of pods need a shared tree.
		{"share mounts", func() error { return propagate(unix.MS_SHARED) }},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}

func propagate(kind uintptr) error {
	return unix.Mount("", "/", "", unix.MS_REC|kind, "")
}

func mount(source, target, fstype string, flags uintptr, options string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, fstype, flags, options); err != nil {
		return fmt.Errorf("mount %s on %s: %w", fstype, target, err)
	}
	return nil
}

// mountRun hides the host's /run. What is mounted below it goes first: it would keep the
// network namespaces of other labs alive from here.
func mountRun() error {
	below, err := mountsBelow("/run/")
	if err != nil {
		return err
	}
	for _, m := range below {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", m, err)
		}
	}
	if err := mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	for _, d := range []string{"/run/netns", "/run/lock", "/run/containerd"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func mountsBelow(prefix string) ([]string, error) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var found []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) > 1 && strings.HasPrefix(fields[1], prefix) {
			found = append([]string{fields[1]}, found...) // innermost first
		}
	}
	return found, lines.Err()
}

// mountSys shows the sysfs of this network namespace, the cgroup trees from this cgroup
// namespace, and a new bpffs: pins of one machine are invisible to the others. The host's
// mounts are detached first, else runc finds cgroup mounts that lie outside the machine.
func mountSys() error {
	onlyV2 := machine.OnlyV2()
	if err := unix.Unmount("/sys", unix.MNT_DETACH); err != nil {
		return err
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return err
	}
	if err := mountCgroups(onlyV2); err != nil {
		return err
	}
	if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=700"); err != nil {
		return fmt.Errorf("mount bpf: %w", err)
	}
	// For bpftool's and the kernel's tracing; a kernel without it is fine.
	unix.Mount("tracefs", "/sys/kernel/tracing", "tracefs", 0, "") //nolint:errcheck // see above
	return nil
}

func mountCgroups(onlyV2 bool) error {
	const root = "/sys/fs/cgroup"
	if onlyV2 {
		return unix.Mount("cgroup2", root, "cgroup2", 0, "")
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	all, err := machine.Hierarchies("/proc/self/cgroup")
	if err != nil {
		return err
	}
	for _, h := range all {
		kind, options := "cgroup", h.Options
		if h.V2 {
			kind, options = "cgroup2", ""
		}
		if err := mount(kind, filepath.Join(root, h.Dir), kind, 0, options); err != nil {
			return err
		}
	}
	return nil
}

// mountVar gives the machine its own /var/lib and /var/log. etcd's files are throw-away
// and stay in memory.
func mountVar(dir string) error {
	for _, d := range []string{"lib", "log"} {
		own := filepath.Join(dir, "var-"+d)
		if err := os.MkdirAll(own, 0o755); err != nil {
			return err
		}
		if err := mount(own, "/var/"+d, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	for _, d := range []string{"/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/log/pods", "/var/log/containers"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	return mount("tmpfs", "/var/lib/etcd", "tmpfs", 0, "mode=700")
}

// mountEtc lays the machine's own files over the host's /etc, which stays as it is.
func mountEtc(dir string, spec machine.Spec) error {
	upper, work := filepath.Join(dir, "etc"), filepath.Join(dir, "etc-work")
	for _, d := range []string{upper, work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	resolv := filepath.Join(upper, "resolv.conf") // may be a link into /run on the host
	if err := os.WriteFile(resolv, []byte("nameserver "+spec.DNS.String()+"\n"), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(upper, "hostname"), []byte(spec.Name+"\n"), 0o644); err != nil {
		return err
	}
	return mount("overlay", "/etc", "overlay", 0, "lowerdir=/etc,upperdir="+upper+",workdir="+work)
}

// maskSysctls shows the kubelet the machine-wide settings it wants. It reads them at
// start and writes only what differs, so the host's own stay untouched.
func maskSysctls() error {
	for name, value := range map[string]string{
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/keys/root_maxbytes": "25000000",
	} {
		target := filepath.Join("/proc/sys", name)
		if _, err := os.Stat(target); err != nil {
			continue // this kernel has no such setting
		}
		shown := filepath.Join("/run/sysctl", name)
		if err := os.MkdirAll(filepath.Dir(shown), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(shown, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(shown, target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mask %s: %w", target, err)
		}
	}
	return nil
}

// setSysctls makes the machine a router for its pods. All of these belong to its network
// namespace.
func setSysctls() error {
	for _, s := range []struct {
		name, value string
		optional    bool
	}{
		{name: "net/ipv4/ip_forward", value: "1"},
		{name: "net/ipv6/conf/all/forwarding", value: "1"},
		{name: "net/ipv4/conf/all/rp_filter", value: "0"},
		{name: "net/ipv4/conf/default/rp_filter", value: "0"},
		// Only there when br_netfilter is loaded; the bridge CNI needs it then.
		{name: "net/bridge/bridge-nf-call-iptables", value: "1", optional: true},
		{name: "net/bridge/bridge-nf-call-ip6tables", value: "1", optional: true},
	} {
		err := os.WriteFile(filepath.Join("/proc/sys", s.name), []byte(s.value), 0o644)
		if err != nil && !s.optional {
			return fmt.Errorf("set sysctl: %w", err)
		}
	}
	return nil
}
