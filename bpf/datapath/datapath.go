package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/netns"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// DefaultCgroupRoot and DefaultBPFFS are where Linux distributions mount the two filesystems.
const (
	DefaultCgroupRoot = "/sys/fs/cgroup"
	DefaultBPFFS      = "/sys/fs/bpf"
)

// directory is the name of our folder in the BPF filesystem.
const directory = "isthmus"

// Config configures the datapath of a node. The zero value takes the defaults.
type Config struct {
	// CgroupRoot is where the node's cgroup v2 hierarchy is mounted, or the folder that holds it under
	// the name "unified" where both cgroup versions are mounted. Every process below it is served.
	CgroupRoot string
	// BPFFS is the BPF filesystem that keeps the pins.
	BPFFS string
	// Proc and Namespaces are where the node's processes and its named network namespaces are found, default /proc
	// and /run/netns. UDP sockets of removed backends are closed in these namespaces. In a container both are mounts of
	// the host's folders.
	Proc, Namespaces string
	// Packets enables the packet path. It serves clients whose sockets are not translated, because they are outside of the
	// cgroup, in a virtual machine or on another host, on the devices that their packets arrive at.
	Packets bool
	// Devices are names of these devices, or patterns such as "eth*". Empty means automatic: uplinks, veths of pods,
	// taps, and bridges with such ports.
	Devices []string
	// FastPath lets flows between pods and uplinks bypass the node's routing and netfilter, in both directions, and with
	// them the policies that other programs enforce there. Without it the kernel routes every translated packet.
	FastPath bool
	// Order is the position of our programs among others on the same devices, OrderNear when empty.
	Order Order
}

func (c Config) withDefaults() Config {
	if c.CgroupRoot == "" {
		c.CgroupRoot = DefaultCgroupRoot
	}
	if c.BPFFS == "" {
		c.BPFFS = DefaultBPFFS
	}
	if c.Proc == "" {
		c.Proc = "/proc"
	}
	if c.Namespaces == "" {
		c.Namespaces = "/run/netns"
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
	for _, pattern := range c.Devices {
		if err := device.Validate(pattern); err != nil {
			errs = append(errs, err)
		}
	}
	if c.Order != "" && c.Order != OrderNear && c.Order != OrderFar {
		errs = append(errs, fmt.Errorf("order %q is neither %s nor %s", c.Order, OrderNear, OrderFar))
	}
	return errors.Join(errs...)
}

// Datapath is the running dataplane of a node. It is the only writer of the maps that hold a
// lb.State. Load, Apply and Differences are for one goroutine, the rest for any.
type Datapath struct {
	*Reader

	log    *slog.Logger
	cgroup cgroup
	hooks  []bpf.Hook
	progs  map[string]*ebpf.Program
	writes atomic.Uint64
	// packets is nil without a packet path, stale where the kernel has no iterator over sockets.
	packets    *packets
	stale      *staleSockets
	namespaces netns.Dirs
	missing    []string
	observing  atomic.Bool
	findings   findings

	mu      sync.Mutex
	links   []attachment // guarded by mu
	waiting bool         // programs of another ABI run; ours wait for the first Apply; guarded by mu
}

// attachment is one hook and the link that holds it.
type attachment struct {
	hook bpf.Hook
	link link.Link
}

// Open installs the dataplane on the node, or takes over the running one. It checks the kernel, opens the pinned maps or
// creates new ones, and attaches the programs. Programs of another version are replaced in place, so that no connect
// goes untranslated; equal programs are left alone. Programs of another ABI, which use other maps, stay until
// ours are filled: see Apply.
//
// Open is all or nothing: after an error the node is as before, including a running dataplane. Errors are
// one sentence for the person who installs. ErrUnsupported, ErrIncompatible and ErrOccupied mark errors that a retry
// cannot fix.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*Datapath, error) {
	b, err := currentBuild(cfg.Packets)
	if err != nil {
		return nil, err
	}
	return open(ctx, cfg, b, log)
}

