// Package zone turns a snapshot of the ClusterSet into the records of clusterset.local and answers
// questions from them. It is pure: no network, no clock, no DNS library. Names are presentation format
// in lower case with the final dot; anything a question may hold can be looked up.
//
// The records are those of the Multicluster Service DNS specification, schema 1.0.0
// (https://github.com/kubernetes/enhancements/blob/master/keps/sig-multicluster/1645-multi-cluster-services-api/specification.md).
package zone

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Origin is the name of the zone. The specification fixes it.
const Origin = "clusterset.local."

// SchemaVersion is what the TXT record dns-version says.
const SchemaVersion = "1.0.0"

// ttl is how long clients may keep an answer, positive or negative, in seconds. Five is what CoreDNS
// answers for cluster.local, so both zones age alike.
const ttl = 5

// versionTTL is the specification's TTL of dns-version, in seconds.
const versionTTL = 28800

// Zone is every record of clusterset.local at one moment. It is immutable, so any number of readers
// may share one.
type Zone struct {
	soa Record
	// names holds every name that exists, empty non-terminals (RFC 8020) with no records; records are
	// ordered by type, then by data.
	names map[string][]Record
}

// Problem says why a service has no records. It is the fault of whoever named the service.
type Problem struct {
	Service clusterset.ServiceName
	Reason  string
}

// Build returns the zone that s describes, with the given serial, which must grow from one zone to the
// next (RFC 1982). nameservers are the addresses of ns.dns.clusterset.local. A service that cannot be
// named in DNS is left out and reported; it never costs another service its records. Build keeps
// neither argument.
func Build(s *clusterset.Snapshot, serial uint32, nameservers []netip.Addr) (*Zone, []Problem) {
	z := &Zone{names: make(map[string][]Record, len(s.Services)+8)}
	z.soa = Record{Origin, SOA, ttl, StartOfAuthority{
		Primary: "ns.dns." + Origin,
		Mailbox: "hostmaster." + Origin,
		Serial:  serial,
		Refresh: 7200,
		Retry:   1800,
		Expire:  86400,
		Minimum: ttl, // a service exported a moment ago must not stay unknown for longer (RFC 2308)
	}}
	z.add(Origin, z.soa, Record{Origin, NS, ttl, Target("ns.dns." + Origin)})
	z.add("dns-version."+Origin, Record{"dns-version." + Origin, TXT, versionTTL, Text{SchemaVersion}})
	z.add("ns.dns."+Origin, addressRecords("ns.dns."+Origin, nameservers)...)
	z.add("svc." + Origin)

	var problems []Problem
	for i := range s.Services {
		if reason := z.addService(&s.Services[i]); reason != "" {
			problems = append(problems, Problem{s.Services[i].Service, reason})
		}
	}
	for _, records := range z.names {
		slices.SortFunc(records, Record.compare)
	}
	return z, problems
}

// Same reports whether Build makes the same records of a and b, as it does when no more than endpoints behind a
// ClusterSetIP have changed.
func Same(a, b *clusterset.Snapshot) bool {
	return slices.EqualFunc(a.Services, b.Services, func(s, t clusterset.Service) bool {
		switch {
		case s.Service != t.Service || s.Type != t.Type:
			return false
		case s.Type != clusterset.Headless:
			return slices.Equal(s.IPs, t.IPs)
		default:
			return slices.Equal(readyAddrs(&s), readyAddrs(&t))
		}
	})
}

// addService adds the records of one service, or returns why it has none.
func (z *Zone) addService(s *clusterset.Service) (reason string) {
	for _, label := range []string{s.Service.Name, s.Service.Namespace} {
		if !isLabel(label) {
			return fmt.Sprintf("%q is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'", label)
		}
	}
	namespace := s.Service.Namespace + ".svc." + Origin
	z.add(namespace)
	name := s.Service.Name + "." + namespace
	if s.Type != clusterset.Headless {
		// Without an IP the name exists all the same, so that resolvers hear NODATA, never NXDOMAIN.
		z.add(name, addressRecords(name, s.IPs)...)
		return ""
	}
	// Headless: the ready endpoints of all members. With none ready the name must not exist.
	if ready := readyAddrs(s); len(ready) > 0 {
		z.add(name, addressRecords(name, ready)...)
	}
	return ""
}

