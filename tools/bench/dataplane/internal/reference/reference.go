// Package reference holds BPF programs that do the minimum of a load balancer: one VIP with one backend, IPv4 only. The
// benchmark compares the programs of Isthmus with them on the same machine. reference.bpf.c describes each program.
package reference

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// The names of the programs. Connect4* translate connections. FromClient and ToClient translate packets on the slow path,
// FromClient and FromNetwork on the fast path. RedirectOut and RedirectIn are the fast path without translation.
const (
	Connect4Storage = referenceProgConnect4Storage
	Connect4Table   = referenceProgConnect4Table
	FromClient      = referenceProgFromClient
	ToClient        = referenceProgToClient
	FromNetwork     = referenceProgFromNetwork
	RedirectOut     = referenceProgRedirectOut
	RedirectIn      = referenceProgRedirectIn
)

// Config describes the VIP that the programs serve, for TCP and UDP.
type Config struct {
	VIP, Backend netip.AddrPort // IPv4
	// The fast path needs the interface index of the device to the backend (Uplink) and of the device to the client, and the
	// router at the uplink (NextHop). All are zero on the slow path.
	Uplink, ClientDevice int
	NextHop              netip.Addr
}

// Load returns the programs with their own maps. The caller attaches and closes them.
func Load(cfg Config) (coll *ebpf.Collection, err error) {
	spec, err := loadReference()
	if err != nil {
		return nil, err
	}
	if cfg.Uplink != 0 {
		if err := errors.Join(
			spec.Variables[referenceVarUPLINK].Set(uint32(cfg.Uplink)),
			spec.Variables[referenceVarCLIENT_DEVICE].Set(uint32(cfg.ClientDevice)),
			spec.Variables[referenceVarNEXT_HOP].Set(onWire(cfg.NextHop)),
		); err != nil {
			return nil, err
		}
	}
	if coll, err = ebpf.NewCollection(spec); err != nil {
		return nil, fmt.Errorf("load the reference: %w", err)
	}
	for i, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		if err := errors.Join(
			coll.Maps[referenceMapFrontends].Put(newEndpoint(cfg.VIP, proto), referenceGroup{First: uint32(i), Count: 1}),
			coll.Maps[referenceMapBackends].Put(uint32(i), newEndpoint(cfg.Backend, proto)),
		); err != nil {
			coll.Close()
			return nil, fmt.Errorf("fill the reference: %w", err)
		}
	}
	return coll, nil
}

func newEndpoint(a netip.AddrPort, proto uint8) referenceEndpoint {
	port := binary.BigEndian.AppendUint16(nil, a.Port())
	return referenceEndpoint{Addr: onWire(a.Addr()), Port: binary.NativeEndian.Uint16(port), Proto: proto}
}

func onWire(a netip.Addr) uint32 { return binary.NativeEndian.Uint32(a.AsSlice()) }
