package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// modules is the folder of the kernel's modules in the initramfs. Their names sort in load order.
const modules = "/modules"

// emulated reports whether this is the first process of an emulated machine. Its kernel has all modules of the checks; the
// native kernel may lack SCTP.
func emulated() bool { return os.Getpid() == 1 }

// setUpMachine mounts the usual filesystems and loads the modules.
func setUpMachine() error {
	for _, m := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"cgroup2", "/sys/fs/cgroup"},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		// The kernel may have mounted devtmpfs already.
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.at, err)
		}
	}
	paths, err := filepath.Glob(filepath.Join(modules, "*.ko"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := load(path); err != nil {
			return fmt.Errorf("load module %s: %w", filepath.Base(path), err)
		}
	}
	return nil
}

func load(path string) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return unix.FinitModule(int(f.Fd()), "", 0)
}
