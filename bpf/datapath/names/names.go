// Package names answers A and AAAA queries of pods in the kernel, before they leave the pod's veth. The program is
// names.bpf.c; this package fills its maps and attaches it to the veths of pods.
//
// Nothing is pinned: the answers end with the process that keeps them up to date, and then every query reaches
// its resolver again.
package names

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
)

// ErrUnsupported means that the kernel of this node cannot answer queries; the error that wraps it names the missing
// feature.
var ErrUnsupported = errors.New("names cannot be answered in the kernel")

// Config configures a Responder.
type Config struct {
	// Resolvers are the nameservers in the resolv.conf of pods. Queries to port 53 of these are answered.
	Resolvers []netip.Addr
	// Guarded are those of Resolvers that answer only some clients. Queries of others than those of [Responder.SetClients] pass
	// to them unchanged.
	Guarded []netip.Addr
	// Order is the position of the packet path among the programs of others on the same devices; "" is OrderNear. This
	// program is at the other end, so that a policy which denies a pod its resolver applies here too.
	Order datapath.Order
}

// Responder answers queries in the kernel. Make one with [New]. Its methods may be called from any goroutine.
type Responder struct {
	log  *slog.Logger
	coll *ebpf.Collection
	at   link.Anchor

	mu       sync.Mutex
	clients  map[netip.Prefix]bool // in the map; guarded by mu
	links    map[int]link.Link     // by the index of the device; guarded by mu
	failures map[int]string        // the logged errors of devices that could not be served; guarded by mu
	rejected int                   // names without room in the map; guarded by mu
}

// New loads the program. [Responder.Follow] attaches it. The caller closes the Responder.
func New(c Config, log *slog.Logger) (*Responder, error) {
	spec, err := bpf.LoadNamesSpec()
	if err != nil {
		return nil, err
	}
	return load(spec, c, log)
}

func load(spec *ebpf.CollectionSpec, c Config, log *slog.Logger) (*Responder, error) {
	const loopback = 1
	if _, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress}); err != nil {
		return nil, fmt.Errorf("%w: no TCX, which needs Linux 6.6: %w", ErrUnsupported, err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, fmt.Errorf("%w: load the program: %w", ErrUnsupported, err)
	}
	for _, a := range c.Resolvers {
		kind := bpf.NamesAnswered
		if slices.Contains(c.Guarded, a) {
			kind = bpf.NamesGuarded
		}
		if err := coll.Maps[bpf.MapResolvers].Put(bpf.DNSResolver{Addr: a.As16()}, kind); err != nil {
			coll.Close()
			return nil, fmt.Errorf("write map %s: %w", bpf.MapResolvers, err)
		}
	}
	at := link.Tail()
	if c.Order == datapath.OrderFar {
		at = link.Head()
	}
	return &Responder{log: log, coll: coll, at: at, clients: map[netip.Prefix]bool{}, links: map[int]link.Link{}, failures: map[int]string{}}, nil
}

// Close detaches the program and frees its maps. Closing a nil Responder does nothing.
func (r *Responder) Close() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, l := range r.links {
		errs = append(errs, l.Close())
	}
	r.links = map[int]link.Link{}
	r.coll.Close()
	return errors.Join(errs...)
}

// Follow keeps the program attached to the veths of pods, including new ones, until ctx ends; then it returns nil. A nil
// Responder returns at once.
func (r *Responder) Follow(ctx context.Context) error {
	if r == nil {
		return nil
	}
	for ctx.Err() == nil {
		if err := device.Watch(ctx, func() { r.attach(ctx) }); err != nil {
			// The kernel sent more notifications than we could read in time: list the devices and subscribe again.
			r.log.WarnContext(ctx, "watch devices; watching again", "err", err)
		}
	}
	return nil
}

