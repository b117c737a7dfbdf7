package ebpf

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// content is what the maps hold, by name. A table is represented by its hash.
type content struct {
	vips      map[[16]byte]bpf.GatewayVIP
	frontends map[bpf.GatewayFrontendKey]bpf.GatewayFrontend
	tables    map[uint32]uint64 // by frontend id
	backends  map[uint32]bpf.GatewayBackend
	sources   map[bpf.GatewaySourceKey]uint32
	members   map[bpf.GatewayMember]uint32
	origins   map[bpf.GatewayOriginKey]bpf.GatewayOrigin
	slots     map[uint32]bpf.GatewaySlot
	peers     map[uint32][16]byte
}

func newContent() *content {
	return &content{
		vips: map[[16]byte]bpf.GatewayVIP{}, frontends: map[bpf.GatewayFrontendKey]bpf.GatewayFrontend{}, tables: map[uint32]uint64{},
		backends: map[uint32]bpf.GatewayBackend{}, sources: map[bpf.GatewaySourceKey]uint32{}, members: map[bpf.GatewayMember]uint32{}, origins: map[bpf.GatewayOriginKey]bpf.GatewayOrigin{},
		slots: map[uint32]bpf.GatewaySlot{}, peers: map[uint32][16]byte{},
	}
}

// environment is what the maps depend on besides a state.
type environment struct {
	ids *ids
	// table returns the hash of the table for a frontend with these backends and their ids.
	table func(id uint32, proto uint8, backends []desired.Backend, numbers []uint32) uint64
	// address returns the gateway's own address towards another.
	address func(towards netip.Addr) (netip.Addr, error)
}

// build returns what the maps must hold for a state. A VIP that cannot be balanced is a fault.
func build(s *desired.State, m environment) (*content, desired.Faults) {
	c := newContent()
	c.addSlots(s)
	var faults desired.Faults
	for i := range s.VIPs {
		faults = append(faults, c.addVIP(fmt.Sprintf("vips[%d]", i), &s.VIPs[i], m)...)
	}
	return c, faults
}

// addSlots adds the slots, and the addresses of their owners.
func (c *content) addSlots(s *desired.State) {
	for slot, instead := range s.OwnSlots() {
		is := bpf.GatewaySlot{Shift: uint32(instead-slot+desired.SlotCount) % desired.SlotCount}
		if len(s.Slots) > 0 {
			is.Owner, is.Previous = uint32(s.Slots[slot].Owner), uint32(s.Slots[slot].Previous)
		}
		c.slots[uint32(slot)] = is
	}
	for i, peer := range s.Peers[:min(len(s.Peers), bpf.GatewayPeers)] {
		c.peers[uint32(i)+1] = [16]byte{} // the program stops at the first number without an entry
		if peer.Address.IsValid() {
			c.peers[uint32(i)+1] = bpf.Addr16(peer.Address)
		}
	}
}

func (c *content) addVIP(at string, v *desired.VIP, m environment) (faults desired.Faults) {
	vip := bpf.GatewayVIP{}
	switch v.Return {
	case desired.SNAT:
		vip.Source = bpf.Addr16(v.Addr)
	case desired.Masquerade:
		own, err := ownAddress(v, m)
		if err != nil {
			return desired.Faults{{Component: desired.ComponentBalancer, Field: at + ".return", Services: v.Services(), Message: err.Error()}}
		}
		if own.IsValid() {
			vip.Source = bpf.Addr16(own)
			c.addOwn(vip.Source)
		}
	case desired.Routed:
	}
	if v.Announce == desired.ByNone {
		vip.Flags = bpf.GatewayOwn // an address that is routed here by other means may also be the gateway's own
	}
	vip.Flags |= c.vips[bpf.Addr16(v.Addr)].Flags
	c.vips[bpf.Addr16(v.Addr)] = vip
	for i := range v.Frontends {
		if err := c.addFrontend(v, &v.Frontends[i], m); err != nil {
			faults = append(faults, desired.Fault{
				Component: desired.ComponentBalancer, Field: fmt.Sprintf("%s.frontends[%d]", at, i), Services: []string{v.Frontends[i].Service}, Message: err.Error(),
			})
		}
	}
	return faults
}

// addOwn adds an address of the gateway itself. It may be a VIP too, if a floating IP leads here.
func (c *content) addOwn(addr [16]byte) {
	have := c.vips[addr]
	have.Flags |= bpf.GatewayOwn
	c.vips[addr] = have
}

