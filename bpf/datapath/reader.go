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

// Reader reads what stands in a node's kernel, beside the agent that writes it or without one.
type Reader struct {
	pins pins
	maps map[string]*ebpf.Map
}

// ErrNotInstalled says that a node has no dataplane of this version.
var ErrNotInstalled = errors.New("no dataplane here")

// Read opens the pinned maps of a node to look at them. It changes nothing. ErrNotInstalled is for a node
// that has none, or only those of another version, which the error names.
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
			continue // it went while we looked
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open pinned map %s: %w", name, err), r.Close())
		}
		r.maps[name] = m
	}
	return r, nil
}

// notInstalled says what is there instead.
func (p pins) notInstalled() error {
	others, err := p.otherMaps()
	if err != nil {
		return err
	}
	if len(others) == 0 {
		return fmt.Errorf("nothing of Isthmus in %s; start the agent on this node, or name its BPF filesystem: %w", p.bpffs, ErrNotInstalled)
	}
	for i, o := range others {
		others[i] = filepath.Base(o)
	}
	return fmt.Errorf("the dataplane in %s is of another version (%s, this one has %s); ask with the binary of its agent: %w",
		p.dir(), strings.Join(others, ", "), filepath.Base(p.maps()), ErrNotInstalled)
}

// Close lets go of the maps, which stay.
func (r *Reader) Close() error { return closeAll(r.maps) }

// open returns the map of a name.
func (r *Reader) open(name string) (*ebpf.Map, error) {
	if m := r.maps[name]; m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("open map %s: %w", name, fs.ErrNotExist)
}

// Refusals returns how many clients were refused since the maps were made, by service and reason; service 0
// is for those that met none. What never happened is not in it.
func (r *Reader) Refusals() (map[Refusal]uint64, error) {
	counts := map[Refusal]uint64{}
	err := dump(context.Background(), r, bpf.MapRefusals, func(k bpf.RefusalKey, n uint64) {
		counts[Refusal{lb.ServiceID(k.Service), k.Reason}] += n
	})
	return counts, err
}

// Refusal is whose clients were refused, and why.
type Refusal struct {
	Service lb.ServiceID
	Reason  bpf.DropReason
}

// Chosen returns how often a backend was picked for a client, by service, since the service got its number.
func (r *Reader) Chosen() (map[lb.ServiceID]uint64, error) {
	counts := map[lb.ServiceID]uint64{}
	err := dump(context.Background(), r, bpf.MapServices, func(id uint32, v bpf.Service) {
		counts[lb.ServiceID(id)] = v.Chosen
	})
	return counts, err
}

// Counters are what clients of a Service met since it got its number.
type Counters struct {
	Chosen  uint64 // how often a backend was picked for one of them
	Refused map[bpf.DropReason]uint64
}

// Counters returns those of every Service that anybody asked for. Whoever was refused without a Service, or by one that
// is gone, counts for the zero name.
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

// EvictedUDPVIPs returns how many VIPs of unconnected UDP sockets had to make room for others since the maps were made.
// An answer to such a socket comes under the backend's name. It reads the whole map.
func (r *Reader) EvictedUDPVIPs() (uint64, error) {
	var made, there uint64
	if _, err := lookup(r, bpf.MapUDPVIPsAdded, uint32(0), &made); err != nil {
		return 0, err
	}
	err := dump(context.Background(), r, bpf.MapUDPVIPs, func(bpf.UDPVIPKey, bpf.UDPVIP) { there++ })
	return made - min(made, there), err // some may be made meanwhile
}

// Evidence is what connections to a member's backends have shown since it got its index. Times are of
// CLOCK_BOOTTIME, which [SinceBoot] reads; 0 is never.
type Evidence struct {
	Established uint64        // handshakes that ended well
	TimedOut    uint64        // and those that nobody answered
	Reset       uint64        // and those that were refused
	Silent      uint64        // retransmission timeouts of connections that stood
	AnsweredAt  time.Duration // when something last came from there
	SilentAt    time.Duration // when something last did not
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

// SinceBoot returns the time of CLOCK_BOOTTIME, by which programs tell when something happened.
func SinceBoot() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		panic(fmt.Sprintf("read CLOCK_BOOTTIME: %v", err)) // every kernel since 2.6.39 has it
	}
	return time.Duration(now.Nano())
}
