package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
)

// DefaultCgroupRoot and DefaultBPFFS are where Linux distributions mount the two filesystems.
const (
	DefaultCgroupRoot = "/sys/fs/cgroup"
	DefaultBPFFS      = "/sys/fs/bpf"
)

// directory is the name of ours in the BPF filesystem.
const directory = "isthmus"

// Config says where a node keeps what the datapath needs. The zero value takes the defaults.
type Config struct {
	// CgroupRoot is where the node's cgroup v2 hierarchy is mounted, or the folder that holds it under
	// the name "unified", as with both cgroup versions side by side. Every process below it is served.
	CgroupRoot string
	// BPFFS is the BPF filesystem that keeps the pins.
	BPFFS string
}

func (c Config) withDefaults() Config {
	if c.CgroupRoot == "" {
		c.CgroupRoot = DefaultCgroupRoot
	}
	if c.BPFFS == "" {
		c.BPFFS = DefaultBPFFS
	}
	return c
}

// Validate reports all faults of c at once, or nil.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	for name, path := range map[string]string{"cgroup root": c.CgroupRoot, "BPF filesystem": c.BPFFS} {
		if !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s %q is not an absolute path", name, path))
		}
	}
	return errors.Join(errs...)
}

// Datapath is the running dataplane of a node. It is the only writer of the maps that hold a
// lb.State. Load and Apply are for one goroutine, the rest for any.
type Datapath struct {
	maps   map[string]*ebpf.Map
	links  []attachment
	writes atomic.Uint64
}

// attachment is one hook and the link that holds it.
type attachment struct {
	hook bpf.Hook
	link link.Link
}

// Open makes the node's dataplane ours: it checks what the kernel must have, takes over pinned maps or
// makes new ones, and attaches the programs, or swaps them in place where another version runs, without
// a moment in which a connect goes untranslated. Where the very same programs run already it changes
// nothing.
//
// It is all or nothing: after an error the node is as it was, a running dataplane included. Errors are
// one sentence for the person who installs; ErrUnsupported and ErrIncompatible tell the two cases that
// trying again cannot mend.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*Datapath, error) {
	spec, err := bpf.LoadSpec()
	if err != nil {
		return nil, fmt.Errorf("parse BPF object: %w", err)
	}
	return open(ctx, cfg, spec, log)
}

// open is Open for any version of the programs.
func open(ctx context.Context, cfg Config, spec *ebpf.CollectionSpec, log *slog.Logger) (*Datapath, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := requireKernel(needs); err != nil {
		return nil, err
	}
	root, err := findCgroup(cfg.CgroupRoot)
	if err != nil {
		return nil, err
	}
	if err := requireBPFFS(cfg.BPFFS); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	in := installer{pins: pins(cfg.BPFFS), cgroup: root}
	if err := in.run(spec); err != nil {
		return nil, errors.Join(err, in.undo(), in.close())
	}
	level := slog.LevelInfo
	if in.attached+in.replaced == 0 {
		level = slog.LevelDebug // nothing anybody could see has changed
	}
	log.Log(ctx, level, "dataplane attached", "cgroup", root.path, "bpffs", cfg.BPFFS,
		"attached", in.attached, "replaced", in.replaced, "unchanged", in.unchanged)
	d := &Datapath{maps: in.maps, links: in.links}
	in.maps, in.links = nil, nil // they are d's now
	return d, in.close()
}

// Close lets go of the dataplane and leaves it running: programs, maps and traffic stay as they are.
// Remove is what takes them away.
func (d *Datapath) Close() error {
	var errs []error
	for _, m := range d.maps {
		errs = append(errs, m.Close())
	}
	for _, a := range d.links {
		errs = append(errs, a.link.Close())
	}
	return errors.Join(errs...)
}

// Load returns what the maps hold.
func (d *Datapath) Load(ctx context.Context) (lb.State, error) {
	s := lb.NewState()
	err := errors.Join(
		dump(ctx, d.maps[bpf.MapFrontends], func(k bpf.FrontendKey, v bpf.Frontend) {
			s.Frontends[decodeFrontendKey(k)] = decodeFrontend(v)
		}),
		dump(ctx, d.maps[bpf.MapSlots], func(k bpf.SlotKey, id uint32) {
			s.Slots[decodeSlot(k)] = lb.BackendID(id)
		}),
		dump(ctx, d.maps[bpf.MapBackends], func(id uint32, v bpf.Backend) {
			s.Backends[lb.BackendID(id)] = decodeBackend(v)
		}),
		dump(ctx, d.maps[bpf.MapServices], func(id uint32, v bpf.Service) {
			s.Services[lb.ServiceID(id)] = decodeService(v)
		}),
		dump(ctx, d.maps[bpf.MapClusters], func(i uint32, v bpf.Cluster) {
			if id := decodeCluster(v); id != "" {
				s.Clusters[lb.ClusterIndex(i)] = id
			}
		}),
		each(d.maps[bpf.MapRanges], func(k bpf.RangeKey, _ uint32) {
			s.Ranges[decodeRange(k)] = true
		}),
	)
	if err != nil {
		return lb.State{}, err
	}
	return s, nil
}

