package main

import (
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"
)

// mountBPFFS mounts a BPF file system at path, unless one is mounted there.
func mountBPFFS(path string, log *slog.Logger) error {
	is, err := isBPFFS(path)
	if err != nil {
		return err
	}
	if is {
		log.Info("a BPF file system is already mounted", "path", path)
		return nil
	}
	if err := unix.Mount("bpffs", path, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount a BPF file system at %s: %w; run this command privileged, with %s mounted Bidirectional from the host", path, err, path)
	}
	log.Info("mounted a BPF file system", "path", path)
	return nil
}

// isBPFFS reports whether path is in a BPF file system.
func isBPFFS(path string) (bool, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return false, fmt.Errorf("check for a BPF file system at %s: %w", path, err)
	}
	return uint32(fs.Type) == unix.BPF_FS_MAGIC, nil
}
