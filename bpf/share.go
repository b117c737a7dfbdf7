package bpf

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
)

// Share opens a map that a build of another ABI has pinned at path. The returned map follows no pin, so the other build's
// pin stays in place. It is nil if there is no such map or fits rejects it. The caller closes it.
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