// currentBuild is the build that this process carries.
func currentBuild(withPackets bool) (build, error) {
	spec, err := bpf.LoadSpec()
	if err != nil {
		return build{}, fmt.Errorf("parse BPF object: %w", err)
	}
	b := build{abi: bpf.ABIVersion, specs: []*ebpf.CollectionSpec{spec}, hooks: bpf.Hooks()}
	if withPackets {
		packets, err := bpf.LoadPacketSpec()
		if err != nil {
			return build{}, fmt.Errorf("parse BPF object: %w", err)
		}
		b.specs, b.packets = append(b.specs, packets), packetHooks()
	}
	return b, nil
}

// open is Open for any build.
func open(ctx context.Context, cfg Config, b build, log *slog.Logger) (*Datapath, error) {
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
	l := loader{pins: pins{cfg.BPFFS, b.abi}}
	if err := l.run(b); err != nil {
		return nil, errors.Join(err, l.undo(), l.closeHandles())
	}
	d := &Datapath{
		Reader: &Reader{pins: l.pins, maps: l.maps}, log: log, cgroup: root, hooks: b.hooks, progs: l.progs,
		namespaces: netns.Dirs{Proc: cfg.Proc, Run: cfg.Namespaces},
	}
	if cfg.Packets {
		d.packets = &packets{
			pins: l.pins, hooks: b.packets, patterns: cfg.Devices, order: cfg.Order, tcx: !b.noTCX && haveTCX() == nil,
			fast: cfg.FastPath, maps: l.maps, vips: vipRanges{settings: l.maps[bpf.MapPacketSettings], fast: cfg.FastPath},
			progs: l.progs, resync: signal.New(),
		}
		if err := d.packets.start(); err != nil {
			return nil, errors.Join(err, l.undo(), l.closeHandles())
		}
	}
	err = d.setObserve(0) // an observer of the previous process may have left it on
	if err == nil {
		err = d.start(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, l.undo(), l.closeHandles())
	}
	d.detectMissing(ctx)
	return d, nil
}

// detectMissing loads the optional programs and records the features that the node lacks.
func (d *Datapath) detectMissing(ctx context.Context) {
	var noClose, noFind error
	d.stale, noClose, noFind = loadStaleSockets(d.maps)
	if noClose != nil {
		d.log.DebugContext(ctx, "no iterator that closes sockets", "closing", noClose, "finding", noFind)
	}
	d.missing = missingFeatures(d.packets != nil, noClose, noFind)
	for _, m := range d.missing {
		d.log.InfoContext(ctx, "the node lacks a feature", "missing", m)
	}
}

