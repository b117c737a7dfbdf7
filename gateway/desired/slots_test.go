package desired

import (
	"fmt"
	"slices"
	"testing"
)

// owners returns owner and previous owner of each slot by name, as all gateways of a group must agree on them.
func owners(t *testing.T, count int) (all [SlotCount][2]string) {
	t.Helper()
	var names []string
	for i := range count {
		names = append(names, fmt.Sprint("gateway-", i+1))
	}
	for i, name := range names {
		peers := slices.Concat(names[:i], names[i+1:])
		named := slices.Concat([]string{name}, peers)
		var seen [SlotCount][2]string
		for slot, is := range Slots(name, peers) {
			seen[slot] = [2]string{named[is.Owner], named[is.Previous]}
		}
		if i > 0 && seen != all {
			t.Fatalf("%s has the slots %v, another gateway %v", name, seen, all)
		}
		all = seen
	}
	return all
}

// Each gateway has enough slots. One that joins takes slots from their previous owners, and no other slot moves; read
// backwards, so does one that is removed.
func TestSlots(t *testing.T) {
	t.Parallel()
	if have := Slots("gateway-1", nil); have != nil {
		t.Errorf("a gateway without peers has slots: %v", have)
	}
	before := owners(t, 2)
	for count := 3; count <= 8; count++ {
		now, shares := owners(t, count), map[string]int{}
		joined := fmt.Sprint("gateway-", count)
		for slot, is := range now {
			shares[is[0]]++
			switch {
			case is[0] == joined && is[1] != before[slot][0]:
				t.Errorf("%d gateways: slot %d was %s's, but its previous owner is %s", count, slot, before[slot][0], is[1])
			case is[0] != joined && is[0] != before[slot][0]:
				t.Errorf("%d gateways: slot %d moves from %s to %s", count, slot, before[slot][0], is[0])
			}
		}
		for name, n := range shares {
			if fair := SlotCount / count; n < fair/4 || n > 2*fair {
				t.Errorf("%d gateways: %s has %d slots of a fair share of %d", count, name, n, fair)
			}
		}
		if len(shares) != count {
			t.Errorf("%d gateways: only these have slots: %v", count, shares)
		}
		before = now
	}
}
