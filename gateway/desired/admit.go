package desired

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Limits of one Service, over all its addresses and ports, and of a state, in bytes of JSON as estimated by sizes.
const (
	MaxBackends = 32768
	MaxSources  = 65536
	MaxSize     = 15 << 20
)

// Admit returns as much of s as can be served, and the faults of the rest. A fault without Services is one of the whole
// state, of which nothing can be served. Other faults cost only their Services: there is one for each, and it stays as it
// is in have, the state served now; see Without. have may be nil.
func (s *State) Admit(have *State) (State, Faults) {
	faults, broken := s.validate(have)
	if len(faults) == 0 {
		return *s, nil
	}
	// A VIP without Services is left out, and nobody misses it.
	if whole := slices.DeleteFunc(slices.Clone(faults), func(f Fault) bool { return f.Services != nil }); len(whole) > 0 {
		return State{}, whole
	}
	faults = faults.ByService()
	rest := *s
	rest.VIPs = nil
	for i := range s.VIPs {
		if !broken[i] {
			rest.VIPs = append(rest.VIPs, s.VIPs[i])
		}
	}
	return rest.Without(faults, have), faults
}

// ByService returns one fault for each Service that faults name, by Service.
func (f Faults) ByService() (all Faults) {
	more := map[string]int{}
	for _, fault := range f {
		for _, service := range fault.Services {
			if more[service]++; more[service] == 1 {
				fault.Services = []string{service}
				all = append(all, fault)
			}
		}
	}
	for i := range all {
		if n := more[all[i].Services[0]] - 1; n > 0 {
			all[i].Message += fmt.Sprintf("; and %d more faults", n)
		}
	}
	slices.SortFunc(all, func(a, b Fault) int { return strings.Compare(a.Services[0], b.Services[0]) })
	return all
}

// Without returns s with the Services of faults as they are in have, or without them if have is nil or lacks them. They keep
// no address that s does not give them, and no port that another Service has in s.
func (s *State) Without(faults Faults, have *State) State {
	out := map[string]bool{}
	for _, f := range faults {
		for _, service := range f.Services {
			out[service] = true
		}
	}
	had := map[netip.Addr]*VIP{}
	if have != nil {
		for i := range have.VIPs {
			had[have.VIPs[i].Addr] = &have.VIPs[i]
		}
	}
	rest := *s
	rest.VIPs = make([]VIP, 0, len(s.VIPs))
	for i := range s.VIPs {
		v := s.VIPs[i]
		if v.replace(out, had[v.Addr]); len(v.Frontends) > 0 || len(s.VIPs[i].Frontends) == 0 {
			rest.VIPs = append(rest.VIPs, v)
		}
	}
	return rest
}

// replace replaces the frontends of the Services in out by those of an earlier version of the VIP, nil for none.
func (v *VIP) replace(out map[string]bool, by *VIP) {
	replaced, taken := map[string]bool{}, map[l4]bool{}
	for i := range v.Frontends {
		f := &v.Frontends[i]
		if out[f.Service] {
			replaced[f.Service] = true
		} else {
			taken[f.l4()] = true
		}
	}
	if len(replaced) == 0 {
		return
	}
	v.Frontends = slices.DeleteFunc(slices.Clone(v.Frontends), func(f Frontend) bool { return out[f.Service] })
	if by == nil {
		return
	}
	for _, f := range by.Frontends {
		if replaced[f.Service] && !taken[f.l4()] {
			v.Frontends = append(v.Frontends, f)
		}
	}
	slices.SortFunc(v.Frontends, func(a, b Frontend) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol))
	})
}

// l4 identifies a frontend of a VIP.
type l4 struct {
	protocol string
	port     uint16
}

func (f *Frontend) l4() l4 { return l4{f.Protocol, f.Port} }

func (f *Frontend) services() []string { return []string{f.Service} }

// Services returns the Services of a VIP, sorted, never nil.
func (v *VIP) Services() []string {
	all := map[string]bool{}
	for i := range v.Frontends {
		all[v.Frontends[i].Service] = true
	}
	services := slices.AppendSeq([]string{}, maps.Keys(all))
	slices.Sort(services)
	return services
}

// Has reports whether a Service has a frontend.
func (s *State) Has(service string) bool {
	return slices.ContainsFunc(s.VIPs, func(v VIP) bool {
		return slices.ContainsFunc(v.Frontends, func(f Frontend) bool { return f.Service == service })
	})
}

// owner returns the Service that has a port of a VIP, "" for none.
func (s *State) owner(vip netip.Addr, at l4) string {
	if s == nil {
		return ""
	}
	for i := range s.VIPs {
		if s.VIPs[i].Addr != vip {
			continue
		}
		for j := range s.VIPs[i].Frontends {
			if f := &s.VIPs[i].Frontends[j]; f.l4() == at {
				return f.Service
			}
		}
	}
	return ""
}

// size is how large a Service is in a state.
type size struct{ backends, sources, bytes int }

// sizes checks the limits. If a state is too large as a whole, its largest Services do not fit: whoever asks for little is
// served, whatever others ask for.
func (v *validator) sizes(s *State) {
	sizes, total := map[string]size{}, 0
	for i := range s.VIPs {
		perBackend, perSource := 96, 48 // the longest JSON
		if s.VIPs[i].Addr.Is4() {
			perBackend, perSource = 72, 24
		}
		for j := range s.VIPs[i].Frontends {
			f := &s.VIPs[i].Frontends[j]
			is := sizes[f.Service]
			bytes := 224 + len(f.Service) + perBackend*len(f.Backends) + perSource*len(f.Sources)
			sizes[f.Service] = size{is.backends + len(f.Backends), is.sources + len(f.Sources), is.bytes + bytes}
			total += bytes
		}
	}
	refuse := func(service, format string, args ...any) {
		v.faults = append(v.faults, Fault{Component: ComponentRequest, Services: []string{service}, Message: fmt.Sprintf(format, args...)})
		total -= sizes[service].bytes
	}
	for service, is := range sizes {
		switch {
		case is.backends > MaxBackends:
			refuse(service, "has %d backends, over all ports; %d are possible", is.backends, MaxBackends)
		case is.sources > MaxSources:
			refuse(service, "has %d source ranges, over all ports; %d are possible", is.sources, MaxSources)
		default:
			continue
		}
		delete(sizes, service)
	}
	if total <= MaxSize {
		return
	}
	largest := slices.SortedFunc(maps.Keys(sizes), func(a, b string) int {
		return cmp.Or(cmp.Compare(sizes[b].bytes, sizes[a].bytes), strings.Compare(a, b))
	})
	for _, service := range largest {
		if total <= MaxSize {
			return
		}
		refuse(service, "the Services of the group need more than %d MiB, and this is one of the largest: use another group of gateways for it", MaxSize>>20)
	}
}
