package lb

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Text returns s for people and golden tests: a line for each frontend with its backends, each with the number
// of its slots unless that is one; then a line for each backend and for each entry of the derived tables, all sorted.
// Leftovers of a half-finished update are shown too: a slot without a backend, and slots, Services and members that no
// other entry refers to.
//
//	FE 243.0.0.5:80/TCP id=1 service=demo/hello affinity=3h0m0s backends=[10.1.1.1:8080 10.2.0.7:8080*3]
//	BE id=1 10.1.1.1:8080/TCP cluster=a
//	BE id=2 10.2.0.7:8080/TCP cluster=b draining
//	RANGE 243.0.0.0/8
func (s State) Text() string {
	var out strings.Builder
	for _, a := range slices.SortedFunc(maps.Keys(s.Frontends), Address.Compare) {
		out.WriteString(s.frontendText(a) + "\n")
	}
	for _, id := range slices.Sorted(maps.Keys(s.Backends)) {
		out.WriteString(s.backendText(id) + "\n")
	}
	for _, t := range tables() {
		for _, line := range t.lines(&s) {
			out.WriteString(line + "\n")
		}
	}
	s.writeUnused(&out)
	return out.String()
}

func (s State) frontendText(a Address) string {
	fe := s.Frontends[a]
	text := fmt.Sprintf("FE %s id=%d", a, fe.ID)
	if name, ok := s.Services[fe.Service]; ok {
		text += fmt.Sprintf(" service=%s", name)
	}
	if fe.Affinity > 0 {
		text += fmt.Sprintf(" affinity=%s", time.Duration(fe.Affinity)*time.Second)
	}
	if fe.Maglev {
		text += " maglev"
	}
	return text + fmt.Sprintf(" backends=[%s]", strings.Join(s.shares(fe), " "))
}

func (s State) backendText(id BackendID) string {
	be := s.Backends[id]
	text := fmt.Sprintf("BE id=%d %s", id, be.Address)
	if c, ok := s.Clusters[be.Cluster]; ok {
		text += fmt.Sprintf(" cluster=%s", c)
	}
	if be.Draining {
		text += " draining"
	}
	return text
}

// writeUnused lists the slots, Services and members that no frontend or backend refers to.
func (s State) writeUnused(out *strings.Builder) {
	slots, services, clusters := map[Slot]bool{}, map[ServiceID]bool{}, map[ClusterIndex]bool{}
	for _, fe := range s.Frontends {
		services[fe.Service] = true
		for i := range s.slotTable(fe) {
			slots[Slot{fe.ID, uint32(i)}] = true
		}
	}
	for _, be := range s.Backends {
		clusters[be.Cluster] = true
	}
	for _, k := range slices.SortedFunc(maps.Keys(s.Slots), Slot.Compare) {
		if !slots[k] {
			fmt.Fprintf(out, "SLOT frontend=%d slot=%d backend=%d\n", k.Frontend, k.Index, s.Slots[k])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(s.Services)) {
		if !services[id] {
			fmt.Fprintf(out, "SERVICE id=%d %s\n", id, s.Services[id])
		}
	}
	for _, i := range slices.Sorted(maps.Keys(s.Clusters)) {
		if !clusters[i] {
			fmt.Fprintf(out, "CLUSTER index=%d %s\n", i, s.Clusters[i])
		}
	}
}

// shares lists the backends of fe, sorted as text, each with the number of its slots.
func (s State) shares(fe Frontend) []string {
	count := map[string]int{}
	for i, be := range s.slotTable(fe) {
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
