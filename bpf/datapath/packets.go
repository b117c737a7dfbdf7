package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// packetHook is one program of the packet path, and the side and kind of device that it runs on.
type packetHook struct {
	name    string
	ingress bool
	at      func(d device.Device) bool // nil: all devices
}

func (h packetHook) appliesTo(d device.Device) bool { return h.at == nil || h.at(d) }

// packetHooks returns the hooks of this version, in the order in which a packet meets them.
func packetHooks() []packetHook {
	return []packetHook{
		{bpf.ProgFromClient, true, func(d device.Device) bool { return !d.Uplink() }},
		{bpf.ProgFromNetwork, true, device.Device.Uplink},
		{bpf.ProgToClient, false, func(d device.Device) bool { return !d.Uplink() }},
		{bpf.ProgToNetwork, false, device.Device.Uplink},
	}
}

// packets keeps the programs of the packet path on the node's devices.
type packets struct {
	pins     pins
	hooks    []packetHook
	patterns []string
	order    Order
	tcx      bool // use TCX links; else clsact filters
	fast     bool // new flows may take the fast path
	maps     map[string]*ebpf.Map
	vips     vipRanges

	mu      sync.Mutex
	progs   map[string]*ebpf.Program // guarded by mu
	devices []device.Device          // that run the programs; guarded by mu
	failure string                   // of the last sync; guarded by mu
	resync  signal.Signal            // makes Follow list the devices again
}

// sync attaches the programs to every selected device and detaches them from all others. A failure on one device does
// not affect the others. It returns the devices that were added and removed.
func (p *packets) sync() (added, removed []string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all, err := device.List()
	if err != nil {
		return nil, nil, err
	}
	chosen := device.Select(all, p.patterns)
	// The first packet of a device already needs the device's role, so roles are written before programs are attached. But
	// a flow may take the fast path only while programs run at both ends, so roles are written again after.
	if err := p.writeRoles(chosen); err != nil {
		return nil, nil, err
	}
	var errs []error
	p.devices, added, removed, errs = p.attachAll(chosen)
	errs = append(errs, p.writeRoles(chosen), p.detachOthers(all, chosen))
	if len(errs) > 0 && errors.Join(errs...) != nil {
		return added, removed, errors.Join(errs...)
	}
	for _, h := range p.hooks {
		errs = append(errs, p.pinProgram(h.name))
	}
	return added, removed, errors.Join(errs...)
}

// attachAll attaches the programs to the chosen devices and returns those where that succeeded. The caller holds mu.
func (p *packets) attachAll(chosen []device.Device) (on []device.Device, added, removed []string, errs []error) {
	for _, d := range chosen {
		err := p.attach(d)
		if vanished(err) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("attach to device %s: %w", d.Name, err))
			continue
		}
		on = append(on, d)
		if !slices.ContainsFunc(p.devices, func(o device.Device) bool { return o.Index == d.Index }) {
			added = append(added, d.Name)
		}
	}
	for _, o := range p.devices {
		if !slices.ContainsFunc(on, func(d device.Device) bool { return o.Index == d.Index }) {
			removed = append(removed, o.Name)
		}
	}
	return on, added, removed, errs
}

// vanished reports whether an operation failed because its device was removed meanwhile.
func vanished(err error) bool { return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) }