// start attaches the programs, or leaves those of another ABI attached until the first Apply.
func (d *Datapath) start(ctx context.Context) error {
	foreign, err := d.pins.foreign(d.cgroup, d.maps)
	if err != nil {
		return err
	}
	if foreign {
		d.waiting = true
		d.log.InfoContext(ctx, "programs of another version keep running until the maps of this version are filled", "abi", d.pins.abi)
		d.links, err = d.pins.openLinks(d.hooks)
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.install(ctx)
}

// takeOver installs our programs if they have waited for the maps to be filled.
func (d *Datapath) takeOver(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.waiting {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	before := d.links
	if err := d.install(ctx); err != nil {
		d.links = before
		return err
	}
	d.waiting = false
	if d.packets != nil {
		d.packets.resync.Notify()
	}
	return closeLinks(before)
}

// install attaches our programs and removes those of older versions. The caller holds mu.
func (d *Datapath) install(ctx context.Context) error {
	in := installer{pins: d.pins, cgroup: d.cgroup, hooks: d.hooks, progs: d.progs}
	if err := in.run(); err != nil {
		return err
	}
	d.links = in.links
	level := slog.LevelInfo
	if in.attached+in.replaced == 0 {
		level = slog.LevelDebug // nothing has changed
	}
	d.log.Log(ctx, level, "dataplane attached", "cgroup", d.cgroup.path, "bpffs", d.pins.bpffs,
		"attached", in.attached, "replaced", in.replaced, "unchanged", in.unchanged)
	err := d.pins.clean(d.keeps, d.maps)
	if d.packets == nil && haveTCX() != nil {
		err = errors.Join(err, removeAllFilters(d.pins))
	}
	if err != nil {
		d.log.WarnContext(ctx, "remove what another version left; will try again at the next start", "err", err)
	}
	return nil
}

// keeps reports whether a pin belongs to a hook of this version. The packet path itself removes pins of devices that it
// no longer serves.
func (d *Datapath) keeps(name string) bool {
	if d.packets != nil {
		if isLinkName(name, d.packets.hooks) || slices.ContainsFunc(d.packets.hooks, func(h packetHook) bool { return h.name == name }) {
			return true
		}
	}
	return slices.ContainsFunc(d.hooks, func(h bpf.Hook) bool { return h.Name == name })
}

// Close closes the file descriptors of the dataplane and leaves it running: programs, maps and traffic stay as they are.
// Remove uninstalls it.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	links := d.links
	d.links = nil
	if d.stale != nil {
		defer d.stale.iterator.Close()
	}
	return errors.Join(d.Reader.Close(), closeAll(d.progs), closeLinks(links))
}

func closeLinks(links []attachment) error {
	var errs []error
	for _, a := range links {
		errs = append(errs, a.link.Close())
	}
	return errors.Join(errs...)
}

// Apply carries out the writes of p in their order. It stops at the first error, or when ctx ends. The writes until then
// are safe, and Load tells which they were.
//
// If programs of another ABI run, the first successful Apply after Open replaces them with ours, whose maps are then
// filled. So the caller must Apply once, even if there is nothing to write.
func (d *Datapath) Apply(ctx context.Context, p lb.Plan) error {
	if d.packets != nil {
		if err := d.packets.vips.beforeApply(p); err != nil {
			return err
		}
	}
	if err := d.write(ctx, p); err != nil {
		return err
	}
	if d.packets != nil {
		if err := d.packets.vips.afterApply(ctx, p, d.Load); err != nil {
			return err
		}
	}
	return d.takeOver(ctx)
}

// deleteAffinities makes clients with session affinity choose again where their backend no longer serves the frontend
// but still exists.
func (d *Datapath) deleteAffinities(ctx context.Context, stale []lb.StaleAffinity) error {
	if len(stale) == 0 {
		return nil
	}
	isStale := make(map[lb.StaleAffinity]bool, len(stale))
	for _, s := range stale {
		isStale[s] = true
	}
	var clients []bpf.AffinityKey
	err := dump(ctx, d.Reader, bpf.MapAffinities, func(k bpf.AffinityKey, v bpf.Affinity) {
		if isStale[lb.StaleAffinity{Frontend: lb.FrontendID(k.FrontendId), Backend: lb.BackendID(v.BackendId)}] {
			clients = append(clients, k)
		}
	})
	if err != nil {
		return err
	}
	return remove(ctx, d, bpf.MapAffinities, clients, func(k bpf.AffinityKey) bpf.AffinityKey { return k })
}

// Writes returns how many map entries Apply has written or deleted since Open.
func (d *Datapath) Writes() uint64 { return d.writes.Load() }

// HookStatus says whether one program is attached where it should be.
type HookStatus struct {
	Name     string
	Device   string // of the packet path; "" for the cgroup
	Attached bool   // false when another process detached it, or its cgroup was removed
}

// Hooks asks the kernel for the status of every program: of the socket path, then of the packet path on each device.
func (d *Datapath) Hooks() []HookStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	hooks := make([]HookStatus, len(d.hooks))
	for i, h := range d.hooks {
		hooks[i].Name = h.Name
		for _, a := range d.links {
			if a.hook.Name == h.Name {
				id, err := linkCgroup(a.link)
				hooks[i].Attached = err == nil && id != 0
			}
		}
	}
	if d.packets != nil {
		hooks = append(hooks, d.packets.status()...)
	}
	return hooks
}
