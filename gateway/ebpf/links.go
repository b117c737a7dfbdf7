package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
)

// hook is an attach point that every device has. A pinned link attaches a program to it.
type hook struct {
	prog   *ebpf.Program
	prefix string // of the pins' names, before the device's index
	attach func(index int, p *ebpf.Program) (link.Link, error)
	// device returns the index of the device that a link is attached to, 0 if the link belongs to another hook or is
	// detached.
	device func(*link.Info) uint32
}

func (k *kernel) ingress() hook {
	return hook{
		k.prog, "",
		func(index int, p *ebpf.Program) (link.Link, error) {
			return link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		},
		func(i *link.Info) uint32 {
			if t := i.TCX(); t != nil {
				return t.Ifindex
			}
			return 0
		},
	}
}

// driver returns the hook of drivers: XDP in native mode. Earlier versions, which do not know its pins, detach them.
func (k *kernel) driver() hook {
	return hook{
		k.xdp, "xdp-",
		func(index int, p *ebpf.Program) (link.Link, error) {
			return link.AttachXDP(link.XDPOptions{Interface: index, Program: p, Flags: link.XDPDriverMode})
		},
		func(i *link.Info) uint32 {
			if x := i.XDP(); x != nil {
				return x.Ifindex
			}
			return 0
		},
	}
}

func (h *hook) pin(index int) string { return h.prefix + strconv.Itoa(index) }

// put attaches our program to a device. It replaces an older one of ours without a gap.
func (k *kernel) put(h hook, index int) error {
	path := filepath.Join(k.links(), h.pin(index))
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return h.putNew(index, path)
	}
	if err != nil {
		return fmt.Errorf("open pinned link: %w", err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return fmt.Errorf("ask for link: %w", err)
	}
	if h.device(info) != uint32(index) {
		// The index belonged to a removed device and was reused, or another process has detached the link.
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove pin: %w", err)
		}
		return h.putNew(index, path)
	}
	if err := l.Update(h.prog); err != nil {
		return fmt.Errorf("replace program: %w", err)
	}
	return nil
}

func (h *hook) putNew(index int, path string) error {
	l, err := h.attach(index, h.prog)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

// detach detaches the link that is pinned at path, and removes the pin.
func (k *kernel) detach(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned link: %w", err)
	}
	if err := errors.Join(l.Detach(), l.Close(), os.Remove(path)); err != nil {
		return fmt.Errorf("detach %s: %w", path, err)
	}
	return nil
}

// detachOthers detaches all our programs except those whose pins are in keep.
func (k *kernel) detachOthers(keep map[string]bool) error {
	pinned, err := os.ReadDir(k.links())
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	for _, e := range pinned {
		if !keep[e.Name()] {
			if err := k.detach(filepath.Join(k.links(), e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// has reports whether a device runs our program at that hook.
func (k *kernel) has(h hook, index int) (bool, error) {
	l, err := link.LoadPinnedLink(filepath.Join(k.links(), h.pin(index)), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open pinned link: %w", err)
	}
	defer l.Close()
	have, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("ask for link: %w", err)
	}
	id, err := bpf.ProgramID(h.prog)
	if err != nil {
		return false, err
	}
	return h.device(have) == uint32(index) && have.Program == id, nil
}
