package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
)

// steps collects the functions that undo a change, that commit it, and that close what it used.
type steps struct {
	undos   []func() error // newest last
	commits []func() error
	closers []func() error
}

func (s *steps) onUndo(f func() error)   { s.undos = append(s.undos, f) }
func (s *steps) onCommit(f func() error) { s.commits = append(s.commits, f) }
func (s *steps) onClose(f func() error)  { s.closers = append(s.closers, f) }

// undo reverts the change, newest step first.
func (s *steps) undo() error {
	var errs []error
	for _, undo := range slices.Backward(s.undos) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// commit makes the change permanent.
func (s *steps) commit() error {
	for _, commit := range s.commits {
		if err := commit(); err != nil {
			return err
		}
	}
	return nil
}

// close closes what the change needed.
func (s *steps) close() error {
	var errs []error
	for _, c := range s.closers {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// installer attaches loaded programs to the hooks of a cgroup. Until it commits, undo restores the node.
type installer struct {
	steps

	pins   pins
	cgroup cgroup
	hooks  []bpf.Hook
	progs  map[string]*ebpf.Program // the caller's

	links                         []attachment
	attached, replaced, unchanged int
}

// run attaches every hook. When it fails, the node is as before.
func (in *installer) run() error {
	err := in.attachAll()
	if err == nil {
		err = in.commit()
	}
	if err == nil {
		return in.close()
	}
	errs := []error{err, in.undo()}
	for _, a := range in.links {
		errs = append(errs, a.link.Close())
	}
	in.links = nil
	return errors.Join(append(errs, in.close())...)
}

func (in *installer) attachAll() error {
	for _, h := range in.hooks {
		l, err := in.installHook(h)
		if err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.Name, in.cgroup.path, err)
		}
		in.links = append(in.links, attachment{h, l})
	}
	return nil
}

// installHook attaches our program to h and returns the link.
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
		// The link is at another cgroup, or at a removed one: attach here first, then close the old link.
		in.onClose(old.Close)
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
		return nil, in.cgroup.explain(h, err)
	}
	if err := in.stageProgram(h); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if err := l.Pin(path); err != nil {
		return nil, errors.Join(fmt.Errorf("pin link: %w", err), l.Close())
	}
	in.onUndo(func() error { return removePin(path) })
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
	in.onCommit(func() error { return os.Rename(staged(path), path) })
	return l, nil
}

// replace swaps the program of a link in place, unless it equals ours. No connect falls between the two: the kernel
// exchanges a pointer.
func (in *installer) replace(h bpf.Hook, l link.Link) error {
	running, err := in.pins.runningProgram(h.Name, l)
	if err != nil {
		return err
	}
	if running != nil {
		in.onClose(running.Close)
		same, err := sameProgram(running, in.progs[h.Name])
		if err != nil {
			return err
		}
		if same {
			in.unchanged++
			return in.finishInterrupted(h, running)
		}
	}
	if err := in.stageProgram(h); err != nil {
		return err
	}
	if err := l.Update(in.progs[h.Name]); err != nil {
		return fmt.Errorf("replace program: %w", err)
	}
	if running != nil {
		in.onUndo(func() error { return l.Update(running) })
	}
	in.replaced++
	return nil
}

// finishInterrupted completes an installation that was killed before it moved the pin of the running program.
func (in *installer) finishInterrupted(h bpf.Hook, running *ebpf.Program) error {
	path := in.pins.progPath(h.Name)
	pinned, err := ebpf.LoadPinnedProgram(staged(path), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned program %s: %w", staged(path), err)
	}
	in.onClose(pinned.Close)
	a, err := bpf.ProgramID(pinned)
	if err != nil {
		return err
	}
	b, err := bpf.ProgramID(running)
	if err != nil {
		return err
	}
	if a == b {
		in.onCommit(func() error { return os.Rename(staged(path), path) })
	} else {
		in.onCommit(func() error { return removePin(staged(path)) })
	}
	return nil
}

