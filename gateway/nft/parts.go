package nft

import (
	"iter"
	"slices"
)

// perTransaction is the number of writes in one transaction of a large change. The kernel takes some microseconds for each, and commits a
// transaction without a pause.
const perTransaction = 16384

// parts divides a large change into transactions of at most n writes, in an order that leads no packet where the change does not: what
// tables of slots refer to exists before they do, and as long as they do. Both writes of a replaced element are in one of them. Those of
// ranges, which may not overlap, are in the first one, which may therefore be larger. Each comes with whether it is the last one.
func (c changes) parts(n int) iter.Seq2[changes, bool] {
	return func(yield func(changes, bool) bool) {
		if c.size() <= n {
			yield(c, true)
			return
		}
		part, size := newChanges(), 0
		for _, p := range familySets() {
			if p.set == sources {
				part.put(p, c.remove[p], c.add[p])
				size += len(c.remove[p]) + len(c.add[p])
			}
		}
		for e := range c.inOrder() {
			writes := len(e.remove) + len(e.add)
			if size > 0 && size+writes > n {
				if !yield(part, false) {
					return
				}
				part, size = newChanges(), 0
			}
			part.put(e.familySet, e.remove, e.add)
			size += writes
		}
		yield(part, true)
	}
}

// write is what happens to one element: it is added, removed, or replaced.
type write struct {
	familySet
	remove, add []element
}

// inOrder returns all writes but those of ranges: additions before the tables of slots that need them, then removals in the reverse order.
func (c changes) inOrder() iter.Seq[write] {
	var others, tables []familySet
	for _, p := range familySets() {
		switch p.set {
		case sources:
		case maglev, maglevRestricted, maglevAffinity:
			tables = append(tables, p)
		default:
			others = append(others, p)
		}
	}
	return func(yield func(write) bool) {
		gone := map[familySet]map[string]int{} // those that are not replaced, as indices of remove
		for _, p := range slices.Concat(others, tables) {
			gone[p] = make(map[string]int, len(c.remove[p]))
			for i, e := range c.remove[p] {
				gone[p][e.key] = i
			}
			for i, e := range c.add[p] {
				w := write{p, nil, c.add[p][i : i+1]}
				if was, ok := gone[p][e.key]; ok {
					w.remove = c.remove[p][was : was+1]
					delete(gone[p], e.key)
				}
				if !yield(w) {
					return
				}
			}
		}
		for _, p := range slices.Concat(tables, others) {
			for _, i := range gone[p] {
				if !yield(write{p, c.remove[p][i : i+1], nil}) {
					return
				}
			}
		}
	}
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
