package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Reader reads the maps of a node, beside the agent that writes them or without one.
type Reader struct {
	pins pins
	maps map[string]*ebpf.Map
}

// ErrNotInstalled means that a node has no dataplane of this version.
var ErrNotInstalled = errors.New("no dataplane installed")

// Read opens the pinned maps of a node read-only. It returns ErrNotInstalled if the node has none, or only those of
// another version, which the error names.
func Read(cfg Config) (*Reader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := requireBPFFS(cfg.BPFFS); err != nil {
		return nil, err
	}
	r := &Reader{pins: pins{cfg.BPFFS, bpf.ABIVersion}, maps: map[string]*ebpf.Map{}}
	names, err := list(r.pins.maps())
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, r.pins.notInstalled()
	}
	for _, name := range names {
		m, err := ebpf.LoadPinnedMap(r.pins.mapPath(name), &ebpf.LoadPinOptions{ReadOnly: true})
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since it was listed
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open pinned map %s: %w", name, err), r.Close())
		}
		r.maps[name] = m
	}
	return r, nil
}

// notInstalled returns an ErrNotInstalled that names the version that is installed instead, if any.
func (p pins) notInstalled() error {
	others, err := p.otherMaps()
	if err != nil {
		return err
	}
	if len(others) == 0 {
		return fmt.Errorf("no dataplane of Isthmus in %s; start the agent on this node, or name its BPF filesystem: %w", p.bpffs, ErrNotInstalled)
	}
	for i, o := range others {
		others[i] = filepath.Base(o)
	}
	return fmt.Errorf("the dataplane in %s has another version (%s, this binary has %s); use the binary of its agent: %w",
		p.dir(), strings.Join(others, ", "), filepath.Base(p.maps()), ErrNotInstalled)
}

// Close closes the file descriptors of the maps. The maps stay.
func (r *Reader) Close() error { return closeAll(r.maps) }

// open returns the map of a name.
func (r *Reader) open(name string) (*ebpf.Map, error) {
	if m := r.maps[name]; m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("open map %s: %w", name, fs.ErrNotExist)
}

// Refusals returns how many clients were refused since the maps were created, by Service and reason. Service 0 counts
// clients of an address that no Service has. Zero counts are left out.
func (r *Reader) Refusals() (map[Refusal]uint64, error) {
	counts := map[Refusal]uint64{}
	err := dump(context.Background(), r, bpf.MapRefusals, func(k bpf.RefusalKey, n uint64) {
		counts[Refusal{lb.ServiceID(k.Service), k.Reason}] += n
	})
	return counts, err
}

// Refusal is a Service whose clients were refused, and the reason.
type Refusal struct {
	Service lb.ServiceID
	Reason  bpf.DropReason
}

// Chosen returns how often a backend was chosen for a client, by Service, since the Service got its number.
func (r *Reader) Chosen() (map[lb.ServiceID]uint64, error) {
	counts := map[lb.ServiceID]uint64{}
	err := dump(context.Background(), r, bpf.MapServices, func(id uint32, v bpf.Service) {
		counts[lb.ServiceID(id)] = v.Chosen
	})
	return counts, err
}

// Counters count the clients of a Service since it got its number.
type Counters struct {
	Chosen  uint64 // clients that got a backend
	Refused map[bpf.DropReason]uint64
}

// Counters returns the counters of every Service that has had clients. Clients refused without a Service, or by a
// removed one, count under the zero name.
func (r *Reader) Counters() (map[clusterset.ServiceName]Counters, error) {
	names := map[lb.ServiceID]clusterset.ServiceName{}
	counts := map[clusterset.ServiceName]Counters{}
	err := dump(context.Background(), r, bpf.MapServices, func(id uint32, v bpf.Service) {
		name := decodeService(v)
		names[lb.ServiceID(id)] = name
		if v.Chosen > 0 {
			counts[name] = Counters{Chosen: v.Chosen}
		}
	})
	if err != nil {
		return nil, err
	}
	refusals, err := r.Refusals()
	for refusal, n := range refusals {
		c := counts[names[refusal.Service]]
		if c.Refused == nil {
			c.Refused = map[bpf.DropReason]uint64{}
		}
		c.Refused[refusal.Reason] += n
		counts[names[refusal.Service]] = c
	}
	return counts, err
}

// EvictedUDPVIPs returns how many VIPs of unconnected UDP sockets were evicted for others since the maps were created.
// A reply to such a socket has the backend's address as its source. It reads the whole map.
func (r *Reader) EvictedUDPVIPs() (uint64, error) {
	var added, present uint64
	if _, err := lookup(r, bpf.MapUDPVIPsAdded, uint32(0), &added); err != nil {
		return 0, err
	}
	err := dump(context.Background(), r, bpf.MapUDPVIPs, func(bpf.UDPVIPKey, bpf.UDPVIP) { present++ })
	return added - min(added, present), err // some may have been added since the count was read
}

// Evidence is what the kernel has seen of connections to a member's backends since the member got its index. Times are
// of CLOCK_BOOTTIME, which [SinceBoot] reads; 0 is never.
type Evidence struct {
	Established uint64        // completed handshakes
	TimedOut    uint64        // handshakes without an answer
	Reset       uint64        // refused handshakes
	Silent      uint64        // retransmission timeouts of established connections
	AnsweredAt  time.Duration // when a packet last came from the member
	SilentAt    time.Duration // when an answer last failed to come
}

// Clusters returns the evidence about every member that has an index.
func (r *Reader) Clusters() (map[clusterset.ClusterID]Evidence, error) {
	found := map[clusterset.ClusterID]Evidence{}
	err := dump(context.Background(), r, bpf.MapClusters, func(_ uint32, v bpf.Cluster) {
		if id := decodeCluster(v); id != "" {
			found[id] = Evidence{
				Established: v.Established, TimedOut: v.TimedOut, Reset: v.Reset, Silent: v.Silent,
				AnsweredAt: time.Duration(v.AnsweredAt), SilentAt: time.Duration(v.SilentAt),
			}
		}
	})
	return found, err
}

// SinceBoot returns the time of CLOCK_BOOTTIME, the clock of the programs.
func SinceBoot() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		panic(fmt.Sprintf("read CLOCK_BOOTTIME: %v", err)) // every kernel since 2.6.39 has it
	}
	return time.Duration(now.Nano())
}
