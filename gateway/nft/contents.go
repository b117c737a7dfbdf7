package nft

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// familySet is a set of one address family.
type familySet struct {
	set set
	v4  bool
}

// changes are the writes that lead from one state to another. An element whose value changes is in both.
type changes struct{ remove, add map[familySet][]element }

func newChanges() changes { return changes{map[familySet][]element{}, map[familySet][]element{}} }

// listener is the address of a frontend.
type listener struct {
	vip      netip.Addr
	protocol string
	port     uint16
}

// contents are the elements that the sets should hold. They count the VIPs that want each value, because two frontends
// may share a backend. An element with conflicting values is left out.
type contents struct {
	vips   map[netip.Addr]desired.VIP
	tables map[listener]*table
	wanted map[familySet]map[string]map[string]int // by key and value: number of VIPs that want it
	group  map[familySet]map[string]string         // see groupElements
}

func newContents() *contents {
	return &contents{vips: map[netip.Addr]desired.VIP{}, tables: map[listener]*table{}, wanted: map[familySet]map[string]map[string]int{}}
}

// replaceVIPs makes c hold the elements of vips. It returns the writes for that, and the previous versions of the VIPs
// that changed. Unchanged VIPs cost only a comparison.
func (b *contents) replaceVIPs(vips []desired.VIP) (c changes, had []desired.VIP) {
	c = newChanges()
	touched := map[familySet]map[string]string{} // by key: the value before
	stays := map[netip.Addr]bool{}
	for i := range vips {
		v := &vips[i]
		stays[v.Addr] = true
		was, ok := b.vips[v.Addr]
		if ok && equal(&was, v) {
			continue
		}
		if ok {
			b.count(&was, -1, touched)
			had = append(had, was)
		}
		b.count(v, 1, touched)
		b.tabulate(&was, v, c)
		b.vips[v.Addr] = *v
	}
	for addr, v := range b.vips {
		if !stays[addr] {
			b.count(&v, -1, touched)
			had = append(had, v)
			b.tabulate(&v, &desired.VIP{Addr: addr}, c)
			delete(b.vips, addr)
		}
	}
	for p, keys := range touched {
		for key, before := range keys {
			b.compare(p, key, before, c)
		}
	}
	return c, had
}

// replaceGroup makes b hold the elements of groupElements, and adds the writes for that to c.
func (b *contents) replaceGroup(want map[familySet]map[string]string, c changes) {
	writes := diff(b.group, want)
	maps.Copy(c.remove, writes.remove)
	maps.Copy(c.add, writes.add)
	b.group = want
}

// absent is the value of a missing element.
const absent = "\x00absent"

// value returns the value that an element should have.
func (b *contents) value(p familySet, key string) string {
	if all := b.wanted[p][key]; len(all) == 1 {
		for v := range all {
			if p.set == backendFrontends && v == "" {
				break // the frontend is not routed
			}
			return v
		}
	}
	return absent
}

// compare adds the writes that lead from an element's value before to the present one to c.
func (b *contents) compare(p familySet, key, before string, c changes) {
	after := b.value(p, key)
	if after == before {
		return
	}
	if before != absent {
		c.remove[p] = append(c.remove[p], element{key, before})
	}
	if after != absent {
		c.add[p] = append(c.add[p], element{key, after})
	}
}

// count adds n to the count of each element of a VIP, and records its value before.
func (b *contents) count(v *desired.VIP, n int, touched map[familySet]map[string]string) {
	for s, elements := range elementsOf(v) {
		p := familySet{set(s), v.Addr.Is4()}
		if len(elements) > 0 && b.wanted[p] == nil {
			b.wanted[p] = map[string]map[string]int{}
		}
		for _, e := range elements {
			if touched[p] == nil {
				touched[p] = map[string]string{}
			}
			if _, ok := touched[p][e.key]; !ok {
				touched[p][e.key] = b.value(p, e.key)
			}
			values := b.wanted[p][e.key]
			if values == nil {
				values = map[string]int{}
				b.wanted[p][e.key] = values
			}
			if values[e.value] += n; values[e.value] == 0 {
				delete(values, e.value)
			}
			if len(values) == 0 {
				delete(b.wanted[p], e.key)
			}
		}
	}
}

