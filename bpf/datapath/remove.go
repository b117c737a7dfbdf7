package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
)

// Remove uninstalls the dataplane of any version from the node: it detaches the programs from the cgroup and from
// every device, and deletes every pin in our folder of the BPF filesystem. Connections of the socket path go on, and
// getpeername then returns the backend; new connections to a VIP fail. Stop the agent first. Removing a dataplane that is not installed
// succeeds.
func Remove(cfg Config) error {
	p := pins{bpffs: cfg.withDefaults().BPFFS}
	var errs []error
	// In reverse order: programs that translate go before those that translate back. Were recvmsg detached first, a client
	// would get replies from an address that it never sent to. Links of other versions come last.
	for _, h := range slices.Backward(bpf.Hooks()) {
		errs = append(errs, detach(p.linkPath(h.Name)))
	}
	others, err := list(p.linkPath(""))
	errs = append(errs, err)
	for _, name := range others {
		errs = append(errs, detach(p.linkPath(name)))
	}
	errs = append(errs, removeAllFilters(p), removeTree(p.dir()))
	return errors.Join(errs...)
}

// detach detaches a pinned link, even if another process holds it open.
func detach(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned link %s: %w", path, err)
	}
	if err := l.Detach(); err != nil {
		return errors.Join(fmt.Errorf("detach link %s: %w", path, err), l.Close())
	}
	return l.Close()
}

// removeTree deletes a folder of a BPF filesystem. It fails if none is mounted, which os.RemoveAll would report as
// success.
func removeTree(dir string) error {
	if err := requireBPFFS(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}