// attach attaches the program to every veth of a pod that lacks it, and closes the links of removed veths.
func (r *Responder) attach(ctx context.Context) {
	all, err := device.List()
	if err != nil {
		r.log.ErrorContext(ctx, "answer pods in the kernel", "err", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[int]bool{}
	for _, d := range all {
		if !d.PeerElsewhere {
			continue
		}
		seen[d.Index] = true
		if r.runs(d.Index) {
			continue
		}
		l, err := link.AttachTCX(link.TCXOptions{
			Interface: d.Index, Program: r.coll.Programs[bpf.ProgAnswerNames], Attach: ebpf.AttachTCXIngress, Anchor: r.at,
		})
		switch {
		case err == nil:
			r.links[d.Index] = l
			delete(r.failures, d.Index)
		case errors.Is(err, unix.ENODEV):
		case r.failures[d.Index] != err.Error():
			r.failures[d.Index] = err.Error()
			r.log.ErrorContext(ctx, "answer a pod in the kernel", "device", d.Name, "err", err)
		}
	}
	for index, l := range r.links {
		if !seen[index] {
			delete(r.links, index)
			delete(r.failures, index)
			if err := l.Close(); err != nil {
				r.log.ErrorContext(ctx, "close the link of a removed device", "err", err)
			}
		}
	}
}

// runs reports whether the program is attached to a device. A link may belong to a removed device whose index was
// reused. The caller holds mu.
func (r *Responder) runs(index int) bool {
	l, ok := r.links[index]
	if !ok {
		return false
	}
	info, err := l.Info()
	if err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == index {
		return true
	}
	delete(r.links, index)
	if err := l.Close(); err != nil {
		r.log.Error("close the link of a removed device", "err", err)
	}
	return false
}

// Update sets the answers for the changed names. A name is lower case and in wire format; its value is an IPv4 and an
// IPv6 address, each of which may be invalid. A name without a valid address is removed. soa is the SOA record for "no
// data" answers, without its owner name; ttl is that of all answers, in seconds.
//
// The resolver answers names that are too long or find no room in the map. After an error some names may have their
// former answers.
func (r *Responder) Update(ttl uint32, soa string, changes iter.Seq2[string, [2]netip.Addr]) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s bpf.NamesSettings
	if len(soa) != len(s.Soa) {
		return fmt.Errorf("a SOA of %d bytes, not %d", len(soa), len(s.Soa))
	}
	copy(s.Soa[:], soa)
	s.Ttl = binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, ttl))
	if err := r.coll.Maps[bpf.MapNamesSettings].Put(uint32(0), s); err != nil {
		return fmt.Errorf("write map %s: %w", bpf.MapNamesSettings, err)
	}
	var errs []error
	m, rejected := r.coll.Maps[bpf.MapNames], 0
	for name, addrs := range changes {
		var key bpf.DNSName
		if copy(key.Wire[:], name) < len(name) {
			continue
		}
		value := encode(addrs)
		if value.Families != 0 {
			err := m.Put(key, value)
			if err == nil {
				continue
			}
			if rejected++; !errors.Is(err, unix.E2BIG) {
				errs = append(errs, fmt.Errorf("write map %s: %w", bpf.MapNames, err))
			}
		}
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from map %s: %w", bpf.MapNames, err))
		}
	}
	if rejected > 0 && r.rejected == 0 {
		r.log.Warn("the kernel has no room for more names; the resolver answers them", "names", rejected)
	}
	r.rejected = rejected
	return errors.Join(errs...)
}

// SetClients sets the clients whose queries to guarded resolvers are answered. After an error some clients may be missing, and
// some former ones may be left; the next call writes and deletes them again. Setting the clients of a nil Responder does nothing.
func (r *Responder) SetClients(clients []netip.Prefix) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.coll.Maps[bpf.MapDNSClients]
	var errs []error
	kept := map[netip.Prefix]bool{}
	for _, p := range clients {
		kept[p] = true
	}
	for p := range r.clients {
		if kept[p] {
			continue
		}
		if err := m.Delete(clientKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from map %s: %w", bpf.MapDNSClients, err))
			continue
		}
		delete(r.clients, p)
	}
	for _, p := range clients {
		if r.clients[p] {
			continue
		}
		if err := m.Put(clientKey(p), uint8(1)); err != nil {
			errs = append(errs, fmt.Errorf("write map %s: %w", bpf.MapDNSClients, err))
			break
		}
		r.clients[p] = true
	}
	return errors.Join(errs...)
}

// clientKey returns the key of a prefix; those of IPv4 are mapped.
func clientKey(p netip.Prefix) bpf.DNSClient {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return bpf.DNSClient{Bits: uint32(bits), Addr: p.Addr().As16()}
}

func encode(addrs [2]netip.Addr) bpf.DNSAddresses {
	var a bpf.DNSAddresses
	if addrs[0].Is4() {
		a.Ipv4, a.Families = addrs[0].As4(), bpf.NamesIPv4
	}
	if addrs[1].Is6() {
		a.Ipv6, a.Families = addrs[1].As16(), a.Families|bpf.NamesIPv6
	}
	return a
}

// Status is the state of a Responder.
type Status struct {
	Devices int    // veths that run the program
	A, AAAA uint64 // answered queries, by type
}

// Status returns the current state of the Responder.
func (r *Responder) Status() (Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Status{Devices: len(r.links)}
	for index, to := range map[uint32]*uint64{bpf.NamesA: &s.A, bpf.NamesAAAA: &s.AAAA} {
		var each []uint64
		if err := r.coll.Maps[bpf.MapNamesCounts].Lookup(index, &each); err != nil {
			return Status{}, fmt.Errorf("read map %s: %w", bpf.MapNamesCounts, err)
		}
		for _, n := range each {
			*to += n
		}
	}
	return s, nil
}
