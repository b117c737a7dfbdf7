package clusterset

import (
	"net/netip"
	"slices"
)

// Aggregate is the only object about a Service that members share: its addresses, their owners, and the exporters. Members
// merge everything else from the exports.
type Aggregate struct {
	Service     ServiceName
	Type        ServiceType  // of the import when the aggregate was created; informational only
	IPs         []netip.Addr // at most one per family; empty for Headless and while none is free
	AllocatedBy ClusterID    // the owner of the first of IPs; "" while there are none
	ExtendedBy  ClusterID    // the owner of the second of IPs; "" if that is AllocatedBy too
	UseIP       Choice       // the choice of the first export of type ClusterSetIP; Unknown before
	Clusters    []ClusterID  // the exporters, sorted
}

// ChoiceIgnored is what the log says when the choice of an aggregate does not count (see [Aggregate.Settle]).
const ChoiceIgnored = "the choice of a ClusterSetIP in an aggregate on the broker is ignored: no exporter asks for that"

// Decided returns the agreed choice: the recorded one, or Enabled if there is an address.
func (a Aggregate) Decided() Choice {
	if a.UseIP == Unknown && len(a.IPs) > 0 {
		return Enabled
	}
	return a.UseIP
}

// Settle gives exports of the Service the recorded choice, unless one of them remembers another. Any member may write an
// aggregate, also without an export of its own, so its choice counts only if an export asks for the same. Settle reports
// whether it counts, and true if there is none.
func (a Aggregate) Settle(exports []Export) bool {
	decided := a.Decided()
	if slices.ContainsFunc(exports, func(e Export) bool { return e.AgreedIP != Unknown }) {
		return true
	}
	if !slices.ContainsFunc(exports, func(e Export) bool { return e.WantsIP == decided }) {
		return decided == Unknown
	}
	for i := range exports {
		exports[i].AgreedIP = decided
	}
	return true
}

// OwnerOf returns the member that allocated the address with index i of a.IPs from its own block.
func (a Aggregate) OwnerOf(i int) ClusterID {
	if i > 0 && a.ExtendedBy != "" {
		return a.ExtendedBy
	}
	return a.AllocatedBy
}

// Extender returns the member that adds an address of family f to those of a, or "" if no exporter has a block of f. It is the
// allocator while it exports the Service and has such a block. Otherwise it is the first of exporters, which are in order of
// precedence, that has one: the missing family is that of the oldest export, and all members agree on this order.
//
// For example, east allocates an IPv6 address and unexports the Service, which west exports by IPv4 alone. West then adds an
// address of its own IPv4 block.
func (a Aggregate) Extender(f Family, exporters []ClusterID, hasBlock func(ClusterID, Family) bool) ClusterID {
	exports := slices.Contains(a.Clusters, a.AllocatedBy) || slices.Contains(exporters, a.AllocatedBy)
	if exports && hasBlock(a.AllocatedBy, f) {
		return a.AllocatedBy
	}
	i := slices.IndexFunc(exporters, func(id ClusterID) bool { return hasBlock(id, f) })
	if i < 0 {
		return ""
	}
	return exporters[i]
}

// Served returns the addresses of a that an import of exports has. Any listed member can extend an aggregate whose allocator has
// left, also without an export of its own. So an added address counts only while an exporter has its family: otherwise clients
// that prefer IPv6 would try an address without endpoints first.
func (a Aggregate) Served(exports []Export) []netip.Addr {
	if len(a.IPs) < 2 || a.ExtendedBy == "" {
		return a.IPs
	}
	f := FamilyOf(a.IPs[1])
	if slices.ContainsFunc(exports, func(e Export) bool { return slices.Contains(e.Families, f) }) {
		return a.IPs
	}
	return a.IPs[:1:1]
}

// Recalled returns the addresses of a Service whose aggregate is lost: known, those that this cluster remembers, if they include
// remembered, those of the exporters' records; otherwise remembered. A record counts only with addresses that its member may
// remember ([MemberRegistry.CheckRemembered]), so it may lack one of another member.
func Recalled(known, remembered []netip.Addr) []netip.Addr {
	if slices.ContainsFunc(remembered, func(a netip.Addr) bool { return !slices.Contains(known, a) }) {
		return remembered
	}
	return known
}

// WithIPs returns the import with addrs as its VIP, on which all members agreed. An import with a VIP has exactly the
// families of its VIP (KEP-1645: ips and ipFamilies correspond); a headless import has no VIP and is returned unchanged.
func (i Import) WithIPs(addrs []netip.Addr) Import {
	i.IPs = nil
	if i.Type != ClusterSetIP || len(addrs) == 0 || i.UseIP == Disabled {
		return i
	}
	i.Families = nil
	for _, a := range addrs {
		i.IPs = append(i.IPs, a)
		i.Families = append(i.Families, FamilyOf(a))
	}
	return i
}
