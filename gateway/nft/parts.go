package nft

import "slices"

// perTransaction is the number of writes in one transaction of a large change. The kernel takes some microseconds for each, and commits a
// transaction without a pause.
const perTransaction = 16384

// parts divides a large change into transactions of at most n writes, in an order that leads no packet where the change does not: what
// tables of slots refer to exists before they do, and as long as they do. Both writes of a replaced element are in one of them. Those of
// ranges, which may not overlap, are in the first one, which may therefore be larger.
func (c changes) parts(n int) []changes {
	if c.size() <= n {
		return []changes{c}
	}
	all := []changes{newChanges()}
	size := 0
	last := func(writes int) changes {
		if size > 0 && size+writes > n {
			all, size = append(all, newChanges()), 0
		}
		size += writes
		return all[len(all)-1]
	}
	var others, tables []familySet
	for _, p := range familySets() {
		switch p.set {
		case sources:
			all[0].put(p, c.remove[p], c.add[p])
			size += len(c.remove[p]) + len(c.add[p])
		case maglev, maglevRestricted, maglevAffinity:
			tables = append(tables, p)
		default:
			others = append(others, p)
		}
	}
	removed := map[familySet]map[string]element{}
	for _, p := range slices.Concat(others, tables) {
		removed[p] = make(map[string]element, len(c.remove[p]))
		for _, e := range c.remove[p] {
			removed[p][e.key] = e
		}
		for _, e := range c.add[p] {
			var before []element
			if was, ok := removed[p][e.key]; ok {
				before = []element{was}
				delete(removed[p], e.key)
			}
			last(1+len(before)).put(p, before, []element{e})
		}
	}
	for _, p := range slices.Concat(tables, others) {
		for _, e := range removed[p] {
			last(1).put(p, []element{e}, nil)
		}
	}
	return all
}

// put adds writes of a set.
func (c changes) put(p familySet, remove, add []element) {
	if len(remove) > 0 {
		c.remove[p] = append(c.remove[p], remove...)
	}
	if len(add) > 0 {
		c.add[p] = append(c.add[p], add...)
	}
}
