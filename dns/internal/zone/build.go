package zone

import (
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Problem is a Service, or a part of one, that cannot have a DNS name.
type Problem struct {
	Service clusterset.ServiceName
	Reason  string
}

// Builder makes each Zone from the previous one. Only one goroutine may use it.
type Builder struct {
	config   Config
	snapshot *clusterset.Snapshot // of the last Build; nil before the first
	zone     *Zone
	changes  map[string]entry // by key, of the last Build until taken; "" for removed names
	problems map[clusterset.ServiceName][]string
}

// Build returns the zone of s and reports whether its contents differ from the zone that the last Build returned. If
// they do not, it returns that zone itself. The serial of a new zone is the given one, or the last serial plus one if
// the given one is not greater.
//
// Build keeps s, which must not change afterwards.
func (b *Builder) Build(s *clusterset.Snapshot, c Config, serial uint32) (*Zone, bool) {
	changes := map[string]entry{}
	if b.snapshot == nil || !b.config.equal(c) {
		b.reset(c, changes)
	}
	first := b.snapshot == nil
	var have []clusterset.Service
	if !first {
		have = b.snapshot.Services
	}
	b.diff(have, s.Services, changes)
	b.snapshot, b.changes = s, changes
	if len(changes) == 0 && !first {
		return b.zone, false
	}
	next := b.zone.apply(changes)
	next.serial = max(serial, b.serial()+1)
	next.apexes = c.apexes(next.serial)
	b.zone = next
	return next, true
}

// reset empties the zone, keeps its serial, and adds to changes that all old names are removed and the fixed ones added.
func (b *Builder) reset(c Config, changes map[string]entry) {
	if b.zone != nil {
		for e := range b.zone.entries() {
			changes[e.key()] = ""
		}
	}
	*b = Builder{config: c, zone: &Zone{shards: make([]shard, 1<<shardBits), serial: b.serial()}, problems: map[clusterset.ServiceName][]string{}}
	for _, e := range c.fixedEntries() {
		changes[e.key()] = e
	}
}

func (b *Builder) serial() uint32 {
	if b.zone == nil {
		return 0
	}
	return b.zone.serial
}

// TakeAddresses returns the names that the last Build added, changed or removed, in wire format, each with its IPv4 and
// IPv6 address. After the first Build that is every name. An address is valid only if it is the name's only one of its
// family. Both are invalid if the name has several of either family, or none. A second call returns nothing.
func (b *Builder) TakeAddresses() iter.Seq2[string, [2]netip.Addr] {
	changes := b.changes
	b.changes = nil
	return func(yield func(string, [2]netip.Addr) bool) {
		for key, e := range changes {
			if name := nameOf(key); strings.HasSuffix(name, origin) && !yield(name, e.addresses()) {
				return
			}
		}
	}
}

// Problems returns the Services that have no DNS name, or not all of theirs, sorted by Service and reason.
func (b *Builder) Problems() []Problem {
	var all []Problem
	for name, reasons := range b.problems {
		for _, r := range reasons {
			all = append(all, Problem{name, r})
		}
	}
	slices.SortFunc(all, func(a, b Problem) int {
		if c := a.Service.Compare(b.Service); c != 0 {
			return c
		}
		return strings.Compare(a.Reason, b.Reason)
	})
	return all
}

// diff adds to changes every entry that differs between two lists of Services, both sorted by name.
func (b *Builder) diff(have, want []clusterset.Service, changes map[string]entry) {
	namespaces := map[string]bool{} // of added and removed Services
	for old, next := range pairs(have, want) {
		switch {
		case old == nil:
			namespaces[next.Service.Namespace] = true
			b.add(next, changes)
		case next == nil:
			namespaces[old.Service.Namespace] = true
			b.remove(old, changes)
		case !b.sameRecords(old, next):
			removed := b.remove(old, changes)
			b.add(next, changes)
			for _, e := range removed {
				if changes[e.key()] == e { // removed and added again
					delete(changes, e.key())
				}
			}
		}
	}
	for ns := range namespaces {
		diffNamespace(ns, hasNamespace(have, ns), hasNamespace(want, ns), changes)
	}
}

// pairs merges two sorted lists of Services by name. The Service is nil on the side that lacks the name.
func pairs(have, want []clusterset.Service) iter.Seq2[*clusterset.Service, *clusterset.Service] {
	return func(yield func(old, next *clusterset.Service) bool) {
		for len(have) > 0 || len(want) > 0 {
			var old, next *clusterset.Service
			var order int
			switch {
			case len(have) == 0:
				order = 1
			case len(want) == 0:
				order = -1
			default:
				order = have[0].Service.Compare(want[0].Service)
			}
			if order <= 0 {
				old, have = &have[0], have[1:]
			}
			if order >= 0 {
				next, want = &want[0], want[1:]
			}
			if !yield(old, next) {
				return
			}
		}
	}
}

// add adds the entries of s to changes and remembers its problems.
func (b *Builder) add(s *clusterset.Service, changes map[string]entry) {
	entries, problems := b.config.serviceEntries(s)
	for _, e := range entries {
		changes[e.key()] = e
	}
	if len(problems) > 0 {
		b.problems[s.Service] = problems
	}
}

// remove adds to changes that the entries of s are removed, and returns these. A name that changes already holds stays:
// if ClusterSetIP 243.0.0.1 moves from Service b to Service a, a has claimed its PTR name before b is removed.
func (b *Builder) remove(s *clusterset.Service, changes map[string]entry) []entry {
	delete(b.problems, s.Service)
	entries, _ := b.config.serviceEntries(s)
	for _, e := range entries {
		if _, ok := changes[e.key()]; !ok {
			changes[e.key()] = ""
		}
	}
	return entries
}

// diffNamespace adds the name of a namespace to changes if it gained its first Service or lost its last one.
func diffNamespace(namespace string, have, want bool, changes map[string]entry) {
	if !isLabel(namespace) || have == want {
		return
	}
	name := under(svcName, namespace)
	changes[keyOf(name)] = ""
	if want {
		changes[keyOf(name)] = entryOf(name)
	}
}

// hasNamespace reports whether any of services, which are sorted, is in a namespace.
func hasNamespace(services []clusterset.Service, namespace string) bool {
	i, _ := slices.BinarySearchFunc(services, namespace, func(s clusterset.Service, ns string) int { return strings.Compare(s.Service.Namespace, ns) })
	return i < len(services) && services[i].Service.Namespace == namespace
}

// sameRecords reports whether two states of a Service certainly have the same records. It may miss that they do.
func (b *Builder) sameRecords(old, next *clusterset.Service) bool {
	return old.Type == next.Type && old.UseIP == next.UseIP && equal(old.IPs, next.IPs) && equal(old.Ports, next.Ports) && equal(old.Clusters, next.Clusters) &&
		(!b.config.usesSlices(old) && !b.config.usesSlices(next) || sameSlices(old.Slices, next.Slices))
}

// equal is slices.Equal without reading memory that a and b share. Successive snapshots share what has not changed, and
// cache misses are most of the cost of an update.
func equal[T comparable](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

func sameSlices(a, b []clusterset.Slice) bool {
	if len(a) == 0 || len(b) == 0 || &a[0] == &b[0] {
		return len(a) == len(b) // successive snapshots share unchanged slices
	}
	return slices.EqualFunc(a, b, func(a, b clusterset.Slice) bool {
		return a.Cluster == b.Cluster && slices.Equal(a.Ports, b.Ports) && slices.EqualFunc(a.Endpoints, b.Endpoints, func(a, b clusterset.Endpoint) bool {
			return a.Ready == b.Ready && a.Hostname == b.Hostname && a.Pod == b.Pod && slices.Equal(a.Addrs, b.Addrs)
		})
	})
}

// usesSlices reports whether records of a Service come from its endpoints, and not all from its ClusterSetIPs.
func (c Config) usesSlices(s *clusterset.Service) bool {
	return c.ClusterScoped || s.Type == clusterset.Headless || s.UseIP == clusterset.Disabled
}
