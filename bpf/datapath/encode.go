package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The functions below are the only place where lb types become bytes of a map and back. tables binds them to their maps.

func encodeFrontendKey(a lb.Address) bpf.FrontendKey {
	return bpf.FrontendKey{Addr: bpf.Addr16(a.AddrPort.Addr()), Port: a.AddrPort.Port(), Proto: uint8(a.Protocol)}
}

func decodeFrontendKey(k bpf.FrontendKey) lb.Address {
	return lb.Address{AddrPort: netip.AddrPortFrom(bpf.AddrOf(k.Addr), k.Port), Protocol: clusterset.Protocol(k.Proto)}
}

func encodeFrontend(f lb.Frontend) bpf.Frontend {
	e := bpf.Frontend{Id: uint32(f.ID), Count: f.Count, Service: uint32(f.Service), Affinity: f.Affinity}
	if f.Maglev {
		e.Flags |= bpf.FrontendMaglev
	}
	return e
}

func decodeFrontend(f bpf.Frontend) lb.Frontend {
	return lb.Frontend{
		ID: lb.FrontendID(f.Id), Count: f.Count, Service: lb.ServiceID(f.Service), Affinity: f.Affinity, Maglev: f.Flags&bpf.FrontendMaglev != 0,
	}
}

func encodeSlot(s lb.Slot) bpf.SlotKey {
	return bpf.SlotKey{FrontendId: uint32(s.Frontend), Slot: s.Index}
}

func decodeSlot(k bpf.SlotKey) lb.Slot {
	return lb.Slot{Frontend: lb.FrontendID(k.FrontendId), Index: k.Slot}
}

func encodeBackend(b lb.Backend) bpf.Backend {
	e := bpf.Backend{Addr: bpf.Addr16(b.AddrPort.Addr()), Port: b.AddrPort.Port(), Proto: uint8(b.Protocol), Cluster: uint16(b.Cluster)}
	if b.Draining {
		e.Flags |= bpf.BackendDraining
	}
	return e
}

func decodeBackend(b bpf.Backend) lb.Backend {
	return lb.Backend{
		Address: lb.Address{AddrPort: netip.AddrPortFrom(bpf.AddrOf(b.Addr), b.Port), Protocol: clusterset.Protocol(b.Proto)},
		Cluster: lb.ClusterIndex(b.Cluster), Draining: b.Flags&bpf.BackendDraining != 0,
	}
}

func encodeService(n clusterset.ServiceName) bpf.Service {
	var e bpf.Service
	copyText(e.Name[:], n.String())
	return e
}

func decodeService(s bpf.Service) clusterset.ServiceName {
	namespace, name, _ := strings.Cut(text(s.Name[:]), "/")
	return clusterset.ServiceName{Namespace: namespace, Name: name}
}

func encodeCluster(id clusterset.ClusterID) bpf.Cluster {
	var e bpf.Cluster
	copyText(e.Id[:], string(id))
	return e
}

func decodeCluster(c bpf.Cluster) clusterset.ClusterID { return clusterset.ClusterID(text(c.Id[:])) }

func encodeRange(p netip.Prefix) bpf.RangeKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return bpf.RangeKey{Prefixlen: uint32(bits), Addr: bpf.Addr16(p.Masked().Addr())}
}

func decodeRange(k bpf.RangeKey) netip.Prefix {
	addr, bits := bpf.AddrOf(k.Addr), int(k.Prefixlen)
	if addr.Is4() && bits >= 96 {
		bits -= 96
	}
	return netip.PrefixFrom(addr, bits)
}

// copyText fills a NUL-terminated array of C with s, cut to what fits.
func copyText(to []int8, s string) {
	for i := range min(len(s), len(to)-1) {
		to[i] = int8(s[i])
	}
}

func text(from []int8) string {
	var out []byte
	for _, c := range from {
		if c == 0 {
			break
		}
		out = append(out, byte(c))
	}
	return string(out)
}

// chunk is how many entries go to the kernel in one system call: enough to make the call itself cheap, few enough that
// a cancelled Apply ends soon and that the CPUs end together.
const chunk = 1024

// dump calls visit for every entry of a map of r, in no order.
func dump[K, V any](ctx context.Context, r *Reader, name string, visit func(K, V)) error {
	m, err := r.open(name)
	if err != nil {
		return err
	}
	var cursor ebpf.MapBatchCursor
	room := min(chunk, int(m.MaxEntries()))
	keys, values := make([]K, room), make([]V, room)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			visit(keys[i], values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil // the end
		}
		if err != nil {
			return fmt.Errorf("read map %s: %w", m, err)
		}
	}
}

// iterate is dump for kinds of maps that cannot be read in batches. They are small here.
func iterate[K, V any](ctx context.Context, r *Reader, name string, visit func(K, V)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m, err := r.open(name)
	if err != nil {
		return err
	}
	var key K
	var value V
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		visit(key, value)
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read map %s: %w", m, err)
	}
	return nil
}

// putAll encodes the entries, writes them to a map of d, and counts them.
func putAll[W, K, V any](ctx context.Context, d *Datapath, name string, writes []W, encode func(W) (K, V)) error {
	m := d.maps[name]
	return inChunks(ctx, writes, func(part []W) error {
		keys, values := make([]K, len(part)), make([]V, len(part))
		for i, w := range part {
			keys[i], values[i] = encode(w)
		}
		done, err := m.BatchUpdate(keys, values, nil)
		d.writes.Add(uint64(done))
		if errors.Is(err, unix.E2BIG) {
			return fmt.Errorf("write map %s: full at %d entries: %w", name, m.MaxEntries(), err)
		}
		if err != nil {
			return fmt.Errorf("write map %s: %w", name, err)
		}
		return nil
	})
}

// remove deletes entries from a map of d and counts them. A missing entry is no error.
func remove[T, K any](ctx context.Context, d *Datapath, name string, entries []T, encode func(T) K) error {
	return inChunks(ctx, entries, func(part []T) error {
		keys := make([]K, len(part))
		for i, e := range part {
			keys[i] = encode(e)
		}
		for len(keys) > 0 {
			done, err := d.maps[name].BatchDelete(keys, nil)
			d.writes.Add(uint64(done))
			switch {
			case err == nil:
				return nil
			case errors.Is(err, ebpf.ErrKeyNotExist):
				keys = keys[done+1:] // the kernel stopped at the missing one: continue after it
			default:
				return fmt.Errorf("delete from map %s: %w", name, err)
			}
		}
		return nil
	})
}

// inChunks calls do for all entries, one chunk at a time on each CPU: within a step of a Plan any order will do. It
// starts no more chunks after an error, or when ctx ends, and returns the first error once all have ended. A single
// chunk, which covers most changes, runs on the calling goroutine.
func inChunks[T any](ctx context.Context, entries []T, do func(part []T) error) error {
	if len(entries) == 0 {
		return nil
	}
	if len(entries) <= chunk {
		return begin(ctx, entries, do)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for part := range slices.Chunk(entries, chunk) {
		group.Go(func() error { return begin(ctx, part, do) })
	}
	return group.Wait()
}

// begin calls do unless ctx has ended.
func begin[T any](ctx context.Context, part []T, do func(part []T) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return do(part)
}