// add makes name and all its parents up to the origin exist, and gives name the records.
func (z *Zone) add(name string, records ...Record) {
	z.names[name] = append(z.names[name], records...)
	for name != Origin {
		_, name, _ = strings.Cut(name, ".")
		if _, ok := z.names[name]; ok {
			return
		}
		z.names[name] = nil
	}
}

// readyAddrs returns the addresses of the endpoints of s that may take new traffic.
func readyAddrs(s *clusterset.Service) []netip.Addr {
	var addrs []netip.Addr
	for _, slice := range s.Slices {
		for _, ep := range slice.Endpoints {
			if ep.Ready {
				addrs = append(addrs, ep.Addrs...)
			}
		}
	}
	return addrs
}

// addressRecords returns one A or AAAA record for each distinct address.
func addressRecords(name string, addrs []netip.Addr) []Record {
	var records []Record
	seen := make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		a = a.Unmap().WithZone("")
		if !a.IsValid() || seen[a] {
			continue
		}
		seen[a] = true
		t := AAAA
		if a.Is4() {
			t = A
		}
		records = append(records, Record{name, t, ttl, a})
	}
	return records
}

// isLabel reports whether s can be one lower-case label that needs no escape.
func isLabel(s string) bool {
	if s == "" || len(s) > 63 {
		return false
	}
	for _, c := range []byte(s) {
		if !(c == '-' || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z') {
			return false
		}
	}
	return true
}

// Contains reports whether name, in any case, is the origin or lies below it.
func Contains(name string) bool {
	cut := len(name) - len(Origin)
	if cut < 0 || !strings.EqualFold(name[cut:], Origin) {
		return false
	}
	if cut == 0 {
		return true
	}
	// The character before must be a dot between labels, not an escaped dot inside one.
	before := name[:cut]
	if !strings.HasSuffix(before, ".") {
		return false
	}
	label := strings.TrimSuffix(before, ".")
	backslashes := len(label) - len(strings.TrimRight(label, `\`))
	return backslashes%2 == 0
}

// Answer is what the zone says to one question.
type Answer struct {
	Rcode   Rcode
	Records []Record // of the name that was asked; shared with the zone, not to be changed
	// Authority is the SOA of a negative answer (RFC 2308), nil otherwise.
	Authority *Record
}

// Lookup answers a question of class IN. name is in lower case. It never fails: what the zone does not
// hold has an answer too.
func (z *Zone) Lookup(name string, t Type) Answer {
	if !Contains(name) || t == AXFR || t == IXFR {
		return Answer{Rcode: Refused}
	}
	records, ok := z.names[name]
	if !ok {
		return Answer{Rcode: NameError, Authority: &z.soa}
	}
	if t == ANY {
		// RFC 8482, section 4.2: a name that exists, and nothing to amplify with.
		return Answer{Records: []Record{{name, HINFO, ttl, HostInfo{CPU: "RFC8482"}}}}
	}
	lo, found := slices.BinarySearchFunc(records, t, func(r Record, t Type) int { return cmp.Compare(r.Type, t) })
	if !found {
		return Answer{Authority: &z.soa}
	}
	hi := lo
	for hi < len(records) && records[hi].Type == t {
		hi++
	}
	return Answer{Records: records[lo:hi:hi]}
}

// Serial returns the serial of the zone's SOA.
func (z *Zone) Serial() uint32 { return z.soa.Data.(StartOfAuthority).Serial }

// Len returns how many records the zone holds.
func (z *Zone) Len() int {
	n := 0
	for _, records := range z.names {
		n += len(records)
	}
	return n
}

// String returns all records as lines of a zone file, ordered by name; an empty non-terminal is a
// comment line.
func (z *Zone) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(z.names)) {
		if len(z.names[name]) == 0 {
			fmt.Fprintf(&b, "; %s\n", name)
		}
		for _, r := range z.names[name] {
			fmt.Fprintln(&b, r)
		}
	}
	return b.String()
}
