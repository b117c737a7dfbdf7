package zone

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// SchemaVersion is the version of the specification that names and records follow.
const SchemaVersion = "1.0.0"

// versionTTL is how long that may be remembered, in seconds, as the specification says.
const versionTTL = 28800

// DefaultTTL is that of all other records, in seconds.
const DefaultTTL = 5

// Config is what a zone is besides its snapshot. Its fields are those of dns.Config of the same names.
type Config struct {
	Nameservers   []netip.Addr // of ns.dns.clusterset.local
	TTL           uint32       // seconds, as it is: 0 is 0
	EmptyHeadless bool         // the name of a headless Service exists also while no endpoint is ready
	ClusterScoped bool         // <cluster>.<service>.<namespace> and its ports have records, and ports without underscores
	Reverse       []netip.Prefix
	// Local is the member we are in, preferred by the names of Services without a ClusterSetIP while it serves.
	Local clusterset.ClusterID
	// Drained members are left out of what has more than one.
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

// Problem is a Service, or a part of one, that has no name in DNS.
type Problem struct {
	Service clusterset.ServiceName
	Reason  string
}

// Builder makes each Zone from the one before. It is for one goroutine.
type Builder struct {
	config   Config
	snapshot *clusterset.Snapshot // nil: nothing built yet
	zone     *Zone
	changes  map[string]entry // of the last Build by key, "" for names that went; until they are taken
	problems map[clusterset.ServiceName][]string
}

// Build returns the zone of s, and whether it holds anything else than the last one that Build returned, which it is
// itself when not. Its serial is the given one, or the last one's successor when that is not smaller.
//
// Build keeps s, which nobody may change.
func (b *Builder) Build(s *clusterset.Snapshot, c Config, serial uint32) (*Zone, bool) {
	changes := map[string]entry{}
	if b.snapshot == nil || !b.config.equal(c) {
		if b.zone != nil {
			for e := range b.zone.entries() {
				changes[e.key()] = ""
			}
		}
		*b = Builder{config: c, zone: &Zone{shards: make([]shard, 1<<shardBits), serial: b.serial()}, problems: map[clusterset.ServiceName][]string{}}
		for _, e := range c.fixed() {
			changes[e.key()] = e
		}
	}
	fresh := b.snapshot == nil
	var before []clusterset.Service
	if !fresh {
		before = b.snapshot.Services
	}
	b.compare(before, s.Services, changes)
	b.snapshot, b.changes = s, changes
	if len(changes) == 0 && !fresh {
		return b.zone, false
	}
	next := b.zone.with(changes)
	next.serial = max(serial, b.serial()+1)
	next.apexes = c.apexes(next.serial)
	b.zone = next
	return next, true
}

func (b *Builder) serial() uint32 {
	if b.zone == nil {
		return 0
	}
	return b.zone.serial
}

// TakeAddresses returns the names that the last Build made, changed or took away, as on the wire, and beside each its
// IPv4 and its IPv6 address, and keeps them no longer: after the first Build they are all. Only those are valid that are
// all of the family that the name has; both are not where the name has more than one of a family, or none at all.
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

// Problems returns what has no name, sorted.
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

// compare adds to changes what differs between two lists of Services, both sorted.
func (b *Builder) compare(before, after []clusterset.Service, changes map[string]entry) {
	wereThere, areThere := before, after
	namespaces := map[string]bool{} // of Services that came or went
	for len(before) > 0 || len(after) > 0 {
		var was, is *clusterset.Service
		var order int
		switch {
		case len(before) == 0:
			order = 1
		case len(after) == 0:
			order = -1
		default:
			order = before[0].Service.Compare(after[0].Service)
		}
		if order <= 0 {
			was, before = &before[0], before[1:]
		}
		if order >= 0 {
			is, after = &after[0], after[1:]
		}
		if order == 0 && same(was, is) {
			continue
		}
		if order < 0 {
			namespaces[was.Service.Namespace] = true
		} else if order > 0 {
			namespaces[is.Service.Namespace] = true
		}
		var old []entry
		if was != nil {
			delete(b.problems, was.Service)
			old, _ = b.config.service(was)
			for _, e := range old {
				if _, ok := changes[e.key()]; !ok { // an address, and so its name, may have gone to another Service
					changes[e.key()] = ""
				}
			}
		}
		if is != nil {
			entries, reasons := b.config.service(is)
			for _, e := range entries {
				changes[e.key()] = e
			}
			if len(reasons) > 0 {
				b.problems[is.Service] = reasons
			}
		}
		if order == 0 {
			for _, e := range old {
				if changes[e.key()] == e { // it stays as it is
					delete(changes, e.key())
				}
			}
		}
	}
	for ns := range namespaces {
		is := hasNamespace(areThere, ns)
		if !isLabel(ns) || is == hasNamespace(wereThere, ns) {
			continue
		}
		name := under(svcName, ns)
		changes[keyOf(name)] = ""
		if is {
			changes[keyOf(name)] = entryOf(name)
		}
	}
}

// hasNamespace reports whether any of services, which are sorted, is of a namespace.
func hasNamespace(services []clusterset.Service, namespace string) bool {
	i, _ := slices.BinarySearchFunc(services, namespace, func(s clusterset.Service, ns string) int { return strings.Compare(s.Service.Namespace, ns) })
	return i < len(services) && services[i].Service.Namespace == namespace
}

// same reports whether two states of a Service surely have the same records.
func same(a, b *clusterset.Service) bool {
	return a.Type == b.Type && a.UseIP == b.UseIP && equal(a.IPs, b.IPs) && equal(a.Ports, b.Ports) && equal(a.Clusters, b.Clusters) && (!isServedBySlices(a) && !isServedBySlices(b) || sameSlices(a.Slices, b.Slices))
}

// equal is slices.Equal, without a look at what both share: a snapshot does so with the one before, and most of the time
// of a change goes by waiting for memory.
func equal[T comparable](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

func sameSlices(a, b []clusterset.Slice) bool {
	if len(a) == 0 || len(b) == 0 || &a[0] == &b[0] {
		return len(a) == len(b) // a snapshot shares with the one before what has not changed
	}
	return slices.EqualFunc(a, b, func(a, b clusterset.Slice) bool {
		return a.Cluster == b.Cluster && slices.Equal(a.Ports, b.Ports) && slices.EqualFunc(a.Endpoints, b.Endpoints, func(a, b clusterset.Endpoint) bool {
			return a.Ready == b.Ready && a.Hostname == b.Hostname && a.Pod == b.Pod && slices.Equal(a.Addrs, b.Addrs)
		})
	})
}

// isServedBySlices reports whether a Service's endpoints have records, not its ClusterSetIP.
func isServedBySlices(s *clusterset.Service) bool {
	return s.Type == clusterset.Headless || s.UseIP == clusterset.Disabled
}

// apexes are the tops of all that we know all of.
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

// fixed are the names that every zone has.
func (c Config) fixed() []entry {
	s := sheet{ttl: c.TTL}
	ns := under(origin, "ns", "dns")
	s.add(origin, NS, ns)
	s.exist(parent(ns))
	s.exist(ns)
	for _, a := range c.Nameservers {
		t, data := addressData(a)
		s.add(ns, t, data)
	}
	s.exist(svcName)
	for _, p := range c.Reverse {
		s.add(reverseName(p), NS, ns)
	}
	version := sheet{ttl: versionTTL}
	version.add(under(origin, "dns-version"), TXT, textsData(SchemaVersion))
	return append(s.entries(), version.entries()...)
}

// service returns the names of one Service with their records, and what of it has none.
func (c Config) service(s *clusterset.Service) (entries []entry, problems []string) {
	for _, label := range []string{s.Service.Name, s.Service.Namespace} {
		if !isLabel(label) {
			return nil, []string{fmt.Sprintf("%q is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'", label)}
		}
	}
	p := page{sheet: sheet{ttl: c.TTL}, Config: c, name: under(svcName, s.Service.Name, s.Service.Namespace), of: s}
	switch {
	case s.Type == clusterset.Headless:
		p.headless()
	case s.UseIP == clusterset.Disabled:
		p.byCluster()
	default:
		p.clusterSetIP()
	}
	return p.entries(), p.problems
}

// page is the sheet of one Service.
type page struct {
	sheet
	Config
	name     string
	of       *clusterset.Service
	problems []string
}

// clusterSetIP writes the names of a Service with a VIP. Without one the name exists all the same, so that resolvers
// hear NODATA and never NXDOMAIN.
func (p *page) clusterSetIP() {
	p.exist(p.name)
	for _, ip := range p.of.IPs {
		ip = ip.Unmap()
		t, data := addressData(ip)
		p.add(p.name, t, data)
		for _, r := range p.Reverse {
			if r.Contains(ip) {
				p.add(reverseName(netip.PrefixFrom(ip, ip.BitLen())), PTR, p.name)
			}
		}
	}
	p.ports(p.name, p.name, p.of.Ports)
	if p.ClusterScoped {
		for _, id := range p.of.Clusters {
			if name, ok := p.below(string(id)); ok {
				for _, ip := range p.of.IPs {
					t, data := addressData(ip)
					p.add(name, t, data)
				}
				p.ports(name, name, p.of.Ports)
			}
		}
	}
}

// ports writes the SRV records at name of a target that listens on ports: all at the name itself, as the conformance
// suite asks, and each under its own name.
func (p *page) ports(name, target string, ports []clusterset.Port) {
	numbers := map[uint16]bool{}
	for _, port := range ports {
		numbers[port.Port] = true
	}
	for n := range numbers {
		p.add(name, SRV, srvData(share(len(numbers)), n, target))
	}
	for _, port := range ports {
		p.port(name, port.Name, port.Protocol, share(1), port.Port, target)
	}
}

// share is the weight of one of n records.
func share(n int) uint16 { return uint16(max(100/n, 1)) }

// port writes the SRV record of one named port.
func (p *page) port(name, port string, proto clusterset.Protocol, weight, number uint16, target string) {
	if port == "" {
		return
	}
	label, protocol := "_"+strings.ToLower(port), "_"+strings.ToLower(proto.String())
	if len(label) > maxLabel || len(name)+len(label)+len(protocol)+2 > maxName {
		p.problem(fmt.Sprintf("the port name %q makes the DNS name too long", port))
		return
	}
	forms := [][2]string{{label, protocol}}
	if p.ClusterScoped { // Lighthouse takes them without underscores as well
		forms = append(forms, [2]string{label[1:], protocol[1:]})
	}
	for _, form := range forms {
		at := under(name, form[1])
		p.exist(at)
		p.add(under(at, form[0]), SRV, srvData(weight, number, target))
	}
}

func (p *page) problem(reason string) {
	if !slices.Contains(p.problems, reason) {
		p.problems = append(p.problems, reason)
	}
}

// below returns the name of labels, joined by dots, below the Service's, and makes the names between exist. A name
// that cannot be is a problem.
func (p *page) below(labels string) (string, bool) {
	parts := strings.Split(labels, ".")
	for _, l := range parts {
		if !isLabel(l) {
			p.problem(fmt.Sprintf("%q is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'", l))
			return "", false
		}
	}
	name := under(p.name, parts...)
	if len(name) > maxName {
		p.problem(fmt.Sprintf("%s is longer than 253 characters", Text(name)))
		return "", false
	}
	for between := parent(name); between != p.name; between = parent(between) {
		p.exist(between)
	}
	return name, true
}

// host is an endpoint with a name of its own.
type host struct {
	name  string
	ports []clusterset.EndpointPort
}

// headless writes the ready endpoints of all members that live. With none the name does not exist, unless it is to.
func (p *page) headless() {
	if p.EmptyHeadless {
		p.exist(p.name)
	}
	var hosts []host
	for i := range p.of.Slices {
		slice := &p.of.Slices[i]
		for j := range slice.Endpoints {
			e := &slice.Endpoints[j]
			if !e.Ready || len(e.Addrs) == 0 {
				continue
			}
			if !p.Drained[slice.Cluster] {
				p.addresses(p.name, e.Addrs)
			}
			if p.ClusterScoped {
				if name, ok := p.below(string(slice.Cluster)); ok {
					p.addresses(name, e.Addrs)
				}
			}
			name, ok := p.below(hostLabel(e) + "." + string(slice.Cluster))
			if !ok {
				continue
			}
			p.addresses(name, e.Addrs)
			if e.Hostname == "" && isLabel(e.Pod) { // Lighthouse has it so; what SRV records say is the name above
				if alias, ok := p.below(e.Pod + "." + string(slice.Cluster)); ok {
					p.addresses(alias, e.Addrs)
				}
			}
			if !p.Drained[slice.Cluster] {
				hosts = append(hosts, host{name, slice.Ports})
			}
			if p.ClusterScoped {
				p.endpointPorts(under(p.name, strings.Split(string(slice.Cluster), ".")...), []host{{name, slice.Ports}})
			}
		}
	}
	p.endpointPorts(p.name, hosts)
}

func (p *page) addresses(name string, addrs []netip.Addr) {
	for _, a := range addrs {
		t, data := addressData(a)
		p.add(name, t, data)
	}
}

// endpointPorts writes the SRV records of hosts at name.
func (p *page) endpointPorts(name string, hosts []host) {
	type target struct {
		host string
		port uint16
	}
	type named struct {
		name  string
		proto clusterset.Protocol
	}
	all := map[target]bool{}
	byName := map[named]map[target]bool{}
	for _, h := range hosts {
		for _, port := range h.ports {
			t := target{h.name, port.Port}
			all[t] = true
			n := named{port.Name, port.Protocol}
			if byName[n] == nil {
				byName[n] = map[target]bool{}
			}
			byName[n][t] = true
		}
	}
	for t := range all {
		p.add(name, SRV, srvData(share(len(all)), t.port, t.host))
	}
	for n, targets := range byName {
		for t := range targets {
			p.port(name, n.name, n.proto, share(len(targets)), t.port, t.host)
		}
	}
}

// hostLabel is the name of an endpoint in its cluster: its hostname, or else its first address with dashes.
func hostLabel(e *clusterset.Endpoint) string {
	if e.Hostname != "" {
		return e.Hostname
	}
	return strings.NewReplacer(".", "-", ":", "-").Replace(e.Addrs[0].String())
}

// byCluster writes a Service without a ClusterSetIP, by choice: its endpoints are the addresses that it has in its
// clusters, of which an answer has one, the own cluster's if that serves, or else that of each in turn.
func (p *page) byCluster() {
	p.exist(p.name)
	serves := map[clusterset.ClusterID]bool{}
	for i := range p.of.Slices {
		slice := &p.of.Slices[i]
		for j := range slice.Endpoints {
			e := &slice.Endpoints[j]
			if len(e.Addrs) == 0 {
				continue
			}
			if e.Ready && !p.Drained[slice.Cluster] {
				serves[slice.Cluster] = true
			}
			if p.ClusterScoped { // even when it does not serve
				if name, ok := p.below(string(slice.Cluster)); ok {
					p.addresses(name, e.Addrs)
					p.ports(name, name, ownPorts(slice.Ports))
				}
			}
		}
	}
	var chosen [][]netip.Addr
	for i := range p.of.Slices {
		slice := &p.of.Slices[i]
		if !serves[slice.Cluster] || serves[p.Local] && slice.Cluster != p.Local {
			continue
		}
		for j := range slice.Endpoints {
			if e := &slice.Endpoints[j]; e.Ready && len(e.Addrs) > 0 {
				chosen = append(chosen, e.Addrs)
			}
		}
	}
	for _, addrs := range chosen {
		for _, a := range addrs {
			t, data := addressData(a)
			p.lines = append(p.lines, line{p.name, t, true, data})
		}
	}
	p.ports(p.name, p.name, p.of.Ports)
}

// ownPorts are those of one cluster.
func ownPorts(ports []clusterset.EndpointPort) []clusterset.Port {
	own := make([]clusterset.Port, len(ports))
	for i, port := range ports {
		own[i] = clusterset.Port{Name: port.Name, Protocol: port.Protocol, Port: port.Port}
	}
	return own
}