// tabulate fills the Maglev tables of the frontends that changed between two versions of a VIP.
func (b *contents) tabulate(had, has *desired.VIP, c changes) {
	gone := map[listener]*desired.Frontend{}
	for i := range had.Frontends {
		f := &had.Frontends[i]
		gone[listener{has.Addr, f.Protocol, f.Port}] = f
	}
	for i := range has.Frontends {
		f := &has.Frontends[i]
		at := listener{has.Addr, f.Protocol, f.Port}
		before, ok := gone[at]
		delete(gone, at)
		if ok && tableSet(before) == tableSet(f) && slices.Equal(before.Backends, f.Backends) {
			continue
		}
		b.replaceTable(at, tableOf(has, f), c)
	}
	for at := range gone {
		b.replaceTable(at, nil, c)
	}
}

// replaceTable replaces the Maglev table of a frontend.
func (b *contents) replaceTable(at listener, with *table, c changes) {
	had := b.tables[at]
	for slot := range slots {
		var before, after element
		var from, to familySet
		if had != nil {
			before, from = had.element(slot), familySet{had.set, at.vip.Is4()}
		}
		if with != nil {
			after, to = with.element(slot), familySet{with.set, at.vip.Is4()}
		}
		if before == after && from == to {
			continue
		}
		if had != nil {
			c.remove[from] = append(c.remove[from], before)
		}
		if with != nil {
			c.add[to] = append(c.add[to], after)
		}
	}
	if with == nil {
		delete(b.tables, at)
	} else {
		b.tables[at] = with
	}
}

// all returns all elements that the sets should hold.
func (b *contents) all() map[familySet]map[string]string {
	all := map[familySet]map[string]string{}
	put := func(p familySet, e element) {
		if all[p] == nil {
			all[p] = map[string]string{}
		}
		all[p][e.key] = e.value
	}
	for p, keys := range b.wanted {
		for key := range keys {
			if v := b.value(p, key); v != absent {
				put(p, element{key, v})
			}
		}
	}
	for p, elements := range b.group {
		for key, value := range elements {
			put(p, element{key, value})
		}
	}
	for at, t := range b.tables {
		for slot := range slots {
			put(familySet{t.set, at.vip.Is4()}, t.element(slot))
		}
	}
	return all
}

// diff returns the writes that turn have into want.
func diff(have, want map[familySet]map[string]string) changes {
	c := newChanges()
	for p, elements := range have {
		for key, value := range elements {
			if v, ok := want[p][key]; !ok || v != value {
				c.remove[p] = append(c.remove[p], element{key, value})
			}
		}
	}
	for p, elements := range want {
		for key, value := range elements {
			if v, ok := have[p][key]; !ok || v != value {
				c.add[p] = append(c.add[p], element{key, value})
			}
		}
	}
	return c
}

// size returns the number of writes.
func (c changes) size() (n int) {
	for _, all := range []map[familySet][]element{c.remove, c.add} {
		for _, elements := range all {
			n += len(elements)
		}
	}
	return n
}

// equal reports whether two VIPs need the same elements. The names of Services do not matter.
func equal(a, b *desired.VIP) bool {
	return a.Announce == b.Announce && a.Return == b.Return && slices.EqualFunc(a.Frontends, b.Frontends, func(f, g desired.Frontend) bool {
		return f.Protocol == g.Protocol && f.Port == g.Port && f.Affinity == g.Affinity &&
			slices.Equal(f.Sources, g.Sources) && slices.Equal(f.Backends, g.Backends)
	})
}
