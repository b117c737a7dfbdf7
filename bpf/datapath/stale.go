package datapath

import (
	"context"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// CloseStale closes the UDP sockets that are connected to a backend that is in the maps no more, in every network
// namespace of the node, and returns how many: their programs get an error and can connect anew, to another
// backend. TCP needs no such thing, it drains. What is closed is decided by what connect has stored with the
// socket, never by an address alone.
//
// It visits every namespace, so it is for after an Apply that has deleted backends. On a kernel without the
// iterator, and in namespaces that the process may not enter, sockets stay; Missing says so.
func (d *Datapath) CloseStale(ctx context.Context) (closed int, err error) {
	if d.closer == nil {
		return 0, nil
	}
	_, err = d.namespaces.Visit(ctx, func() error {
		n, err := d.closeHere()
		closed += n
		return err
	})
	if err != nil {
		return closed, fmt.Errorf("close sockets of removed backends: %w", err)
	}
	return closed, nil
}

// loadCloser makes the iterator that closes stale sockets, over these maps. Kernels before 6.5 have none: then it
// returns an error.
func loadCloser(maps map[string]*ebpf.Map) (*link.Iter, error) {
	spec, err := bpf.LoadCloseSpec()
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
	it, err := link.AttachIter(link.IterOptions{Program: coll.Programs[bpf.ProgramCloseStale]})
	if err != nil {
		return nil, fmt.Errorf("attach iterator: %w", err)
	}
	return it, nil
}

// closeHere closes stale sockets of the calling thread's network namespace. Reading the iterator runs it.
func (d *Datapath) closeHere() (int, error) {
	r, err := d.closer.Open()
	if err != nil {
		return 0, fmt.Errorf("open iterator: %w", err)
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	if err != nil {
		return int(n / 4), fmt.Errorf("read iterator: %w", err)
	}
	return int(n / 4), nil // a number of four bytes for each
}

// mayEnter reports whether the process may enter the namespaces of others, for which it needs SYS_ADMIN.
func mayEnter() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	return unix.Capget(&header, &sets[0]) == nil && sets[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}
