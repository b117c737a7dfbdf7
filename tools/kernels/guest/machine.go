package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// modules is the folder of the initramfs with the kernel's modules, named in the order to load them in.
const modules = "/modules"

// emulated reports whether this is the first process of a machine made for it, whose kernel has modules of our
// choice: SCTP among them, which this machine's own may not have.
func emulated() bool { return os.Getpid() == 1 }

// setUpMachine mounts what every Linux system has and loads the modules.
func setUpMachine() error {
	for _, m := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"cgroup2", "/sys/fs/cgroup"},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		// The kernel may have mounted its devices by itself.
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
