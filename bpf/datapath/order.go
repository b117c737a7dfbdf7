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

// Order says where our programs stand among others on the same devices.
type Order string

const (
	// OrderNear puts ours next to the client: the first to see what it sends, the last to see what it gets. All
	// others on the device, a CNI's policies for one, see the addresses of pods, and the same in both
	// directions. It is the default.
	OrderNear Order = "near"
	// OrderFar puts ours next to the node: the others see what the client sees, VIPs. It is for others that end
	// the chain with a verdict of their own on the way to the client.
	OrderFar Order = "far"
)

// first reports whether a program comes before those of others.
func (o Order) first(ingress bool) bool { return ingress == (o != OrderFar) }

// tcx is the side of a device that a hook belongs to.
func (h packetHook) tcx() ebpf.AttachType {
	if h.ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// inPlace reports whether a program of ours stands among the others of a device where Order wants it, and which
// stand where it should. One that is not there is not out of place.
func (p *packets) inPlace(index int, h packetHook, own ebpf.ProgramID) (ok bool, others []ebpf.ProgramID, err error) {
	q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: h.tcx()})
	if vanished(err) {
		return true, nil, nil
	}
	if err != nil {
		return false, nil, fmt.Errorf("ask for the programs of device %d: %w", index, err)
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

// pinnedInPlace reports whether the program of a hook that another process has left is in its place on every device.
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
			return false, fmt.Errorf("ask for link %s: %w", name, err)
		}
		if t := info.TCX(); t != nil && t.Ifindex != 0 {
			if ok, _, err := p.inPlace(int(t.Ifindex), h, own); err != nil || !ok {
				return false, err
			}
		}
	}
	return true, nil
}

// neighbours returns the devices that the packet path is on, and what stands on them between our programs and the
// place that Order gives them: one Finding for each of our programs.
func (p *packets) neighbours() ([]device.Device, []Finding, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []Finding
	for _, h := range p.hooks {
		own, err := bpf.ProgramID(p.progs[h.name])
		if err != nil {
			return nil, nil, err
		}
		var where, who []string
		for _, d := range p.devices {
			if !h.belongs(d) {
				continue
			}
			others, err := p.between(d, h, own)
			if err != nil && !vanished(err) {
				return nil, nil, err
			}
			if len(others) > 0 {
				where = append(where, d.Name)
				who = append(who, strings.Join(others, " and "))
			}
		}
		if len(where) > 0 {
			found = append(found, p.displaced(h, where, who[0]))
		}
	}
	return slices.Clone(p.devices), found, nil
}

// displaced is the Finding about a program that others have displaced on some devices; who they are on the first.
func (p *packets) displaced(h packetHook, where []string, who string) Finding {
	on := where[0]
	if len(where) > 1 {
		on += " and other devices"
	}
	f := Finding{Name: "order", Severity: device.Warning, Fix: "restart the agent on this node: it takes its place again; or choose the other --packet-order"}
	if p.order.first(h.ingress) {
		f.Message = fmt.Sprintf("%s runs before %s on %s: packets that it decides about never reach the packet path", who, h.name, on)
	} else {
		f.Message = fmt.Sprintf("%s runs after %s on %s: it sees one direction of a connection with the VIP and the other with the backend", who, h.name, on)
	}
	return f
}

// between describes the programs of others that stand where ours should.
func (p *packets) between(d device.Device, h packetHook, own ebpf.ProgramID) ([]string, error) {
	var who []string
	if p.tcx {
		_, others, err := p.inPlace(d.Index, h, own)
		if err != nil {
			return nil, err
		}
		for _, id := range others {
			who = append(who, describeProgram(id))
		}
		if p.order.first(h.ingress) {
			return who, nil
		}
	}
	// Filters of clsact run after all programs of TCX.
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
		who = append(who, describeFilter(f))
	}
	return who, nil
}

// describeFilter names a filter as tc does.
func describeFilter(f netlink.Filter) string {
	if b, ok := f.(*netlink.BpfFilter); ok && b.Name != "" {
		return fmt.Sprintf("the clsact filter %s of priority %d", b.Name, b.Priority)
	}
	return fmt.Sprintf("a clsact filter of kind %s and priority %d", f.Type(), f.Attrs().Priority)
}
