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

// The names of the baselines.
const (
	// emptyProgram returns at once. Its cost is the kernel's overhead of calling a program and measuring its run time.
	emptyProgram = "empty program"
	// The references do the minimum of a load balancer; see package reference.
	referenceSocket  = "reference, socket path"
	referenceStorage = "reference, socket path with socket storage"
	referenceSlow    = "reference, packet slow path"
	referenceFast    = "reference, packet fast path"
	// redirected is the fast path without a load balancer. It shows what redirection alone gains or costs.
	redirected = "redirected, no load balancer"
)

// baselines are attached programs that those of Isthmus are compared with.
type baselines struct {
	programs map[program]*ebpf.Program
	open     []io.Closer
}

func newBaselines() *baselines { return &baselines{programs: map[program]*ebpf.Program{}} }

// Close detaches the programs.
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
		b.buildReferenceSocket(referenceSocket, reference.Connect4Table),
		b.buildReferenceSocket(referenceStorage, reference.Connect4Storage),
		b.buildReferencePacket(referenceSlow, reference.ToClient),
		b.buildReferencePacket(referenceFast, reference.FromNetwork),
		b.buildRedirected(),
	)
}

// attachCgroup attaches a program to a cgroup.
func (y *baselines) attachCgroup(p *ebpf.Program, at ebpf.AttachType, cgroup *netlab.Cgroup) error {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup.Path, Attach: at, Program: p})
	if err != nil {
		return fmt.Errorf("attach to a cgroup: %w", err)
	}
	y.open = append(y.open, l)
	return nil
}

// attachDevice attaches a program to a device of a node.
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

// attachEmptyPrograms attaches empty programs to the direct path, and returns a path for those on a cgroup. The caller closes
// the baselines.
func (b *testbed) attachEmptyPrograms() (y *baselines, via path, err error) {
	y = newBaselines()
	defer func() {
		if err != nil {
			err = errors.Join(err, y.Close())
		}
	}()
	load := func(name string, kind ebpf.ProgramType, at ebpf.AttachType) (*ebpf.Program, error) {
		const proceed = 1 // lets a socket operation continue; TCX treats it as TCX_NEXT
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: kind, AttachType: at, License: "Dual BSD/GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, proceed), asm.Return()},
		})
		if err != nil {
			return nil, fmt.Errorf("load an empty program: %w", err)
		}
		y.programs[program{emptyProgram, name}] = p
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
	return y, path{name: emptyProgram, lane: plain.lane, cgroup: cgroup, to: plain.to}, nil
}

// loadReference loads the reference programs. y.Close closes them.
func (y *baselines) loadReference(cfg reference.Config) (*ebpf.Collection, error) {
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

// buildReferenceSocket builds a socket path with one of the reference programs.
func (b *testbed) buildReferenceSocket(plane, name string) error {
	y := b.references
	coll, err := y.loadReference(reference.Config{})
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

// buildReferencePacket builds a packet path with the reference programs. The program back translates the replies:
// FromNetwork makes it a fast path, ToClient a slow path.
func (b *testbed) buildReferencePacket(plane, back string) error {
	l, err := b.newLane()
	if err != nil {
		return err
	}
	var cfg reference.Config
	at, device := ebpf.AttachTCXEgress, l.devices[0]
	if back == reference.FromNetwork {
		at, device = ebpf.AttachTCXIngress, l.devices[1]
		if cfg, err = fastPathConfig(l); err != nil {
			return err
		}
	}
	b.paths = append(b.paths, path{name: plane, lane: l, to: vip})
	return b.attachReference(plane, l, cfg, reference.FromClient, back, at, device)
}

// buildRedirected builds a path whose node redirects packets and translates nothing.
func (b *testbed) buildRedirected() error {
	l, err := b.newLane()
	if err != nil {
		return err
	}
	cfg, err := fastPathConfig(l)
	if err != nil {
		return err
	}
	b.paths = append(b.paths, path{name: redirected, lane: l, to: backend})
	return b.attachReference(redirected, l, cfg, reference.RedirectOut, reference.RedirectIn, ebpf.AttachTCXIngress, l.devices[1])
}

// fastPathConfig returns the devices and the next hop that the node of a lane redirects to.
func fastPathConfig(l *lane) (cfg reference.Config, err error) {
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

// attachReference attaches two reference programs in the node of a lane: out to packets from the client, and back to replies
// at the given device.
func (b *testbed) attachReference(plane string, l *lane, cfg reference.Config, out, back string, at ebpf.AttachType, device string) error {
	y := b.references
	coll, err := y.loadReference(cfg)
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
