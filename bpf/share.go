package bpf

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
)

// Share opens a map that another version of a program has pinned at path, and returns it as one that follows no pin: the
// other's stays where it is. It returns nil if there is none, or fits says that it is of no use. The map is the caller's to
// close.
func Share(path string, fits func(*ebpf.Map) bool) (*ebpf.Map, error) {
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s of another version: %w", path, err)
	}
	use := fits(pinned)
	m, err := pinned.Clone() // a Map follows its pin
	if err := errors.Join(err, pinned.Close()); err != nil {
		return nil, fmt.Errorf("share map %s with another version: %w", path, err)
	}
	if use {
		return m, nil
	}
	return nil, m.Close()
}
