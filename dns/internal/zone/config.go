package zone

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// SchemaVersion is the version of the DNS specification that the zone implements.
const SchemaVersion = "1.0.0"

// versionTTL is the TTL of dns-version.clusterset.local in seconds, as the specification asks.
const versionTTL = 28800

// DefaultTTL is the TTL of all other records, in seconds.
const DefaultTTL = 5

// Config holds everything besides the snapshot that determines the contents of a zone. Fields that dns.Config also has
// mean the same there.
type Config struct {
	Nameservers   []netip.Addr // addresses of ns.dns.clusterset.local
	TTL           uint32       // seconds; 0 means 0, not a default
	EmptyHeadless bool         // keep the name of a headless Service while no endpoint is ready
	ClusterScoped bool         // add <cluster>.<service>.<namespace>, its ports, and port names without underscores
	Reverse       []netip.Prefix
	// Local is the member that this node belongs to. Names of Services without a ClusterSetIP prefer its endpoints.
	Local clusterset.ClusterID
	// Drained members are left out of names that stand for several clusters.
	Drained map[clusterset.ClusterID]bool
}

func (c Config) equal(o Config) bool {
	return slices.Equal(c.Nameservers, o.Nameservers) && c.TTL == o.TTL && c.EmptyHeadless == o.EmptyHeadless &&
		c.ClusterScoped == o.ClusterScoped && slices.Equal(c.Reverse, o.Reverse) && c.Local == o.Local && sameSet(c.Drained, o.Drained)
}

func sameSet(a, b map[clusterset.ClusterID]bool) bool {
	for _, m := range []map[clusterset.ClusterID]bool{a, b} {
		for id := range m {
			if a[id] != b[id] {
				return false
			}
		}
	}
	return true
}

// apexes returns the apex of clusterset.local and one for each reverse range.
func (c Config) apexes(serial uint32) []apex {
	ns := under(origin, "ns", "dns")
	soa := string(appendRecord(nil, SOA, c.TTL, soaData(ns, under(origin, "hostmaster"), serial, c.TTL)))
	all := []apex{newApex(origin, soa)}
	for _, p := range c.Reverse {
		all = append(all, newApex(reverseName(p), soa))
	}
	return all
}

func newApex(name, soa string) apex {
	a := apex{name: name, soa: soa}
	for _, family := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		full := reverseName(netip.PrefixFrom(family, family.BitLen()))
		if strings.HasSuffix(name, reverseName(netip.PrefixFrom(family, 0))) {
			a.labels = labelsOf(full)
		}
	}
	return a
}

// fixedEntries returns the names that every zone has, whatever the snapshot holds.
func (c Config) fixedEntries() []entry {
	b := recordBuilder{ttl: c.TTL}
	ns := under(origin, "ns", "dns")
	b.add(origin, NS, ns)
	b.addName(parent(ns))
	b.addName(ns)
	for _, a := range c.Nameservers {
		b.addAddress(ns, a)
	}
	b.addName(svcName)
	for _, p := range c.Reverse {
		b.add(reverseName(p), NS, ns)
	}
	version := recordBuilder{ttl: versionTTL}
	version.add(under(origin, "dns-version"), TXT, textsData(SchemaVersion))
	return append(b.entries(), version.entries()...)
}
