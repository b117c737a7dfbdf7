package clusterset

import (
	"net/netip"
	"slices"
)

// Aggregate is the only object about a Service that members share: its address, the allocator of that address, and the
// exporters. Members merge everything else from the exports.
type Aggregate struct {
	Service     ServiceName
	Type        ServiceType  // of the import when the aggregate was created; informational only
	IPs         []netip.Addr // at most one per family; empty for Headless and while none is free
	AllocatedBy ClusterID    // "" while there are no IPs
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
