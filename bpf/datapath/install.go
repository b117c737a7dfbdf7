package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
)

// pins is a BPF filesystem with our folder in it.
type pins string

func (p pins) dir() string              { return filepath.Join(string(p), directory) }
func (p pins) mapPath(n string) string  { return filepath.Join(p.dir(), "maps", n) }
func (p pins) progPath(n string) string { return filepath.Join(p.dir(), "progs", n) }
func (p pins) linkPath(n string) string { return filepath.Join(p.dir(), "links", n) }

// staged is where a pin waits until everything has succeeded. BPF filesystems refuse names with dots.
func staged(path string) string { return path + "_new" }

// installer brings one version of the programs onto a node. Whatever it does before commit it can take
// back: undo leaves the node as it was.
type installer struct {
	pins   pins
	cgroup cgroup

	maps                          map[string]*ebpf.Map
	progs                         map[string]*ebpf.Program
	links                         []attachment
	attached, replaced, unchanged int

	undos   []func() error // newest last
	commits []func() error
	closers []func() error
}

func (in *installer) run(spec *ebpf.CollectionSpec) error {
	if err := in.makeFolders(); err != nil {
		return err
	}
	if err := in.openMaps(spec); err != nil {
		return err
	}
	if err := in.loadPrograms(spec); err != nil {
		return err
	}
	for _, h := range bpf.Hooks() {
		l, err := in.installHook(h)
		if err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.Name, in.cgroup.path, err)
		}
		in.links = append(in.links, attachment{h, l})
	}
	for _, commit := range in.commits {
		if err := commit(); err != nil {
			return err
		}
	}
	return nil
}

// undo takes back what run has done, newest first.
func (in *installer) undo() error {
	var errs []error
	for _, undo := range slices.Backward(in.undos) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// close lets go of everything the installer still holds.
func (in *installer) close() error {
	var errs []error
	for _, m := range in.maps {
		errs = append(errs, m.Close())
	}
	for _, p := range in.progs {
		errs = append(errs, p.Close())
	}
	for _, a := range in.links {
		errs = append(errs, a.link.Close())
	}
	for _, c := range in.closers {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

func (in *installer) makeFolders() error {
	for _, path := range []string{in.pins.dir(), in.pins.mapPath(""), in.pins.progPath(""), in.pins.linkPath("")} {
		err := os.Mkdir(path, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("make pin folder: %w", err)
		}
		in.undos = append(in.undos, func() error { return os.Remove(path) })
	}
	return nil
}

// openMaps takes over every pinned map and makes the ones that are missing.
func (in *installer) openMaps(spec *ebpf.CollectionSpec) error {
	in.maps = make(map[string]*ebpf.Map, len(spec.Maps))
	for name, ms := range spec.Maps {
		path := in.pins.mapPath(name)
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err == nil {
			in.maps[name] = m
			if err := ms.Compatible(m); err != nil {
				return fmt.Errorf("map %s was made by a version of Isthmus with another layout (%w); run that version again, or stop the agent on this node, run its cleanup and start it anew: %w",
					path, err, ErrIncompatible)
			}
			continue
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("open pinned map %s: %w", path, err)
		}
		if m, err = ebpf.NewMap(ms); err != nil {
			return fmt.Errorf("create map %s: %w", name, err)
		}
		in.maps[name] = m
		if err := m.Pin(path); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
		in.undos = append(in.undos, m.Unpin)
	}
	return nil
}

func (in *installer) loadPrograms(spec *ebpf.CollectionSpec) error {
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: in.maps})
	if err != nil {
		return fmt.Errorf("load BPF programs: %w", err)
	}
	defer coll.Close()
	in.progs = make(map[string]*ebpf.Program, len(coll.Programs))
	for name := range spec.Programs {
		in.progs[name] = coll.DetachProgram(name)
	}
	return nil
}

// installHook makes h run our program and returns its link.
func (in *installer) installHook(h bpf.Hook) (link.Link, error) {
	old, err := link.LoadPinnedLink(in.pins.linkPath(h.Name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return in.attach(h, in.pins.linkPath(h.Name))
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned link: %w", err)
	}
	id, err := linkCgroup(old)
	if err != nil {
		return nil, errors.Join(err, old.Close())
	}
	if id != in.cgroup.id {
		// It hangs at a cgroup that is gone, or at another one: attach here, and let go of it last.
		in.closers = append(in.closers, old.Close)
		return in.reattach(h)
	}
	if err := in.replace(h, old); err != nil {
		return nil, errors.Join(err, old.Close())
	}
	return old, nil
}

// attach makes a new link to the cgroup and pins it at path.
func (in *installer) attach(h bpf.Hook, path string) (link.Link, error) {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: in.cgroup.path, Attach: h.Attach, Program: in.progs[h.Name]})
	if err != nil {
		return nil, err
	}
	if err := in.stageProgram(h); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if err := l.Pin(path); err != nil {
		return nil, errors.Join(fmt.Errorf("pin link: %w", err), l.Close())
	}
	in.undos = append(in.undos, func() error { return removePin(path) })
	in.attached++
	return l, nil
}

