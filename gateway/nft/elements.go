package nft

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// slots is the size of a frontend's Maglev table, a prime (see lb.Maglev). All gateways of a group must use the same.
const slots = 1021

// set identifies a set or map of the table. Each exists for both address families.
type set int

// Sets and maps with their keys and values. Fields are concatenated, each padded to four bytes.
const (
	maglev           set = iota // VIP, protocol, port, slot -> backend, port
	maglevRestricted            // the same, for frontends that only sources may connect to
	maglevAffinity              // the same, for frontends with affinity: the slot depends on the client's address alone
	restricted                  // VIP, protocol, port: only sources may connect
	sources                     // VIP, protocol, port, range of clients
	vipSet                      // VIP: packets that no frontend takes are refused
	refused                     // VIP, protocol, port: the frontend has no backends
	backends                    // backend, protocol, port
	backendFrontends            // backend, protocol, port -> VIP, port: its frontend, if it has exactly one, which is routed
	routedBackends              // backend, protocol, port: of a VIP that is routed
	snat                        // VIP: it is the source address towards backends
	masquerade                  // VIP: the gateway's address is the source towards backends
	affinity                    // VIP, protocol, port -> chain of its affinity timeout
	affinityBackends            // VIP, protocol, port, backend, port: the backend accepts connections of known clients
	clients                     // client, VIP, protocol, port -> backend, port: the client's affinity, which the rules write
	ownPorts                    // first port of a slot -> first port of the slot that the gateway uses instead
	owners                      // first port of a peer's slot -> the peer
	previousOwners              // first port of a slot that a peer had before its owner -> that peer
	peers                       // number, from 0 on -> peer with an address of the family
	peerAddrs                   // peer, all of them
	unknown                     // client, port, VIP, port: a packet of a TCP connection that nobody has announced, which the rules write
	awaited                     // the same, while it may still be announced
	setCount
)

// element is an element of a set. In a range set, key is the start followed by the end. value is "" except in maps.
type element struct{ key, value string }

// vipElements are the elements of one VIP, without its Maglev tables.
type vipElements [setCount][]element

// elementsOf returns the elements of a VIP in all sets but the Maglev tables.
func elementsOf(v *desired.VIP) *vipElements {
	c := new(vipElements)
	addr := string(v.Addr.AsSlice())
	if v.Announce != desired.ByNone {
		c.add(vipSet, addr, "") // a VIP without announcer may be the gateway's own address as well
	}
	switch v.Return {
	case desired.SNAT:
		c.add(snat, addr, "")
	case desired.Masquerade:
		c.add(masquerade, addr, "")
	case desired.Routed:
	}
	for i := range v.Frontends {
		f := &v.Frontends[i]
		p := protocol(f)
		key := endpoint(v.Addr, p, f.Port)
		if len(serving(f)) == 0 {
			c.add(refused, key, "")
		}
		if len(f.Sources) > 0 {
			c.add(restricted, key, "")
		}
		for _, s := range cover(f.Sources, v.Addr.Is4()) {
			c.add(sources, key+string(s.Addr().AsSlice())+key+string(last(s).AsSlice()), "")
		}
		if f.Affinity > 0 {
			c.add(affinity, key, affinityChainName(f.Affinity))
			for _, b := range serving(f) {
				c.add(affinityBackends, key+addrPort(netip.AddrPortFrom(b.Addr, b.Port)), "")
			}
		}
		for _, b := range f.Backends {
			to := endpoint(b.Addr, p, b.Port)
			c.add(backends, to, "")
			if v.Return == desired.Routed {
				c.add(routedBackends, to, "")
				c.add(backendFrontends, to, addrPort(netip.AddrPortFrom(v.Addr, f.Port)))
			} else {
				c.add(backendFrontends, to, "") // "" conflicts with the value of any other frontend
			}
		}
	}
	return c
}

func (c *vipElements) add(s set, key, value string) { c[s] = append(c[s], element{key, value}) }

func protocol(f *desired.Frontend) clusterset.Protocol {
	if f.Protocol == "UDP" {
		return clusterset.UDP
	}
	return clusterset.TCP
}

// serving returns the backends that accept new connections.
func serving(f *desired.Frontend) []desired.Backend {
	return slices.DeleteFunc(slices.Clone(f.Backends), func(b desired.Backend) bool { return b.Draining })
}

// endpoint encodes an address, protocol and port as a key.
func endpoint(a netip.Addr, p clusterset.Protocol, port uint16) string {
	key := append(a.AsSlice(), byte(p), 0, 0, 0)
	return string(append(binary.BigEndian.AppendUint16(key, port), 0, 0))
}

