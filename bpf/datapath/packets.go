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
)

// packetHook is one program of the packet path, the side of a device it belongs to, and which devices these are.
type packetHook struct {
	name    string
	ingress bool
	at      func(d device.Device) bool // nil is all of them
}

func (h packetHook) belongs(d device.Device) bool { return h.at == nil || h.at(d) }

// ourPacketHooks are those of this version, in the order in which a packet meets them.
func ourPacketHooks() []packetHook {
	return []packetHook{
		{bpf.ProgFromClient, true, func(d device.Device) bool { return !d.Uplink() }},
		{bpf.ProgFromNetwork, true, device.Device.Uplink},
		{bpf.ProgToClient, false, func(d device.Device) bool { return !d.Uplink() }},
		{bpf.ProgToNetwork, false, device.Device.Uplink},
	}
}

// packets are the programs of the packet path on the node's devices.
type packets struct {
	pins     pins
	hooks    []packetHook
	patterns []string
	order    Order
	tcx      bool // the kernel has it; else they are filters of clsact
	fast     bool // new flows may take the fast road
	maps     map[string]*ebpf.Map
	vips     vipRanges

	mu       sync.Mutex
	progs    map[string]*ebpf.Program // guarded by mu
	devices  []device.Device          // where they are; guarded by mu
	failure  string                   // of the last sync; guarded by mu
	followed chan struct{}            // asks for another look at the devices
}

// sync puts the programs on every chosen device and takes them off all others. What cannot be done on one device
// does not keep it from the others. It returns what has changed.
func (p *packets) sync() (added, gone []string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all, err := device.List()
	if err != nil {
		return nil, nil, err
	}
	chosen := device.Select(all, p.patterns)
	// The first packet from a device already asks what is behind it. But flows take the fast road only where programs
	// stand at both ends, and leave it before these go.
	if err := p.tellRoles(chosen); err != nil {
		return nil, nil, err
	}
	var errs []error
	p.devices, added, gone, errs = p.devicesNow(chosen)
	errs = append(errs, p.tellRoles(chosen), p.detachOthers(all, chosen))
	if len(errs) > 0 && errors.Join(errs...) != nil {
		return added, gone, errors.Join(errs...)
	}
	for _, h := range p.hooks {
		errs = append(errs, p.pinProgram(h.name))
	}
	return added, gone, errors.Join(errs...)
}

// devicesNow attaches to chosen devices and returns those on which that succeeded. The caller holds mu.
func (p *packets) devicesNow(chosen []device.Device) (on []device.Device, added, gone []string, errs []error) {
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
			gone = append(gone, o.Name)
		}
	}
	return on, added, gone, errs
}

// vanished reports whether a device went while we were at it.
func vanished(err error) bool { return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) }

