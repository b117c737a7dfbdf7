package nft

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// slots is how many slots the table of a frontend has, a prime (see lb.Maglev). It is part of what all gateways of a group must
// have in common.
const slots = 1021

// set names one of the table's sets and maps; each is there for both families.
type set int

// The sets and maps. Fields are concatenated, each padded to four bytes.
const (
	slotsOpen        set = iota // VIP, protocol, port, slot -> backend, port
	slotsRestricted             // the same of frontends that only sources may connect to
	slotsAffine                 // the same, where the slot follows from the client's address alone, whoever may connect
	restricted                  // VIP, protocol, port: only sources may connect
	sources                     // VIP, protocol, port, range of clients
	ownVIPs                     // VIP: what no frontend takes is refused
	refused                     // VIP, protocol, port: nobody serves it
	backends                    // backend, protocol, port
	backendFrontends            // backend, protocol, port -> VIP, port: of which frontend, if of one alone and routed, it is
	snat                        // VIP -> VIP: it becomes the source towards backends
	masquerade                  // VIP: the gateway's address becomes the source
	affinity                    // VIP, protocol, port -> the chain of the time that clients stay
	affinityBackends            // VIP, protocol, port, backend, port: it gets connections of clients that stay
	clients                     // client, VIP, protocol, port -> backend, port: with whom it stays, written by the rules
	setCount
)

// element is what is put into a set: key is from its start to its end where they differ, value is "" but in maps.
type element struct{ key, value string }

// content is what one VIP puts into the sets, besides slots.
type vipElements [setCount][]element

// contentOf returns what a VIP needs in the sets but maglev, screened and affine.
func elementsOf(v *desired.VIP) *vipElements {
	c := new(vipElements)
	addr := string(v.Addr.AsSlice())
	if v.Announce != desired.ByNone {
		c.add(ownVIPs, addr, "") // what somebody else leads here may be the gateway's own address as well
	}
	switch v.Return {
	case desired.SNAT:
		c.add(snat, addr, addr)
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
				c.add(backendFrontends, to, addrPort(netip.AddrPortFrom(v.Addr, f.Port)))
			} else {
				c.add(backendFrontends, to, "") // no value is another frontend's
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

// serving returns the backends that get new connections.
func serving(f *desired.Frontend) []desired.Backend {
	return slices.DeleteFunc(slices.Clone(f.Backends), func(b desired.Backend) bool { return b.Draining })
}

// endpoint is the key of an address, protocol and port.
func endpoint(a netip.Addr, p clusterset.Protocol, port uint16) string {
	key := append(a.AsSlice(), byte(p), 0, 0, 0)
	return string(append(binary.BigEndian.AppendUint16(key, port), 0, 0))
}

// addrPort is the value of an address and port.
func addrPort(a netip.AddrPort) string {
	return string(append(binary.BigEndian.AppendUint16(a.Addr().AsSlice(), a.Port()), 0, 0))
}

// cover returns the prefixes of a family, without those inside others: ranges in a set must not overlap.
func cover(prefixes []netip.Prefix, v4 bool) []netip.Prefix {
	var all []netip.Prefix
	for _, p := range prefixes {
		if p.Addr().Is4() != v4 {
			continue
		}
		inside := func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) }
		if !slices.ContainsFunc(all, inside) {
			all = append(slices.DeleteFunc(all, func(q netip.Prefix) bool { return p.Bits() <= q.Bits() && p.Contains(q.Addr()) }), p)
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

// table is what the slots of a frontend hold.
type table struct {
	set    set    // maglev, screened or affine
	prefix string // of the keys; the slot follows
	choice []int  // by slot: an index of values
	values []string
}

// tableOf fills the table of a frontend; there is none when nobody serves it.
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

// tableSet is the set of a frontend's slots.
func tableSet(f *desired.Frontend) set {
	switch {
	case f.Affinity > 0:
		return slotsAffine
	case len(f.Sources) > 0:
		return slotsRestricted
	}
	return slotsOpen
}

// element returns what a slot is in the kernel; the number of the slot is in the order of the machine, as the hash is.
func (t *table) element(slot int) element {
	return element{string(binary.NativeEndian.AppendUint32([]byte(t.prefix), uint32(slot))), t.values[t.choice[slot]]}
}