func (p *packets) attach(d device.Device) error {
	// In reverse order: the programs that translate replies are attached before those that translate requests.
	for _, h := range slices.Backward(p.hooks) {
		if !h.appliesTo(d) {
			continue
		}
		var err error
		if p.tcx {
			err = p.attachTCX(d, h)
		} else {
			err = p.attachFilter(d, h)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
	}
	return nil
}

// linkName is the pin of a hook's link to a device. It has the device's index, for device names may contain dots, which
// BPF filesystems refuse.
func linkName(hook string, index int) string { return hook + "_" + strconv.Itoa(index) }

// isLinkName reports whether linkName made this name for one of hooks.
func isLinkName(name string, hooks []packetHook) bool {
	i := strings.LastIndexByte(name, '_')
	if i < 0 || !slices.ContainsFunc(hooks, func(h packetHook) bool { return h.name == name[:i] }) {
		return false
	}
	_, err := strconv.Atoi(name[i+1:])
	return err == nil
}

// attachTCX attaches our program to a device. It replaces an older one of ours without a gap.
func (p *packets) attachTCX(d device.Device, h packetHook) error {
	path := p.pins.linkPath(linkName(h.name, d.Index))
	l, err := link.LoadPinnedLink(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return p.newTCX(d, h, path)
	case err != nil:
		return fmt.Errorf("open pinned link: %w", err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return fmt.Errorf("ask for link: %w", err)
	}
	if t := info.TCX(); t == nil || int(t.Ifindex) != d.Index {
		// The link's device was removed and its index reused, or another process has detached the link.
		if err := removePin(path); err != nil {
			return err
		}
		return p.newTCX(d, h, path)
	}
	id, err := bpf.ProgramID(p.progs[h.name])
	if err != nil || id == info.Program {
		return err
	}
	if ok, _, err := p.inPlace(d.Index, h, info.Program); err != nil || !ok {
		return errors.Join(err, p.moveTCX(d, h, path, l))
	}
	if err := l.Update(p.progs[h.name]); err != nil {
		return fmt.Errorf("replace program: %w", err)
	}
	return nil
}

// moveTCX attaches our program at its position and then detaches the old one, which stands elsewhere in the order. For a
// moment both run: the second finds nothing to translate.
func (p *packets) moveTCX(d device.Device, h packetHook, path string, old link.Link) error {
	if err := removePin(staged(path)); err != nil {
		return err
	}
	if err := p.newTCX(d, h, staged(path)); err != nil {
		return err
	}
	if err := old.Detach(); err != nil {
		return fmt.Errorf("detach from the old position: %w", err)
	}
	if err := os.Rename(staged(path), path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

func (p *packets) newTCX(d device.Device, h packetHook, path string) error {
	anchor := link.Tail()
	if p.order.first(h.ingress) {
		anchor = link.Head()
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: d.Index, Program: p.progs[h.name], Attach: h.tcx(), Anchor: anchor})
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

// detachOthers detaches our programs from every device that is not chosen for them. The caller holds mu.
func (p *packets) detachOthers(all, chosen []device.Device) error {
	names, err := list(p.pins.linkPath(""))
	errs := []error{err}
	wanted := map[string]bool{}
	for _, d := range chosen {
		for _, h := range p.hooks {
			wanted[linkName(h.name, d.Index)] = h.appliesTo(d)
		}
	}
	for _, name := range names {
		if isLinkName(name, p.hooks) && (!p.tcx || !wanted[name]) {
			errs = append(errs, detach(p.pins.linkPath(name)), removePin(p.pins.linkPath(name)))
		}
	}
	if !p.tcx {
		for _, d := range all {
			errs = append(errs, removeFilters(p.pins, d, func(hook string) bool { return wanted[linkName(hook, d.Index)] }))
		}
		errs = append(errs, forgetQdiscs(p.pins, all))
	}
	return errors.Join(errs...)
}

// role returns the flags by which the programs know a device.
func (p *packets) role(d device.Device) (flags bpf.DeviceFlags) {
	attached := slices.ContainsFunc(p.devices, func(o device.Device) bool { return o.Index == d.Index })
	switch {
	case d.Uplink():
		if p.fast && attached {
			flags = bpf.DeviceUplink
		}
	case d.Client():
		flags = bpf.DeviceClient
		if p.fast && d.PeerElsewhere && attached {
			flags |= bpf.DevicePeer
		}
	}
	return flags
}

// writeRoles writes the roles of the chosen devices to their map. The caller holds mu.
func (p *packets) writeRoles(chosen []device.Device) error {
	m := p.maps[bpf.MapDevices]
	if m == nil {
		return nil
	}
	want := map[uint32]bpf.Device{}
	for _, d := range chosen {
		if flags := p.role(d); flags != 0 {
			want[uint32(d.Index)] = bpf.Device{Flags: flags}
		}
	}
	var errs []error
	var removed []uint32
	var index uint32
	var value bpf.Device
	entries := m.Iterate()
	for entries.Next(&index, &value) {
		switch w, ok := want[index]; {
		case !ok:
			removed = append(removed, index)
		case w.Flags == value.Flags:
			delete(want, index)
		}
	}
	errs = append(errs, entries.Err())
	for index, value := range want {
		if err := m.Put(index, value); err != nil {
			errs = append(errs, fmt.Errorf("write map %s: %w", bpf.MapDevices, err))
		}
	}
	for _, index := range removed {
		if err := m.Delete(index); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from map %s: %w", bpf.MapDevices, err))
		}
	}
	return errors.Join(errs...)
}

// start takes over from the previous process.
func (p *packets) start() error {
	if p.vips.settings != nil {
		if err := p.vips.start(); err != nil {
			return err
		}
	}
	return p.adoptPinned()
}

// adoptPinned uses the pinned programs in place of ours where they are equal, so that an equal program is not replaced.
func (p *packets) adoptPinned() error {
	for _, h := range p.hooks {
		pinned, err := ebpf.LoadPinnedProgram(p.pins.progPath(h.name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open pinned program %s: %w", h.name, err)
		}
		same, err := sameProgram(pinned, p.progs[h.name])
		if err == nil && same && p.tcx {
			same, err = p.pinnedInPlace(h, pinned) // if not, ours is attached as a new program, at its position
		}
		if err != nil || !same {
			if err := errors.Join(err, pinned.Close()); err != nil {
				return err
			}
			continue
		}
		if err := p.progs[h.name].Close(); err != nil {
			return err
		}
		p.progs[h.name] = pinned
	}
	return nil
}

// pinProgram pins our program of a hook in place of the current pin. The caller holds mu.
func (p *packets) pinProgram(name string) error {
	path := p.pins.progPath(name)
	id, err := bpf.ProgramID(p.progs[name])
	if err != nil {
		return err
	}
	switch pinned, err := ebpf.LoadPinnedProgram(path, nil); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("open pinned program %s: %w", name, err)
	default:
		old, err := bpf.ProgramID(pinned)
		if err := errors.Join(err, pinned.Close()); err != nil || old == id {
			return err
		}
	}
	clone, err := p.progs[name].Clone() // a Program remembers its pin, and this pin is about to move
	if err != nil {
		return fmt.Errorf("clone program %s: %w", name, err)
	}
	defer clone.Close()
	if err := removePin(staged(path)); err != nil {
		return err
	}
	if err := clone.Pin(staged(path)); err != nil {
		return fmt.Errorf("pin program %s: %w", name, err)
	}
	if err := os.Rename(staged(path), path); err != nil {
		return fmt.Errorf("pin program %s: %w", name, err)
	}
	return nil
}

// status asks the kernel for the status of every program on every device.
func (p *packets) status() []HookStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	var hooks []HookStatus
	for _, d := range p.devices {
		for _, h := range p.hooks {
			if !h.appliesTo(d) {
				continue
			}
			hooks = append(hooks, HookStatus{Name: h.name, Device: d.Name, Attached: p.attached(d, h)})
		}
	}
	slices.SortFunc(hooks, func(a, b HookStatus) int {
		return cmp.Or(strings.Compare(a.Device, b.Device), strings.Compare(a.Name, b.Name))
	})
	return hooks
}

func (p *packets) attached(d device.Device, h packetHook) bool {
	if !p.tcx {
		f, err := findFilter(d, h)
		return err == nil && f != nil
	}
	l, err := link.LoadPinnedLink(p.pins.linkPath(linkName(h.name, d.Index)), nil)
	if err != nil {
		return false
	}
	defer l.Close()
	info, err := l.Info()
	return err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == d.Index
}

// retry is the interval at which Follow checks the devices without a notification: after a failure, and because the
// kernel does not notify us when others detach our programs.
const retry = 10 * time.Second

// Follow keeps the programs of the packet path on the node's devices, including new ones, until ctx ends; then it returns
// nil and leaves the programs attached. Existing devices are served first. Without a packet path it only waits.
func (d *Datapath) Follow(ctx context.Context) error {
	if d.packets == nil {
		<-ctx.Done()
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var watching sync.WaitGroup
	defer watching.Wait()
	broken := make(chan error, 1)
	watching.Go(func() { broken <- device.Watch(ctx, d.packets.resync.Notify) })
	tick := time.NewTicker(retry)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-broken:
			if ctx.Err() != nil {
				return nil
			}
			// The kernel sent more notifications than we could read in time: list the devices and subscribe again.
			d.log.WarnContext(ctx, "watch devices; watching again", "err", err)
			watching.Go(func() { broken <- device.Watch(ctx, d.packets.resync.Notify) })
		case <-d.packets.resync.C():
			d.syncPackets(ctx)
		case <-tick.C:
			d.syncPackets(ctx)
		}
	}
}

// syncPackets attaches the programs to the devices, unless they still wait for their maps.
func (d *Datapath) syncPackets(ctx context.Context) {
	d.mu.Lock()
	waiting := d.waiting
	d.mu.Unlock()
	if waiting {
		return
	}
	added, removed, err := d.packets.sync()
	if len(added)+len(removed) > 0 {
		d.log.InfoContext(ctx, "devices of the packet path changed", "added", added, "removed", removed)
	}
	d.packets.record(ctx, d.log, err)
}

// record logs a failure unless it is the same as the last one.
func (p *packets) record(ctx context.Context, log *slog.Logger, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.failure = ""
	} else if p.failure != err.Error() {
		p.failure = err.Error()
		log.ErrorContext(ctx, "attach packet path to all devices; will try again", "err", err)
	}
}