// Apply carries out the writes of p in their order. It stops at the first error, or when ctx ends; the
// writes done until then are safe to leave, and Load says which they were.
func (d *Datapath) Apply(ctx context.Context, p lb.Plan) error {
	for _, write := range []func() error{
		func() error {
			return putAll(ctx, d, bpf.MapServices, p.PutServices, func(w lb.ServiceWrite) (uint32, bpf.Service) { return uint32(w.ID), encodeService(w.Name) })
		},
		func() error {
			return putAll(ctx, d, bpf.MapClusters, p.PutClusters, func(w lb.ClusterWrite) (uint32, bpf.Cluster) { return uint32(w.Index), encodeCluster(w.ID) })
		},
		func() error {
			return putAll(ctx, d, bpf.MapBackends, p.PutBackends, func(w lb.BackendWrite) (uint32, bpf.Backend) { return uint32(w.ID), encodeBackend(w.Backend) })
		},
		func() error {
			return putAll(ctx, d, bpf.MapSlots, p.PutSlots, func(w lb.SlotWrite) (bpf.SlotKey, uint32) { return encodeSlot(w.Slot), uint32(w.Backend) })
		},
		func() error {
			return putAll(ctx, d, bpf.MapFrontends, p.PutFrontends, func(w lb.FrontendWrite) (bpf.FrontendKey, bpf.Frontend) {
				return encodeFrontendKey(w.Address), encodeFrontend(w.Frontend)
			})
		},
		func() error {
			return putAll(ctx, d, bpf.MapRanges, p.PutRanges, func(r netip.Prefix) (bpf.RangeKey, uint32) { return encodeRange(r), 1 })
		},
		func() error { return remove(ctx, d, bpf.MapRanges, p.DeleteRanges, encodeRange) },
		func() error { return remove(ctx, d, bpf.MapFrontends, p.DeleteFrontends, encodeFrontendKey) },
		func() error { return remove(ctx, d, bpf.MapSlots, p.DeleteSlots, encodeSlot) },
		func() error {
			return remove(ctx, d, bpf.MapBackends, p.DeleteBackends, func(id lb.BackendID) uint32 { return uint32(id) })
		},
		func() error {
			return remove(ctx, d, bpf.MapServices, p.DeleteServices, func(id lb.ServiceID) uint32 { return uint32(id) })
		},
		// An array has no holes: an index without a member is one whose name is empty.
		func() error {
			return putAll(ctx, d, bpf.MapClusters, p.DeleteClusters, func(i lb.ClusterIndex) (uint32, bpf.Cluster) { return uint32(i), bpf.Cluster{} })
		},
	} {
		if err := write(); err != nil {
			return err
		}
	}
	return nil
}

// Writes returns how many map entries Apply has written or deleted since Open.
func (d *Datapath) Writes() uint64 { return d.writes.Load() }

// Refusals returns how many clients were refused since the maps were made, by service and reason; service 0
// is for those that met none. What never happened is not in it.
func (d *Datapath) Refusals() (map[Refusal]uint64, error) {
	counts := map[Refusal]uint64{}
	err := dump(context.Background(), d.maps[bpf.MapRefusals], func(k bpf.RefusalKey, n uint64) {
		counts[Refusal{lb.ServiceID(k.Service), bpf.DropReason(k.Reason)}] += n
	})
	return counts, err
}

// Refusal is whose clients were refused, and why.
type Refusal struct {
	Service lb.ServiceID
	Reason  bpf.DropReason
}

// HookStatus says whether one program is where it should be.
type HookStatus struct {
	Name     string
	Attached bool // false when somebody detached it, or its cgroup is gone
}

// Hooks asks the kernel about every program of the socket path.
func (d *Datapath) Hooks() []HookStatus {
	hooks := make([]HookStatus, len(d.links))
	for i, a := range d.links {
		id, err := linkCgroup(a.link)
		hooks[i] = HookStatus{Name: a.hook.Name, Attached: err == nil && id != 0}
	}
	return hooks
}