// runningProgram returns the pinned program that l runs, nil when it has no pin. An installation that was killed
// before its end has left a staged pin.
func (p pins) runningProgram(hook string, l link.Link) (*ebpf.Program, error) {
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("query link %s: %w", hook, err)
	}
	for _, path := range []string{p.progPath(hook), staged(p.progPath(hook))} {
		prog, err := ebpf.LoadPinnedProgram(path, nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open pinned program %s: %w", path, err)
		}
		id, err := bpf.ProgramID(prog)
		if err != nil {
			return nil, errors.Join(err, prog.Close())
		}
		if id == info.Program {
			return prog, nil
		}
		if err := prog.Close(); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// stageProgram pins our program beside the current pin, which it replaces on commit.
func (in *installer) stageProgram(h bpf.Hook) error {
	path := in.pins.progPath(h.Name)
	if err := removePin(staged(path)); err != nil {
		return err
	}
	// Pin a clone: a Program remembers its pin, and this pin is about to move.
	p, err := in.progs[h.Name].Clone()
	if err != nil {
		return fmt.Errorf("clone program %s: %w", h.Name, err)
	}
	in.onClose(p.Close)
	if err := p.Pin(staged(path)); err != nil {
		return fmt.Errorf("pin program %s: %w", h.Name, err)
	}
	in.onUndo(func() error { return removePin(staged(path)) })
	in.onCommit(func() error { return os.Rename(staged(path), path) })
	return nil
}

// sameProgram reports whether two loaded programs have the same instructions and use the same maps.
func sameProgram(a, b *ebpf.Program) (bool, error) {
	ai, err := a.Info()
	if err != nil {
		return false, fmt.Errorf("query program: %w", err)
	}
	bi, err := b.Info()
	if err != nil {
		return false, fmt.Errorf("query program: %w", err)
	}
	am, _ := ai.MapIDs()
	bm, _ := bi.MapIDs()
	slices.Sort(am)
	slices.Sort(bm)
	return ai.Tag == bi.Tag && slices.Equal(am, bm), nil
}

// linkCgroup returns the cgroup that l is attached to, 0 when it was removed.
func linkCgroup(l link.Link) (uint64, error) {
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("query link: %w", err)
	}
	cg := info.Cgroup()
	if cg == nil {
		return 0, fmt.Errorf("pinned link has type %v, want a cgroup link", info.Type)
	}
	return cg.CgroupId, nil
}

// openLinks returns the pinned links of hooks.
func (p pins) openLinks(hooks []bpf.Hook) ([]attachment, error) {
	var links []attachment
	for _, h := range hooks {
		l, err := link.LoadPinnedLink(p.linkPath(h.Name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open pinned link %s: %w", h.Name, err), closeLinks(links))
		}
		links = append(links, attachment{h, l})
	}
	return links, nil
}

// foreign reports whether a hook of the cgroup runs a program of another ABI, which does not use these maps. A program
// that cannot be examined counts as one: waiting is always safe.
func (p pins) foreign(at cgroup, ours map[string]*ebpf.Map) (bool, error) {
	ids := map[ebpf.MapID]bool{}
	for name, m := range ours {
		info, err := m.Info()
		if err != nil {
			return false, fmt.Errorf("query map %s: %w", name, err)
		}
		id, _ := info.ID()
		ids[id] = true
	}
	names, err := list(p.linkPath(""))
	if err != nil {
		return false, err
	}
	for _, name := range names {
		is, err := p.foreignHook(name, at, ids)
		if err != nil || is {
			return is, err
		}
	}
	return false, nil
}

func (p pins) foreignHook(name string, at cgroup, ours map[ebpf.MapID]bool) (bool, error) {
	l, err := link.LoadPinnedLink(p.linkPath(name), nil)
	if err != nil {
		return false, fmt.Errorf("open pinned link %s: %w", name, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("query link %s: %w", name, err)
	}
	if cg := info.Cgroup(); cg == nil || cg.CgroupId != at.id {
		return false, nil // it serves no process of this cgroup
	}
	prog, err := p.runningProgram(strings.TrimSuffix(name, suffix), l)
	if err != nil || prog == nil {
		return err == nil, err
	}
	defer prog.Close()
	pi, err := prog.Info()
	if err != nil {
		return false, fmt.Errorf("query program %s: %w", name, err)
	}
	used, _ := pi.MapIDs()
	return slices.ContainsFunc(used, func(id ebpf.MapID) bool { return !ours[id] }), nil
}

// clean removes what other builds have left: links and programs of hooks that keep rejects, maps that are not in ours,
// and the maps of other ABIs. Call it after the installation, when no running program needs them.
func (p pins) clean(keep func(hook string) bool, ours map[string]*ebpf.Map) error {
	links, err := list(p.linkPath(""))
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range links {
		if !keep(name) {
			errs = append(errs, detach(p.linkPath(name)), removePin(p.linkPath(name)))
		}
	}
	progs, err := list(p.progPath(""))
	errs = append(errs, err)
	for _, name := range progs {
		if !keep(name) {
			errs = append(errs, removePin(p.progPath(name)))
		}
	}
	maps, err := list(p.maps())
	errs = append(errs, err)
	for _, name := range maps {
		if ours[name] == nil {
			errs = append(errs, removePin(p.mapPath(name)))
		}
	}
	others, err := p.otherMaps()
	errs = append(errs, err)
	for _, dir := range others {
		if err := os.RemoveAll(dir); err != nil {
			errs = append(errs, fmt.Errorf("remove maps of another version in %s: %w", filepath.Base(dir), err))
		}
	}
	return errors.Join(errs...)
}
