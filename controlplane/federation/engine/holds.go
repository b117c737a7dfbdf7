package engine

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// holds counts the withdrawals that are held back, by member. Only a leader notices withdrawals, so each leader publishes
// its holds on its Leases, and every supervisor reads them there.
type holds map[clusterset.ClusterID]int

// ownHolds returns the holds of this process.
func (e *Engine) ownHolds() holds {
	h := holds{}
	for _, r := range e.cfg.Reconcilers {
		if g, ok := r.(reconcile.Guarded); ok {
			for _, hold := range g.Holds() {
				h[hold.Source] += hold.Count
			}
		}
	}
	return h
}

// allHolds returns the holds of all leaders. Leaders hold back the same withdrawals, so the highest count is taken.
func (e *Engine) allHolds(members []*managedMember) holds {
	all, own := holds{}, e.ownHolds()
	for _, m := range members {
		h := own
		if holder, _ := m.candidate.Seen(); holder != e.cfg.Identity {
			h = parseHolds(m.candidate.Said())
		}
		for id, n := range h {
			all[id] = max(all[id], n)
		}
	}
	return all
}

// String returns "ID=NUMBER ID=NUMBER", sorted.
func (h holds) String() string {
	var texts []string
	for _, id := range slices.Sorted(maps.Keys(h)) {
		texts = append(texts, fmt.Sprintf("%s=%d", id, h[id]))
	}
	return strings.Join(texts, " ")
}

// parseHolds parses the text of String, and ignores words of any other form.
func parseHolds(text string) holds {
	h := holds{}
	for word := range strings.FieldsSeq(text) {
		id, number, _ := strings.Cut(word, "=")
		if n, err := strconv.Atoi(number); err == nil && n > 0 {
			h[clusterset.ClusterID(id)] = n
		}
	}
	return h
}
