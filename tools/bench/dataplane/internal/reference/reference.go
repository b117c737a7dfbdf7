// Package reference is the least that a load balancer must do for a VIP, as programs to hold ours against on the same
// machine: one VIP with one backend, IPv4, and nothing beside. What they do says reference.bpf.c.
package reference

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// The programs. Those of connect4 translate connections; FromClient and ToClient the packets of a flow on the slow path,
// FromClient and FromNetwork on the fast one. RedirectOut and RedirectIn are the fast path, and translate nothing.
const (
	Connect4Storage = referenceProgConnect4Storage
	Connect4Table   = referenceProgConnect4Table
	FromClient      = referenceProgFromClient
	ToClient        = referenceProgToClient
	FromNetwork     = referenceProgFromNetwork
	RedirectOut     = referenceProgRedirectOut
	RedirectIn      = referenceProgRedirectIn
)

// Config is what the programs serve, TCP and UDP.
type Config struct {
	VIP, Backend netip.AddrPort // IPv4
	// Uplink is the interface index of the device to the backend, ClientDevice that of the one to the client and NextHop
	// the router at the uplink, for the fast path; on the slow one all are zero.
	Uplink, ClientDevice int
	NextHop              netip.Addr
}

// Load returns the programs, with maps of their own. They are the caller's to attach and to close.
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
