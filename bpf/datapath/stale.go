package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/sockdiag"
)

// CloseStale closes the UDP sockets that are connected to a removed backend, in every network namespace of the node, and
// returns how many. Their programs get an error and can connect again, to another backend. TCP connections need no
// closing: they drain. A socket is recognised by the backend that connect stored with it, never by an address alone.
//
// It visits every namespace, so call it after an Apply that has deleted backends. Sockets in namespaces that the
// process may not enter stay open, which Missing reports.
func (d *Datapath) CloseStale(ctx context.Context) (closed int, err error) {
	if d.stale == nil {
		return 0, nil
	}
	_, err = d.namespaces.Visit(ctx, func() error {
		n, err := d.stale.closeHere()
		closed += n
		return err
	})
	if err != nil {
		return closed, fmt.Errorf("close sockets of removed backends: %w", err)
	}
	return closed, nil
}

// staleSockets finds the sockets whose backend was removed.
type staleSockets struct {
	iterator *link.Iter
	// closes is true for an iterator that closes them itself, which needs Linux 6.5.
	closes bool
}

// loadStaleSockets loads the iterator over these maps. noClose is the reason why it can only find sockets, or nil.
func loadStaleSockets(maps map[string]*ebpf.Map) (s *staleSockets, noClose, err error) {
	it, noClose := loadIterator(maps, bpf.ProgramCloseStale, bpf.LoadCloseSpec)
	if noClose == nil {
		return &staleSockets{it, true}, nil, nil
	}
	it, err = loadIterator(maps, bpf.ProgramFindStale, bpf.LoadFindSpec)
	if err != nil {
		return nil, noClose, err
	}
	return &staleSockets{it, false}, noClose, nil
}

func loadIterator(maps map[string]*ebpf.Map, program string, load func() (*ebpf.CollectionSpec, error)) (*link.Iter, error) {
	spec, err := load()
	if err != nil {
		return nil, fmt.Errorf("parse BPF object: %w", err)
	}
	used := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		used[name] = maps[name]
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: used})
	if err != nil {
		return nil, fmt.Errorf("load iterator: %w", err)
	}
	defer coll.Close()
	it, err := link.AttachIter(link.IterOptions{Program: coll.Programs[program]})
	if err != nil {
		return nil, fmt.Errorf("attach iterator: %w", err)
	}
	return it, nil
}

// closeHere closes the stale sockets of the calling thread's network namespace and returns how many.
func (s *staleSockets) closeHere() (int, error) {
	if s.closes {
		out, err := s.read()
		return len(out) / 4, err // the iterator prints a backend number for each socket
	}
	// List first: listing gives each socket the cookie that the iterator prints.
	all, err := sockdiag.List()
	if err != nil {
		return 0, err
	}
	out, err := s.read()
	if err != nil {
		return 0, err
	}
	stale := map[uint64]bool{}
	for ; len(out) >= 8; out = out[8:] {
		stale[binary.NativeEndian.Uint64(out)] = true
	}
	closed := 0
	var errs []error
	for _, socket := range all {
		if !stale[socket.Cookie] {
			continue
		}
		ok, err := socket.Close()
		errs = append(errs, err)
		if ok {
			closed++
		}
	}
	return closed, errors.Join(errs...)
}

// read runs the iterator over the sockets of the calling thread's network namespace.
func (s *staleSockets) read() ([]byte, error) {
	r, err := s.iterator.Open()
	if err != nil {
		return nil, fmt.Errorf("open iterator: %w", err)
	}
	defer r.Close()
	out, err := io.ReadAll(r)
	if err != nil {
		return out, fmt.Errorf("read iterator: %w", err)
	}
	return out, nil
}

// canEnterNamespaces reports whether the process may enter other network namespaces, which needs SYS_ADMIN.
func canEnterNamespaces() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	return unix.Capget(&header, &sets[0]) == nil && sets[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}
