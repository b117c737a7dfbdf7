package dataplane

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/reference"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The planes that ours are held against.
const (
	// floor is of programs that do nothing: what they cost, the kernel takes to call one and to take its time.
	floor = "empty program"
	// The others do the least that a load balancer must: package reference.
	leastSocket  = "reference, socket path"
	leastStorage = "reference, socket path with socket storage"
	leastSlow    = "reference, packet slow path"
	leastFast    = "reference, packet fast path"
)

// yardsticks are programs that ours are held against, on hooks and roads of their own.
type yardsticks struct {
	programs map[program]*ebpf.Program
	roads    []road
	open     []io.Closer
}

// layYardsticks makes all of them. They are the caller's to close.
func (b *testbed) layYardsticks() (y *yardsticks, err error) {
	y = &yardsticks{programs: map[program]*ebpf.Program{}}
	if err := errors.Join(
		b.layFloor(y),
		b.layLeastSocket(y, leastSocket, reference.Connect4Table),
		b.layLeastSocket(y, leastStorage, reference.Connect4Storage),
		b.layLeastPacket(y, leastSlow, reference.ToClient),
		b.layLeastPacket(y, leastFast, reference.FromNetwork),
	); err != nil {
		return nil, errors.Join(err, y.Close())
	}
	return y, nil
}

// Close takes the programs from their hooks.
func (y *yardsticks) Close() error {
	var errs []error
	for _, o := range slices.Backward(y.open) {
		errs = append(errs, o.Close())
	}
	return errors.Join(errs...)
}

// attachCgroup puts a program on a hook of a cgroup.
func (y *yardsticks) attachCgroup(p *ebpf.Program, at ebpf.AttachType, cgroup *netlab.Cgroup) error {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup.Path, Attach: at, Program: p})
	if err != nil {
		return fmt.Errorf("attach to a cgroup: %w", err)
	}
	y.open = append(y.open, l)
	return nil
}

// attachDevice puts a program on a device of a node.
func (y *yardsticks) attachDevice(p *ebpf.Program, at ebpf.AttachType, node *netlab.Namespace, name string) error {
	return node.Do(func() error {
		device, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: p, Attach: at})
		if err != nil {
			return fmt.Errorf("attach to a device: %w", err)
		}
		y.open = append(y.open, l)
		return nil
	})
}

// layFloor puts programs that do nothing where the direct road passes, and adds a road for those of a cgroup.
func (b *testbed) layFloor(y *yardsticks) error {
	load := func(name string, kind ebpf.ProgramType, at ebpf.AttachType) (*ebpf.Program, error) {
		const proceed = 1 // of a cgroup's program; to the others it says the same as to go on
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: kind, AttachType: at, License: "Dual BSD/GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, proceed), asm.Return()},
		})
		if err != nil {
			return nil, fmt.Errorf("load an empty program: %w", err)
		}
		y.programs[program{floor, name}] = p
		y.open = append(y.open, p)
		return p, nil
	}
	cgroup, err := b.newCgroup()
	if err != nil {
		return err
	}
	for name, at := range map[string]ebpf.AttachType{"connect4": ebpf.AttachCGroupInet4Connect, "recvmsg4": ebpf.AttachCGroupUDP4Recvmsg} {
		p, err := load(name, ebpf.CGroupSockAddr, at)
		if err != nil {
			return err
		}
		if err := y.attachCgroup(p, at, cgroup); err != nil {
			return err
		}
	}
	p, err := load("classifier", ebpf.SchedCLS, ebpf.AttachTCXIngress)
	if err != nil {
		return err
	}
	plain := b.roads[0]
	y.roads = append(y.roads, road{name: floor, lane: plain.lane, cgroup: cgroup, to: plain.to})
	return y.attachDevice(p, ebpf.AttachTCXIngress, plain.lane.node, plain.lane.devices[0])
}

// loadLeast loads the reference. What it opens is y's.
func (y *yardsticks) loadLeast(cfg reference.Config) (*ebpf.Collection, error) {
	cfg.VIP, cfg.Backend = vip, backend
	coll, err := reference.Load(cfg)
	if err != nil {
		return nil, err
	}
	y.open = append(y.open, closer(coll.Close))
	return coll, nil
}

type closer func()

func (c closer) Close() error { c(); return nil }

// layLeastSocket gives the sockets of a cgroup one of the reference's programs.
func (b *testbed) layLeastSocket(y *yardsticks, plane, name string) error {
	coll, err := y.loadLeast(reference.Config{})
	if err != nil {
		return err
	}
	cgroup, err := b.newCgroup()
	if err != nil {
		return err
	}
	y.programs[program{plane, "connect4"}] = coll.Programs[name]
	y.roads = append(y.roads, road{name: plane, lane: b.roads[0].lane, cgroup: cgroup, to: vip, connected: true})
	return y.attachCgroup(coll.Programs[name], ebpf.AttachCGroupInet4Connect, cgroup)
}

// layLeastPacket makes a lane whose node translates by the reference. Answers are for the named program: FromNetwork
// makes it a fast road, ToClient a slow one.
func (b *testbed) layLeastPacket(y *yardsticks, plane, name string) error {
	l, err := b.newLane()
	if err != nil {
		return err
	}
	client, uplink := l.devices[0], l.devices[1]
	var cfg reference.Config
	at, device := ebpf.AttachTCXEgress, client
	if name == reference.FromNetwork {
		at, device = ebpf.AttachTCXIngress, uplink
		if err := l.node.Do(func() error {
			d, err := net.InterfaceByName(uplink)
			if err != nil {
				return err
			}
			cfg.Uplink, cfg.NextHop = d.Index, l.router
			return nil
		}); err != nil {
			return err
		}
	}
	coll, err := y.loadLeast(cfg)
	if err != nil {
		return err
	}
	for _, name := range []string{reference.FromClient, name} {
		y.programs[program{plane, name}] = coll.Programs[name]
	}
	y.roads = append(y.roads, road{name: plane, lane: l, to: vip})
	return errors.Join(
		y.attachDevice(coll.Programs[reference.FromClient], ebpf.AttachTCXIngress, l.node, client),
		y.attachDevice(coll.Programs[name], at, l.node, device),
	)
}

// measured are the roads of our dataplanes and of what they are held against.
func (b *testbed) measured(y *yardsticks) []road {
	ours := slices.Clone(y.roads)
	for _, r := range b.roads {
		if slices.ContainsFunc(b.planes, func(p plane) bool { return p.name == r.name }) {
			ours = append(ours, r)
		}
	}
	return ours
}
