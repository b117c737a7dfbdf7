package lb

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Text returns s for people and golden tests: a line for each frontend with its backends, then a line
// for each backend, both sorted. Anything that should not be, because an update stopped half way, is
// shown too: a slot that leads nowhere, and slots no frontend names.
//
//	FE 243.0.0.5:80/TCP id=1 backends=[10.1.1.1:8080 10.2.0.7:8080]
//	BE id=1 10.1.1.1:8080/TCP
func (s State) Text() string {
	var out strings.Builder
	named := map[Slot]bool{}
	for _, a := range slices.SortedFunc(maps.Keys(s.Frontends), Address.Compare) {
		fe := s.Frontends[a]
		table := s.table(fe)
		backends := make([]string, len(table))
		for i, be := range table {
			named[Slot{fe.ID, uint32(i)}] = true
			backends[i] = be.AddrPort.String()
			if !be.AddrPort.IsValid() {
				backends[i] = fmt.Sprintf("nothing-in-slot-%d", i)
			}
		}
		slices.SortStableFunc(backends, func(a, b string) int { return strings.Compare(a, b) })
		fmt.Fprintf(&out, "FE %s id=%d backends=[%s]\n", a, fe.ID, strings.Join(backends, " "))
	}
	for _, id := range slices.Sorted(maps.Keys(s.Backends)) {
		fmt.Fprintf(&out, "BE id=%d %s\n", id, s.Backends[id].Address)
	}
	for _, k := range slices.SortedFunc(maps.Keys(s.Slots), Slot.Compare) {
		if !named[k] {
			fmt.Fprintf(&out, "SLOT frontend=%d slot=%d backend=%d\n", k.Frontend, k.Index, s.Slots[k])
		}
	}
	return out.String()
}