func (c *content) addFrontend(v *desired.VIP, f *desired.Frontend, m environment) error {
	key := keyOf(v, f)
	id, err := m.ids.frontend(key)
	if err != nil {
		return err
	}
	frontend := bpf.GatewayFrontend{Id: id}
	var serving []desired.Backend
	var numbers []uint32
	for _, b := range f.Backends {
		number := c.addBackend(key, netip.AddrPortFrom(b.Addr, b.Port), v.Return == desired.Routed, m)
		if !b.Draining {
			serving, numbers = append(serving, b), append(numbers, number)
		}
	}
	if len(serving) > 0 {
		frontend.Slots = uint32(len(bpf.GatewayTable{}))
		c.tables[id] = m.table(id, key.Proto, serving, numbers)
	}
	if f.Affinity > 0 {
		frontend.Flags |= bpf.GatewayAffinity
		frontend.AffinityS = uint32(f.Affinity)
		for _, number := range numbers {
			c.members[bpf.GatewayMember{FrontendId: id, BackendId: number}] = 1
		}
	}
	if len(f.Sources) > 0 {
		frontend.Flags |= bpf.GatewaySources
	}
	for _, p := range f.Sources {
		if p.Addr().Is4() == v.Addr.Is4() {
			c.sources[sourceKey(id, p)] = 1
		}
	}
	c.frontends[key] = frontend
	return nil
}

// addBackend adds a backend of a frontend and returns its id.
func (c *content) addBackend(of bpf.GatewayFrontendKey, at netip.AddrPort, routed bool, m environment) uint32 {
	key := endpoint(at, of.Proto)
	number := m.ids.backend(key)
	if !routed {
		of = bpf.GatewayFrontendKey{}
	}
	origin := bpf.GatewayOriginKey(key)
	if other, ok := c.origins[origin]; ok && other.Frontend != of {
		of = bpf.GatewayFrontendKey{}
	}
	c.backends[number] = bpf.GatewayBackend{Addr: key.Addr, Port: key.Port, Proto: key.Proto}
	c.origins[origin] = bpf.GatewayOrigin{Frontend: of, BackendId: number}
	c.origins[bpf.GatewayOriginKey{Addr: key.Addr}] = bpf.GatewayOrigin{} // fragments carry no port
	return number
}

// ownAddress returns the gateway's address towards the first backend of a VIP that it has a route to, and no address without
// backends.
func ownAddress(v *desired.VIP, m environment) (own netip.Addr, first error) {
	for i := range v.Frontends {
		for _, b := range v.Frontends[i].Backends {
			own, err := m.address(b.Addr)
			if err == nil {
				return own, nil
			}
			first = cmp.Or(first, err)
		}
	}
	return netip.Addr{}, first
}

func keyOf(v *desired.VIP, f *desired.Frontend) bpf.GatewayFrontendKey {
	return endpoint(netip.AddrPortFrom(v.Addr, f.Port), protocol(f.Protocol))
}

func endpoint(a netip.AddrPort, proto uint8) bpf.GatewayFrontendKey {
	return bpf.GatewayFrontendKey{Addr: bpf.Addr16(a.Addr()), Port: a.Port(), Proto: proto}
}

func sourceKey(id uint32, p netip.Prefix) bpf.GatewaySourceKey {
	bits := 32 + p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return bpf.GatewaySourceKey{Prefixlen: uint32(bits), FrontendId: id, Addr: bpf.Addr16(p.Addr())}
}

func protocol(name string) uint8 {
	if name == "UDP" {
		return unix.IPPROTO_UDP
	}
	return unix.IPPROTO_TCP
}

func protocolName(proto uint8) string {
	if proto == unix.IPPROTO_UDP {
		return "UDP"
	}
	return "TCP"
}

// differences reports for each map whether its content differs from that in o.
func (c *content) differences(o *content) map[string]bool {
	return map[string]bool{
		bpf.MapGatewayVIPs: !maps.Equal(c.vips, o.vips), bpf.MapFrontends: !maps.Equal(c.frontends, o.frontends),
		bpf.MapGatewayTables: !maps.Equal(c.tables, o.tables), bpf.MapBackends: !maps.Equal(c.backends, o.backends),
		bpf.MapGatewaySources: !maps.Equal(c.sources, o.sources), bpf.MapGatewayMembers: !maps.Equal(c.members, o.members),
		bpf.MapGatewayOrigins: !maps.Equal(c.origins, o.origins), bpf.MapGatewaySlots: !maps.Equal(c.slots, o.slots),
		bpf.MapGatewayPeers: !maps.Equal(c.peers, o.peers),
	}
}
