package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// pins is our folder of a BPF filesystem, for one ABI.
type pins struct {
	bpffs string
	abi   int
}

func (p pins) dir() string              { return filepath.Join(p.bpffs, directory) }
func (p pins) maps() string             { return filepath.Join(p.dir(), mapFolder+"-v"+strconv.Itoa(p.abi)) }
func (p pins) mapPath(n string) string  { return filepath.Join(p.maps(), n) }
func (p pins) progPath(n string) string { return filepath.Join(p.dir(), "progs", n) }
func (p pins) qdiscs() string           { return filepath.Join(p.dir(), "qdiscs") }
func (p pins) linkPath(n string) string { return filepath.Join(p.dir(), "links", n) }

// mapFolder is the folder of ABI 1, and the prefix of the folders of later ones.
const mapFolder = "maps"

// folders lists the folders of an installation, in the order in which they are created.
func (p pins) folders() []string {
	return []string{p.dir(), p.maps(), p.progPath(""), p.linkPath("")}
}

// otherMaps lists the map folders of other ABIs.
func (p pins) otherMaps() ([]string, error) {
	names, err := list(p.dir())
	if err != nil {
		return nil, err
	}
	var others []string
	for _, name := range names {
		path := filepath.Join(p.dir(), name)
		if (name == mapFolder || strings.HasPrefix(name, mapFolder+"-v")) && path != p.maps() {
			others = append(others, path)
		}
	}
	return others, nil
}

// list returns the names in a folder of a BPF filesystem, none when the folder does not exist.
func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list pins: %w", err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// suffix marks a staged pin. BPF filesystems refuse names with dots.
const suffix = "_new"

// staged is where a pin stays until the whole installation has succeeded.
func staged(path string) string { return path + suffix }

// removePin removes a pin. A missing pin is no error.
func removePin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove pin: %w", err)
	}
	return nil
}