// reattach makes a new link that takes the pin of an old one when everything has succeeded.
func (in *installer) reattach(h bpf.Hook) (link.Link, error) {
	path := in.pins.linkPath(h.Name)
	if err := removePin(staged(path)); err != nil {
		return nil, err
	}
	l, err := in.attach(h, staged(path))
	if err != nil {
		return nil, err
	}
	in.commits = append(in.commits, func() error { return os.Rename(staged(path), path) })
	return l, nil
}

// replace swaps the program of a link in place, unless it is the one we would put there. No connect
// falls between the two: the kernel exchanges the pointer.
func (in *installer) replace(h bpf.Hook, l link.Link) error {
	running, err := in.runningProgram(h, l)
	if err != nil {
		return err
	}
	if running != nil {
		in.closers = append(in.closers, running.Close)
		same, err := sameProgram(running, in.progs[h.Name])
		if err != nil {
			return err
		}
		if same {
			in.unchanged++
			return nil
		}
	}
	if err := in.stageProgram(h); err != nil {
		return err
	}
	if err := l.Update(in.progs[h.Name]); err != nil {
		return fmt.Errorf("replace program: %w", err)
	}
	if running != nil {
		in.undos = append(in.undos, func() error { return l.Update(running) })
	}
	in.replaced++
	return nil
}

// runningProgram returns the pinned program of h if it is the one l runs, else nil: then an earlier
// install was cut between its last two steps, and what runs is not known.
func (in *installer) runningProgram(h bpf.Hook, l link.Link) (*ebpf.Program, error) {
	p, err := ebpf.LoadPinnedProgram(in.pins.progPath(h.Name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned program %s: %w", h.Name, err)
	}
	info, err := p.Info()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ask for program %s: %w", h.Name, err), p.Close())
	}
	li, err := l.Info()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ask for link %s: %w", h.Name, err), p.Close())
	}
	if id, ok := info.ID(); !ok || id != li.Program {
		return nil, p.Close()
	}
	return p, nil
}

// stageProgram pins our program beside the one that is pinned, to take its place in the end.
func (in *installer) stageProgram(h bpf.Hook) error {
	path := in.pins.progPath(h.Name)
	if err := removePin(staged(path)); err != nil {
		return err
	}
	// A clone, because a Program follows its pin and ours is about to move.
	p, err := in.progs[h.Name].Clone()
	if err != nil {
		return fmt.Errorf("clone program %s: %w", h.Name, err)
	}
	in.closers = append(in.closers, p.Close)
	if err := p.Pin(staged(path)); err != nil {
		return fmt.Errorf("pin program %s: %w", h.Name, err)
	}
	in.undos = append(in.undos, func() error { return removePin(staged(path)) })
	in.commits = append(in.commits, func() error { return os.Rename(staged(path), path) })
	return nil
}

// sameProgram reports whether two loaded programs have the same instructions and use the same maps.
func sameProgram(a, b *ebpf.Program) (bool, error) {
	ai, err := a.Info()
	if err != nil {
		return false, fmt.Errorf("ask for program: %w", err)
	}
	bi, err := b.Info()
	if err != nil {
		return false, fmt.Errorf("ask for program: %w", err)
	}
	am, _ := ai.MapIDs()
	bm, _ := bi.MapIDs()
	slices.Sort(am)
	slices.Sort(bm)
	return ai.Tag == bi.Tag && slices.Equal(am, bm), nil
}

// linkCgroup returns the cgroup l hangs at, 0 when that is gone.
func linkCgroup(l link.Link) (uint64, error) {
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("ask for link: %w", err)
	}
	cg := info.Cgroup()
	if cg == nil {
		return 0, fmt.Errorf("pinned link is of type %v, not at a cgroup", info.Type)
	}
	return cg.CgroupId, nil
}

// removePin removes a pin. What is not there is no error.
func removePin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove pin: %w", err)
	}
	return nil
}
