package clusterset

import "net/netip"

// Aggregate is the one object the members share about a Service: which address it has, who allocated
// it and who exports. Everything else about the Service is merged from the exports.
type Aggregate struct {
	Service     ServiceName
	Type        ServiceType  // of the import when the aggregate was made; for people, not to be relied on
	IPs         []netip.Addr // at most one a family; empty for Headless and while none is free
	AllocatedBy ClusterID    // "" while there are no IPs
	UseIP       Choice       // what the first export of type ClusterSetIP chose; Unknown before
	Clusters    []ClusterID  // the exporters, sorted
}

// Decided returns what was agreed on: the choice that was written down, or what having an address implies.
func (a Aggregate) Decided() Choice {
	if a.UseIP == Unknown && len(a.IPs) > 0 {
		return Enabled
	}
	return a.UseIP
}

// WithIPs returns the import reached by addrs, which is the address that all members agreed on. An import
// with a VIP has exactly the families of its VIP (KEP-1645: ips and ipFamilies correspond); a headless
// one has no VIP and stays as it is.
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
