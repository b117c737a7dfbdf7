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
	// redirected is the fast path without a load balancer: what there is to gain, or to lose, before one has done anything.
	redirected = "redirected, no load balancer"
)

// baselines are programs that ours are held against, on hooks of their own.
type baselines struct {
	programs map[program]*ebpf.Program
	open     []io.Closer
}

func newBaselines() *baselines { return &baselines{programs: map[program]*ebpf.Program{}} }

// Close takes the programs from their hooks.
func (y *baselines) Close() error {
	var errs []error
	for _, o := range slices.Backward(y.open) {
		errs = append(errs, o.Close())
	}
	return errors.Join(errs...)
}

// buildReferences builds the paths of the references.
func (b *testbed) buildReferences() error {
	b.references = newBaselines()
	b.undo = append(b.undo, b.references.Close)
	return errors.Join(
		b.buildLeastSocket(leastSocket, reference.Connect4Table),
		b.buildLeastSocket(leastStorage, reference.Connect4Storage),
		b.buildLeastPacket(leastSlow, reference.ToClient),
		b.buildLeastPacket(leastFast, reference.FromNetwork),
		b.buildRedirected(),
	)
}

// attachCgroup puts a program on a hook of a cgroup.
func (y *baselines) attachCgroup(p *ebpf.Program, at ebpf.AttachType, cgroup *netlab.Cgroup) error {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup.Path, Attach: at, Program: p})
	if err != nil {
		return fmt.Errorf("attach to a cgroup: %w", err)
	}
	y.open = append(y.open, l)
	return nil
}

// attachDevice puts a program on a device of a node.
func (y *baselines) attachDevice(p *ebpf.Program, at ebpf.AttachType, node *netlab.Namespace, name string) error {
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

// layFloor puts programs that do nothing where the direct path passes, and makes a path for those of a cgroup. The
// baselines are the caller's to close.
func (b *testbed) layFloor() (y *baselines, r path, err error) {
	y = newBaselines()
	defer func() {
		if err != nil {
			err = errors.Join(err, y.Close())
		}
	}()
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
		return nil, path{}, err
	}
	for name, at := range map[string]ebpf.AttachType{"connect4": ebpf.AttachCGroupInet4Connect, "recvmsg4": ebpf.AttachCGroupUDP4Recvmsg} {
		p, err := load(name, ebpf.CGroupSockAddr, at)
		if err != nil {
			return nil, path{}, err
		}
		if err := y.attachCgroup(p, at, cgroup); err != nil {
			return nil, path{}, err
		}
	}
	p, err := load("classifier", ebpf.SchedCLS, ebpf.AttachTCXIngress)
	if err != nil {
		return nil, path{}, err
	}
	plain := b.paths[0]
	if err := y.attachDevice(p, ebpf.AttachTCXIngress, plain.lane.node, plain.lane.devices[0]); err != nil {
		return nil, path{}, err
	}
	return y, path{name: floor, lane: plain.lane, cgroup: cgroup, to: plain.to}, nil
}

// loadLeast loads the reference. What it opens is y's.
func (y *baselines) loadLeast(cfg reference.Config) (*ebpf.Collection, error) {
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

// buildLeastSocket gives the sockets of a cgroup one of the reference's programs.
func (b *testbed) buildLeastSocket(plane, name string) error {
	y := b.references
	coll, err := y.loadLeast(reference.Config{})
	if err != nil {
		return err
	}
	cgroup, err := b.newCgroup()
	if err != nil {
		return err
	}
	y.programs[program{plane, "connect4"}] = coll.Programs[name]
	b.paths = append(b.paths, path{name: plane, lane: b.paths[0].lane, cgroup: cgroup, to: vip, connected: true})
	return y.attachCgroup(coll.Programs[name], ebpf.AttachCGroupInet4Connect, cgroup)
}

// buildLeastPacket makes a lane whose node translates by the reference. Answers are for the named program: FromNetwork
// makes it a fast path, ToClient a slow one.
func (b *testbed) buildLeastPacket(plane, back string) error {
	l, err := b.newLane()
	if err != nil {
		return err
	}
	var cfg reference.Config
	at, device := ebpf.AttachTCXEgress, l.devices[0]
	if back == reference.FromNetwork {
		at, device = ebpf.AttachTCXIngress, l.devices[1]
		if cfg, err = fastPath(l); err != nil {
			return err
		}
	}
	b.paths = append(b.paths, path{name: plane, lane: l, to: vip})
	return b.layReference(plane, l, cfg, reference.FromClient, back, at, device)
}

// buildRedirected makes a lane whose node redirects and translates nothing.
func (b *testbed) buildRedirected() error {
	l, err := b.newLane()
	if err != nil {
		return err
	}
	cfg, err := fastPath(l)
	if err != nil {
		return err
	}
	b.paths = append(b.paths, path{name: redirected, lane: l, to: backend})
	return b.layReference(redirected, l, cfg, reference.RedirectOut, reference.RedirectIn, ebpf.AttachTCXIngress, l.devices[1])
}

// fastPath says where the node of a lane redirects to.
func fastPath(l *lane) (cfg reference.Config, err error) {
	cfg.NextHop = l.router
	err = l.node.Do(func() error {
		client, err := net.InterfaceByName(l.devices[0])
		if err != nil {
			return err
		}
		uplink, err := net.InterfaceByName(l.devices[1])
		if err != nil {
			return err
		}
		cfg.ClientDevice, cfg.Uplink = client.Index, uplink.Index
		return nil
	})
	return cfg, err
}

// layReference puts two of the reference's programs into the node of a lane: one for what the client sends, and one for
// answers, at a device of its own.
func (b *testbed) layReference(plane string, l *lane, cfg reference.Config, out, back string, at ebpf.AttachType, device string) error {
	y := b.references
	coll, err := y.loadLeast(cfg)
	if err != nil {
		return err
	}
	for _, name := range []string{out, back} {
		y.programs[program{plane, name}] = coll.Programs[name]
	}
	return errors.Join(
		y.attachDevice(coll.Programs[out], ebpf.AttachTCXIngress, l.node, l.devices[0]),
		y.attachDevice(coll.Programs[back], at, l.node, device),
	)
}
