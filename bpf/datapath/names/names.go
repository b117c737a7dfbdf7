// Package names lets the kernel answer the questions that pods ask most, for the addresses of one name, before they
// leave the pod's veth. The program is names.bpf.c; this package fills its maps and keeps it on the veths of pods.
//
// Nothing is pinned: what is answered here goes with the process that knows it is right, and then every question
// reaches the resolver that it was sent to, as before.
package names

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
)

// ErrUnsupported means that this node cannot have answers from the kernel; what is missing is with it.
var ErrUnsupported = errors.New("names cannot be answered in the kernel")

// Config says what to answer.
type Config struct {
	// Resolvers are the addresses, in the resolv.conf of pods, for which questions at port 53 are answered.
	Resolvers []netip.Addr
	// Order is where the packet path stands among the programs of others on the same devices; "" is OrderNear. This
	// program stands at the other end, so that a policy which keeps a pod from its resolver holds here too.
	Order datapath.Order
}

// Responder answers in the kernel. Make one with [New]. Its methods may be called from any goroutine.
type Responder struct {
	log  *slog.Logger
	coll *ebpf.Collection
	at   link.Anchor

	mu       sync.Mutex
	links    map[int]link.Link // by the index of the device; guarded by mu
	failures map[int]string    // of devices that could not be served, as logged; guarded by mu
	left     int               // names that found no room; guarded by mu
}

// New loads the program. Nothing runs it before [Responder.Follow]. The caller closes the Responder.
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
		if err := coll.Maps[bpf.MapResolvers].Put(bpf.DNSResolver{Addr: a.As16()}, uint8(1)); err != nil {
			coll.Close()
			return nil, fmt.Errorf("write map %s: %w", bpf.MapResolvers, err)
		}
	}
	at := link.Tail()
	if c.Order == datapath.OrderFar {
		at = link.Head()
	}
	return &Responder{log: log, coll: coll, at: at, links: map[int]link.Link{}, failures: map[int]string{}}, nil
}

// Close ends all answers and frees what the kernel holds. A nil Responder answers nothing.
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

// Follow keeps the program on the veths of pods, as they come, until ctx ends; then it returns nil. So does that of a
// nil Responder.
func (r *Responder) Follow(ctx context.Context) error {
	if r == nil {
		return nil
	}
	for ctx.Err() == nil {
		if err := device.Watch(ctx, func() { r.attach(ctx) }); err != nil {
			// The kernel told more than we could read in time: look, and listen again.
			r.log.WarnContext(ctx, "devices are followed anew", "err", err)
		}
	}
	return nil
}

// attach puts the program on every veth of a pod that lacks it. A veth that went has taken its link along.
func (r *Responder) attach(ctx context.Context) {
	all, err := device.List()
	if err != nil {
		r.log.ErrorContext(ctx, "pods are not answered by the kernel", "err", err)
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
			r.log.ErrorContext(ctx, "a pod is not answered by the kernel", "device", d.Name, "err", err)
		}
	}
	for index, l := range r.links {
		if !seen[index] {
			delete(r.links, index)
			delete(r.failures, index)
			if err := l.Close(); err != nil {
				r.log.ErrorContext(ctx, "close the link of a device that went", "err", err)
			}
		}
	}
}

// runs reports whether the program is on a device; a link may be of one that went and whose number was given anew.
// The caller holds mu.
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
		r.log.Error("close the link of a device that went", "err", err)
	}
	return false
}

// Update makes the kernel answer for names as changes say. A name is lower case and on the wire, and has the IPv4 and
// the IPv6 address that stand beside it, those of them that are valid; it is not answered any more when none is. soa is
// the record that goes with "no data", without its owner, and ttl that of all answers, in seconds.
//
// A name that is too long, or finds no room, is left to the resolver. An error means that a name may be answered as it
// was before.
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
	m, left := r.coll.Maps[bpf.MapNames], 0
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
			if left++; !errors.Is(err, unix.E2BIG) {
				errs = append(errs, fmt.Errorf("write map %s: %w", bpf.MapNames, err))
			}
		}
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from map %s: %w", bpf.MapNames, err))
		}
	}
	if left > 0 && r.left == 0 {
		r.log.Warn("the kernel has no room for more names; their questions go to the resolver", "names", left)
	}
	r.left = left
	return errors.Join(errs...)
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

// Status is what a Responder does.
type Status struct {
	Devices int    // veths of pods that it answers
	A, AAAA uint64 // questions answered, by type
}

// Status returns the state of the Responder now.
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
