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

// Remove takes the dataplane off the node, of any version: it detaches the programs from the cgroup and from
// every device and deletes every pin under our folder of the BPF filesystem. Connections that were translated go on, only their VIP is forgotten; new
// ones to a VIP fail. Stop the agent first. Removing what is not there succeeds.
func Remove(cfg Config) error {
	p := pins{bpffs: cfg.withDefaults().BPFFS}
	var errs []error
	// Backwards: what translates goes before what translates back. Then whatever another version has that
	// this one does not know.
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

// detach takes the program of a pinned link off its cgroup, whoever else holds the link.
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

// removeTree deletes a folder of a BPF filesystem. os.RemoveAll would do, were it not to report a BPF
// filesystem that is not mounted as success and leave the person wondering.
func removeTree(dir string) error {
	if err := requireBPFFS(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}