// groupElements returns the elements of the sets that depend on the gateway's group: ownPorts, owners, previousOwners, peers and peerAddrs. Without
// slots there are none of ownPorts, and the gateway takes any port. Nothing goes to all peers that are absent, given their names.
func groupElements(s *desired.State, absent map[string]bool) map[familySet]map[string]string {
	all := map[familySet]map[string]string{}
	for _, f := range families {
		put := func(in set, key, value string) {
			p := familySet{in, f.v4}
			if all[p] == nil {
				all[p] = map[string]string{}
			}
			all[p][key] = value
		}
		addr := func(gateway int) string { // "" if it is this one, or has none of the family
			if gateway == 0 || !s.Peers[gateway-1].AddressOf(f.v4).IsValid() {
				return ""
			}
			return string(s.Peers[gateway-1].AddressOf(f.v4).AsSlice())
		}
		if len(s.Slots) > 0 {
			for slot, instead := range s.OwnSlots() {
				put(ownPorts, slotKey(slot), string(binary.BigEndian.AppendUint16(nil, uint16(max(instead*desired.SlotPorts, 1))))) // port 0 is none
			}
		}
		for slot, is := range s.Slots {
			if to := addr(is.Owner); to != "" {
				put(owners, slotKey(slot), to)
			}
			if to := addr(is.Previous); to != "" {
				put(previousOwners, slotKey(slot), to)
			}
		}
		known := 0
		for i := range s.Peers {
			to := addr(i + 1)
			if to == "" {
				continue
			}
			put(peerAddrs, to, "")
			if known < maxPeers && !absent[s.Peers[i].Name] {
				put(peers, peerKey(known), to)
				known++
			}
		}
	}
	return all
}

// slotKey encodes the first port of a slot.
func slotKey(slot int) string {
	return string(binary.BigEndian.AppendUint16(nil, uint16(slot*desired.SlotPorts)))
}

// peerKey encodes the number of a peer.
func peerKey(n int) string { return string(binary.NativeEndian.AppendUint32(nil, uint32(n))) }

// addrPort encodes an address and port as a value.
func addrPort(a netip.AddrPort) string {
	return string(append(binary.BigEndian.AppendUint16(a.Addr().AsSlice(), a.Port()), 0, 0))
}

// cover returns the prefixes of a family without those inside others: ranges of a set must not overlap.
func cover(prefixes []netip.Prefix, v4 bool) (all []netip.Prefix) {
	sorted := slices.SortedFunc(slices.Values(prefixes), func(p, q netip.Prefix) int { // a prefix follows those that contain it
		return cmp.Or(p.Addr().Compare(q.Addr()), cmp.Compare(p.Bits(), q.Bits()))
	})
	for _, p := range sorted {
		if p.Addr().Is4() == v4 && (len(all) == 0 || !all[len(all)-1].Contains(p.Addr())) {
			all = append(all, p)
		}
	}
	return all
}

// last returns the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// table is the Maglev table of a frontend.
type table struct {
	set    set    // maglev, maglevRestricted or maglevAffinity
	prefix string // of the keys; the slot follows
	choice []int  // by slot: an index into values
	values []string
}

// tableOf builds the table of a frontend, nil without backends.
func tableOf(v *desired.VIP, f *desired.Frontend) *table {
	all := serving(f)
	if len(all) == 0 {
		return nil
	}
	t := &table{set: tableSet(f), prefix: endpoint(v.Addr, protocol(f), f.Port)}
	addrs := make([]lb.Address, len(all))
	weights := make([]uint32, len(all))
	for i, b := range all {
		at := netip.AddrPortFrom(b.Addr, b.Port)
		addrs[i] = lb.Address{AddrPort: at, Protocol: protocol(f)}
		weights[i] = uint32(b.Weight)
		t.values = append(t.values, addrPort(at))
	}
	t.choice = lb.Maglev(addrs, weights, slots)
	return t
}

// tableSet returns the set that holds the table of a frontend.
func tableSet(f *desired.Frontend) set {
	switch {
	case f.Affinity > 0:
		return maglevAffinity
	case len(f.Sources) > 0:
		return maglevRestricted
	}
	return maglev
}

// element returns the element of a slot. The slot number has the byte order of the machine, as the hash has.
func (t *table) element(slot int) element {
	return element{string(binary.NativeEndian.AppendUint32([]byte(t.prefix), uint32(slot))), t.values[t.choice[slot]]}
}
