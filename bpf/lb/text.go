package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Text returns s for people and golden tests: a line for each frontend with its backends, each with the number
// of its slots when that is not one; then a line for each backend and each range, all sorted. Anything that
// should not be, because an update stopped half way, is shown too: a slot that leads nowhere, and slots, Services
// and members that nobody names.
//
//	FE 243.0.0.5:80/TCP id=1 service=demo/hello affinity=3h0m0s backends=[10.1.1.1:8080 10.2.0.7:8080*3]
//	BE id=1 10.1.1.1:8080/TCP cluster=a
//	BE id=2 10.2.0.7:8080/TCP cluster=b draining
//	RANGE 243.0.0.0/8
func (s State) Text() string {
	var out strings.Builder
	slots, services, clusters := map[Slot]bool{}, map[ServiceID]bool{}, map[ClusterIndex]bool{}
	for _, a := range slices.SortedFunc(maps.Keys(s.Frontends), Address.Compare) {
		fe := s.Frontends[a]
		services[fe.Service] = true
		for i := range s.table(fe) {
			slots[Slot{fe.ID, uint32(i)}] = true
		}
		fmt.Fprintf(&out, "FE %s id=%d", a, fe.ID)
		if name, ok := s.Services[fe.Service]; ok {
			fmt.Fprintf(&out, " service=%s", name)
		}
		if fe.Affinity > 0 {
			fmt.Fprintf(&out, " affinity=%s", time.Duration(fe.Affinity)*time.Second)
		}
		if fe.Maglev {
			out.WriteString(" maglev")
		}
		fmt.Fprintf(&out, " backends=[%s]\n", strings.Join(s.shares(fe), " "))
	}
	for _, id := range slices.Sorted(maps.Keys(s.Backends)) {
		be := s.Backends[id]
		clusters[be.Cluster] = true
		fmt.Fprintf(&out, "BE id=%d %s", id, be.Address)
		if c, ok := s.Clusters[be.Cluster]; ok {
			fmt.Fprintf(&out, " cluster=%s", c)
		}
		if be.Draining {
			out.WriteString(" draining")
		}
		out.WriteByte('\n')
	}
	for _, r := range slices.SortedFunc(maps.Keys(s.Ranges), netip.Prefix.Compare) {
		fmt.Fprintf(&out, "RANGE %s\n", r)
	}
	for _, k := range slices.SortedFunc(maps.Keys(s.Slots), Slot.Compare) {
		if !slots[k] {
			fmt.Fprintf(&out, "SLOT frontend=%d slot=%d backend=%d\n", k.Frontend, k.Index, s.Slots[k])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(s.Services)) {
		if !services[id] {
			fmt.Fprintf(&out, "SERVICE id=%d %s\n", id, s.Services[id])
		}
	}
	for _, i := range slices.Sorted(maps.Keys(s.Clusters)) {
		if !clusters[i] {
			fmt.Fprintf(&out, "CLUSTER index=%d %s\n", i, s.Clusters[i])
		}
	}
	return out.String()
}

// shares lists who serves fe, sorted as text, and how many slots lead there.
func (s State) shares(fe Frontend) []string {
	count := map[string]int{}
	for i, be := range s.table(fe) {
		name := be.AddrPort.String()
		if !be.AddrPort.IsValid() {
			name = fmt.Sprintf("nothing-in-slot-%d", i)
		}
		count[name]++
	}
	var shares []string
	for _, name := range slices.Sorted(maps.Keys(count)) {
		if n := count[name]; n > 1 {
			name = fmt.Sprintf("%s*%d", name, n)
		}
		shares = append(shares, name)
	}
	return shares
}
