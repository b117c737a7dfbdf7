package bpf_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// closeStale runs the iterator in this namespace and returns the backends whose sockets it closed.
func (n *node) closeStale() []lb.BackendID {
	n.t.Helper()
	spec, err := bpf.LoadCloseSpec()
	if err != nil {
		n.t.Fatal(err)
	}
	replacements := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		replacements[name] = n.pinned(name)
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replacements})
	if errors.Is(err, ebpf.ErrNotSupported) {
		netlab.Skip(n.t, "this kernel cannot close a socket from an iterator")
	}
	if err != nil {
		n.t.Fatal(err)
	}
	defer coll.Close()
	l, err := link.AttachIter(link.IterOptions{Program: coll.Programs[bpf.ProgramCloseStale]})
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	r, err := l.Open()
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	out, err := io.ReadAll(r)
	if err != nil {
		n.t.Fatal(err)
	}
	var ids []lb.BackendID
	for ; len(out) >= 4; out = out[4:] {
		ids = append(ids, lb.BackendID(binary.NativeEndian.Uint32(out)))
	}
	return ids
}

// ask sends a query on a connected socket and returns the error.
func (s socket) ask() error {
	if err := again(s.t, func() error { return unix.Send(s.fd, []byte("?"), 0) }); err != nil {
		return err
	}
	return s.hear()
}

// hear waits for a datagram or an error.
func (s socket) hear() error {
	return again(s.t, func() error {
		_, _, err := unix.Recvfrom(s.fd, make([]byte, 64), 0)
		return err
	})
}

// Only sockets that are connected to a VIP and to a removed backend of it are closed: their owner gets an error.
func TestCloseStale(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			gone, kept := udpServer(t, way.backend), udpServer(t, way.backend)
			serve := func(first netip.AddrPort) {
				n.serve(vip{on(way.vip, 53), cs.UDP, []netip.AddrPort{first}}, vip{on(way.vip, 54), cs.UDP, []netip.AddrPort{kept}})
			}
			serve(gone)
			sockets := map[string]socket{}
			for _, who := range []string{"stale", "stays", "direct", "unconnected", "disconnected", "elsewhere", "sent, then elsewhere"} {
				sockets[who] = newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			}
			for _, who := range []string{"stale", "disconnected", "elsewhere"} {
				sockets[who].mustConnect(on(way.vip, 53))
			}
			sockets["stays"].mustConnect(on(way.vip, 54))
			sockets["direct"].mustConnect(gone.String()) // the same address and port, without a VIP
			for _, who := range []string{"unconnected", "sent, then elsewhere"} {
				if err := sockets[who].send(netip.MustParseAddrPort(on(way.vip, 53))); err != nil {
					t.Fatal(err)
				}
				sockets[who].read()
			}
			sockets["sent, then elsewhere"].mustConnect(kept.String())
			if err := disconnect(sockets["disconnected"].fd); err != nil {
				t.Fatal(err)
			}
			// A disconnected socket has no port, so no iterator sees it until it sends again.
			if err := sockets["disconnected"].send(kept); err != nil {
				t.Fatal(err)
			}
			sockets["elsewhere"].mustConnect(kept.String())

			if got := n.closeStale(); len(got) > 0 {
				t.Fatalf("sockets of backends %v closed although all backends exist", got)
			}
			id := n.backend(gone, cs.UDP)
			serve(kept)
			if diff := cmp.Diff([]lb.BackendID{id}, n.closeStale()); diff != "" {
				t.Errorf("backends whose sockets were closed (-want +got):\n%s", diff)
			}
			for who, s := range sockets {
				switch who {
				case "stale":
					if err := s.hear(); !errors.Is(err, unix.ECONNABORTED) {
						t.Errorf("%s: %v, want %v", who, err, unix.ECONNABORTED)
					}
				case "stays", "direct", "elsewhere", "sent, then elsewhere":
					if err := s.ask(); err != nil {
						t.Errorf("%s: %v", who, err)
					}
				default:
					if err := s.send(kept); err != nil {
						t.Errorf("%s: %v", who, err)
					}
				}
			}
			// The owner connects again and gets a current backend.
			sockets["stale"].mustConnect(on(way.vip, 53))
			if err := sockets["stale"].ask(); err != nil {
				t.Errorf("after connecting again: %v", err)
			}
		})
	}
}