func (p *packets) attach(d device.Device) error {
	// Backwards: what translates back is there before anything is translated.
	for _, h := range slices.Backward(p.hooks) {
		if !h.belongs(d) {
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

// linkName is the pin of a hook's link to a device. Names of devices may hold dots, which BPF filesystems refuse.
func linkName(hook string, index int) string { return hook + "_" + strconv.Itoa(index) }

// isLinkName reports whether a pin is one that linkName names for one of hooks.
func isLinkName(name string, hooks []packetHook) bool {
	i := strings.LastIndexByte(name, '_')
	if i < 0 || !slices.ContainsFunc(hooks, func(h packetHook) bool { return h.name == name[:i] }) {
		return false
	}
	_, err := strconv.Atoi(name[i+1:])
	return err == nil
}

// attachTCX makes a device run our program, in the place of an older one of ours without a gap.
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
		// The device it was for is gone, and its number was given anew; or somebody has detached it.
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

// moveTCX attaches our program in its place before it takes the old one, which stands somewhere else, away. For a
// moment both run: the second finds nothing to do.
func (p *packets) moveTCX(d device.Device, h packetHook, path string, old link.Link) error {
	if err := removePin(staged(path)); err != nil {
		return err
	}
	if err := p.newTCX(d, h, staged(path)); err != nil {
		return err
	}
	if err := old.Detach(); err != nil {
		return fmt.Errorf("detach from where it stood: %w", err)
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

// detachOthers takes our programs off every device that is not chosen for them. The caller holds mu.
func (p *packets) detachOthers(all, chosen []device.Device) error {
	names, err := list(p.pins.linkPath(""))
	errs := []error{err}
	wanted := map[string]bool{}
	for _, d := range chosen {
		for _, h := range p.hooks {
			wanted[linkName(h.name, d.Index)] = h.belongs(d)
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

// role is what the programs are told of a device.
func (p *packets) role(d device.Device) (flags bpf.DeviceFlags) {
	standing := slices.ContainsFunc(p.devices, func(o device.Device) bool { return o.Index == d.Index })
	switch {
	case d.Uplink():
		if p.fast && standing {
			flags = bpf.DeviceUplink
		}
	case d.Client():
		flags = bpf.DeviceClient
		if p.fast && d.PeerElsewhere && standing {
			flags |= bpf.DevicePeer
		}
	}
	return flags
}

// tellRoles tells the programs what the chosen devices are. The caller holds mu.
func (p *packets) tellRoles(chosen []device.Device) error {
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
	var gone []uint32
	var index uint32
	var value bpf.Device
	entries := m.Iterate()
	for entries.Next(&index, &value) {
		switch w, ok := want[index]; {
		case !ok:
			gone = append(gone, index)
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
	for _, index := range gone {
		if err := m.Delete(index); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from map %s: %w", bpf.MapDevices, err))
		}
	}
	return errors.Join(errs...)
}

// start takes over from the process before this one.
func (p *packets) start() error {
	if p.vips.settings != nil {
		if err := p.vips.start(); err != nil {
			return err
		}
	}
	return p.adoptPinned()
}

// adoptPinned takes the pinned programs for ours where they are the same, so that nothing is replaced for
// nothing.
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
			same, err = p.pinnedInPlace(h, pinned) // else ours comes as another one, to be put in its place
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

// pinProgram makes the pin of a hook lead to our program. The caller holds mu.
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
	clone, err := p.progs[name].Clone() // a Program follows its pin, and ours is about to move
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

// status asks the kernel about every program on every device.
func (p *packets) status() []HookStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	var hooks []HookStatus
	for _, d := range p.devices {
		for _, h := range p.hooks {
			if !h.belongs(d) {
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

// retry is how long after a failure Follow looks at the devices again, and how often it does without one: what
// others do to our programs is not told.
const retry = 10 * time.Second

// Follow keeps the programs of the packet path on the node's devices, on new ones as they come, until ctx ends;
// then it returns nil and leaves them there. Without a packet path it only waits. It looks before it follows, so
// a device that is there when it starts is served soon after.
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
	watching.Go(func() { broken <- device.Watch(ctx, d.packets.look) })
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
			// The kernel told more than we could read in time: look, and listen again.
			d.log.WarnContext(ctx, "devices are followed anew", "err", err)
			watching.Go(func() { broken <- device.Watch(ctx, d.packets.look) })
		case <-d.packets.followed:
			d.syncPackets(ctx)
		case <-tick.C:
			d.syncPackets(ctx)
		}
	}
}

// look asks Follow for another look at the devices.
func (p *packets) look() {
	select {
	case p.followed <- struct{}{}:
	default: // it is asked already
	}
}

// syncPackets brings the programs onto the devices, unless ours still wait for their maps.
func (d *Datapath) syncPackets(ctx context.Context) {
	d.mu.Lock()
	waiting := d.waiting
	d.mu.Unlock()
	if waiting {
		return
	}
	added, gone, err := d.packets.sync()
	if len(added)+len(gone) > 0 {
		d.log.InfoContext(ctx, "packet path follows the devices", "added", added, "gone", gone)
	}
	d.packets.record(ctx, d.log, err)
}

// record logs a failure that is not the one of the last time.
func (p *packets) record(ctx context.Context, log *slog.Logger, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.failure = ""
	} else if p.failure != err.Error() {
		p.failure = err.Error()
		log.ErrorContext(ctx, "packet path is not on every device it should be on", "err", err)
	}
}
