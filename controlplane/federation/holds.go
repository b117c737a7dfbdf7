package federation

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// holds are how much of what a member offered vanished and is taken for there nevertheless, by member. Only a process that
// leads learns what vanishes, so each says on the Leases that it has what it holds, and all read it there.
type holds map[clusterset.ClusterID]int

// own returns what this process holds.
func (c *crew) own() holds {
	h := holds{}
	for _, p := range c.parts {
		if g, ok := p.(reconcile.Guarded); ok {
			for _, hold := range g.Holds() {
				h[hold.Source] += hold.Count
			}
		}
	}
	return h
}

// everybodys returns what any leader holds: of several the most, for they hold the same.
func (c *crew) everybodys(sites []*site) holds {
	all, own := holds{}, c.own()
	for _, s := range sites {
		h := own
		if holder, _ := s.candidate.Seen(); holder != c.cfg.identity {
			h = parseHolds(s.candidate.Said())
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

// parseHolds reads what String wrote. Anything else is nothing.
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
