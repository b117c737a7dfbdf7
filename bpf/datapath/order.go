package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
)

// Order is the position of our programs among others on the same devices.
type Order string

const (
	// OrderNear puts ours next to the client: first for packets from it, last for packets to it. All other programs on
	// the device, such as a CNI's policies, see the addresses of pods in both directions. It is the default.
	OrderNear Order = "near"
	// OrderFar puts ours next to the node: the other programs see VIPs, as the client does. It is for programs that end
	// the chain with their own verdict for packets to the client.
	OrderFar Order = "far"
)

// first reports whether our program runs before all others.
func (o Order) first(ingress bool) bool { return ingress == (o != OrderFar) }

// tcx is the TCX hook of a device that h attaches to.
func (h packetHook) tcx() ebpf.AttachType {
	if h.ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// inPlace reports whether our program is at the position that Order demands on a device, and returns the programs that
// are at its position instead. A program that is not attached is not out of place.
func (p *packets) inPlace(index int, h packetHook, own ebpf.ProgramID) (ok bool, others []ebpf.ProgramID, err error) {
	q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: h.tcx()})
	if vanished(err) {
		return true, nil, nil
	}
	if err != nil {
		return false, nil, fmt.Errorf("query the programs of device %d: %w", index, err)
	}
	at := slices.IndexFunc(q.Programs, func(a link.AttachedProgram) bool { return a.ID == own })
	if at < 0 {
		return true, nil, nil
	}
	between := q.Programs[at+1:]
	if p.order.first(h.ingress) {
		between = q.Programs[:at]
	}
	for _, o := range between {
		others = append(others, o.ID)
	}
	return len(others) == 0, others, nil
}

// pinnedInPlace reports whether the pinned program of a hook is at its position on every device.
func (p *packets) pinnedInPlace(h packetHook, pinned *ebpf.Program) (bool, error) {
	own, err := bpf.ProgramID(pinned)
	if err != nil {
		return false, err
	}
	names, err := list(p.pins.linkPath(""))
	if err != nil {
		return false, err
	}
	for _, name := range names {
		if !isLinkName(name, []packetHook{h}) {
			continue
		}
		l, err := link.LoadPinnedLink(p.pins.linkPath(name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("open pinned link %s: %w", name, err)
		}
		info, err := l.Info()
		if err := errors.Join(err, l.Close()); err != nil {
			return false, fmt.Errorf("query link %s: %w", name, err)
		}
		if t := info.TCX(); t != nil && t.Ifindex != 0 {
			if ok, _, err := p.inPlace(int(t.Ifindex), h, own); err != nil || !ok {
				return false, err
			}
		}
	}
	return true, nil
}

// neighbours returns the devices of the packet path, and a Finding for each of our programs that others have displaced
// from the position that Order demands.
func (p *packets) neighbours() ([]device.Device, []Finding, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []Finding
	for _, h := range p.hooks {
		own, err := bpf.ProgramID(p.progs[h.name])
		if err != nil {
			return nil, nil, err
		}
		var where, programs []string
		for _, d := range p.devices {
			if !h.appliesTo(d) {
				continue
			}
			others, err := p.between(d, h, own)
			if err != nil && !vanished(err) {
				return nil, nil, err
			}
			if len(others) > 0 {
				where = append(where, d.Name)
				programs = append(programs, strings.Join(others, " and "))
			}
		}
		if len(where) > 0 {
			found = append(found, p.displaced(h, where, programs[0]))
		}
	}
	return slices.Clone(p.devices), found, nil
}

// displaced returns the Finding that our program is displaced on some devices; others are the programs on the first one.
func (p *packets) displaced(h packetHook, where []string, others string) Finding {
	on := where[0]
	if len(where) > 1 {
		on += " and other devices"
	}
	f := Finding{Name: "order", Severity: device.Warning, Fix: "restart the agent on this node, which restores the order, or choose the other --packet-order"}
	if p.order.first(h.ingress) {
		f.Message = fmt.Sprintf("%s runs before %s on %s: packets on which it has the final verdict never reach the packet path", others, h.name, on)
	} else {
		f.Message = fmt.Sprintf("%s runs after %s on %s: it sees the VIP in one direction of a connection and the backend in the other", others, h.name, on)
	}
	return f
}

// between describes the programs of others that are at the position of ours.
func (p *packets) between(d device.Device, h packetHook, own ebpf.ProgramID) ([]string, error) {
	var programs []string
	if p.tcx {
		_, others, err := p.inPlace(d.Index, h, own)
		if err != nil {
			return nil, err
		}
		for _, id := range others {
			programs = append(programs, describeProgram(id))
		}
		if p.order.first(h.ingress) {
			return programs, nil
		}
	}
	// clsact filters run after all TCX programs.
	all, err := filters(d.Index, h.parent())
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(all, func(f netlink.Filter) bool { hook, ours := hookOf(f); return ours && hook == h.name })
	switch {
	case p.tcx:
		all = all[at+1:] // ours are not among them
	case at < 0:
		all = nil
	case p.order.first(h.ingress):
		all = all[:at]
	default:
		all = all[at+1:]
	}
	for _, f := range all {
		programs = append(programs, describeFilter(f))
	}
	return programs, nil
}

// describeFilter names a filter as tc does.
func describeFilter(f netlink.Filter) string {
	if b, ok := f.(*netlink.BpfFilter); ok && b.Name != "" {
		return fmt.Sprintf("the clsact filter %s of priority %d", b.Name, b.Priority)
	}
	return fmt.Sprintf("a clsact filter of kind %s and priority %d", f.Type(), f.Attrs().Priority)
}
