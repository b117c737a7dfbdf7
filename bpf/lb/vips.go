package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// VIPs decides which addresses of imports may be VIPs, whatever wrote the imports. Without it, a ServiceImport with
// ips: [10.96.0.1] and no endpoints would refuse every connection of the node's pods to their API server.
//
// An address may be a VIP if it lies inside a range of the ClusterSetIPs and is not one of the cluster's own. While no range
// is known, only addresses may that the node serves already. A nil *VIPs allows every address. Make it with NewVIPs; it never
// changes, so a Planner compares pointers.
type VIPs struct {
	ranges, own prefixSet
	uses        map[netip.Prefix]string // of own
	served      map[netip.Addr]clusterset.ServiceName
	text        string // the ranges, for messages
}

// Own is a range of addresses that the node's own cluster uses.
type Own struct {
	Prefix netip.Prefix
	Use    string // the users of the addresses, such as "Services"
}

// NewVIPs returns the VIPs inside ranges and outside of own. Without ranges they are the addresses in served, each for its
// Service, or for any Service if that name is empty.
func NewVIPs(ranges []netip.Prefix, own []Own, served map[netip.Addr]clusterset.ServiceName) *VIPs {
	v := &VIPs{ranges: newPrefixSet(ranges), uses: make(map[netip.Prefix]string, len(own)), served: served}
	prefixes := make([]netip.Prefix, 0, len(own))
	for _, o := range own {
		prefixes = append(prefixes, o.Prefix)
		if _, known := v.uses[o.Prefix.Masked()]; !known {
			v.uses[o.Prefix.Masked()] = o.Use
		}
	}
	v.own = newPrefixSet(prefixes)
	var texts []string
	for _, r := range v.ranges {
		texts = append(texts, r.String())
	}
	v.text = strings.Join(texts, " and ")
	return v
}

// verdict is the decision about one address. The zero value allows it.
type verdict struct {
	reason Reason
	own    netip.Prefix // for VIPOfCluster
}

// judge decides whether an address of a Service may be a VIP.
func (v *VIPs) judge(name clusterset.ServiceName, vip netip.Addr) verdict {
	if v == nil {
		return verdict{}
	}
	if own, is := v.own.find(vip); is {
		return verdict{VIPOfCluster, own}
	}
	if len(v.ranges) == 0 {
		owner, is := v.served[vip]
		if is && (owner == name || owner == clusterset.ServiceName{}) {
			return verdict{}
		}
		return verdict{reason: VIPRangesUnknown}
	}
	if _, is := v.ranges.find(vip); !is {
		return verdict{reason: VIPOutsideRanges}
	}
	return verdict{}
}

// explain returns the reason why vip is not served, and the fix.
func (v *VIPs) explain(vip netip.Addr, is verdict) string {
	const foreign = "delete the ServiceImport unless Isthmus wrote it"
	switch is.reason {
	case VIPOfCluster:
		return fmt.Sprintf("%s is not served: it lies in %s, where the cluster has its own %s; %s, or give the ClusterSet a range that no cluster uses",
			vip, is.own, v.uses[is.own], foreign)
	case VIPOutsideRanges:
		return fmt.Sprintf("%s is not served: it lies outside of %s, where all ClusterSetIPs are; %s, or add its range to spec.clusterSetIP.ranges of the cluster's Federation",
			vip, v.text, foreign)
	default:
		return fmt.Sprintf("%s is not served: the ranges of the ClusterSetIPs are unknown, so it may be an address of the cluster itself; check the status of the cluster's Member and spec.clusterSetIP.ranges of its Federation, or set --clusterset-ip-range",
			vip)
	}
}

// ownIn reports whether r contains addresses of the cluster itself.
func (v *VIPs) ownIn(r netip.Prefix) bool { return v != nil && v.own.overlaps(r) }

// differs reports whether v decides otherwise than w about an address of svc, or refuses one, perhaps with other words.
func (v *VIPs) differs(w *VIPs, svc *clusterset.Service) bool {
	return slices.ContainsFunc(svc.IPs, func(ip netip.Addr) bool {
		is := v.judge(svc.Service, ip.Unmap())
		return is != verdict{} || is != w.judge(svc.Service, ip.Unmap())
	})
}

// VIPs returns the address of each frontend with its Service.
func (s State) VIPs() map[netip.Addr]clusterset.ServiceName {
	all := make(map[netip.Addr]clusterset.ServiceName, len(s.Frontends))
	for a, fe := range s.Frontends {
		all[a.AddrPort.Addr()] = s.Services[fe.Service]
	}
	return all
}

// prefixSet is a set of addresses: prefixes that do not overlap, sorted.
type prefixSet []netip.Prefix

func newPrefixSet(prefixes []netip.Prefix) prefixSet {
	set := make(prefixSet, 0, len(prefixes))
	for _, p := range prefixes {
		if p.IsValid() {
			set = append(set, p.Masked())
		}
	}
	slices.SortFunc(set, netip.Prefix.Compare) // a prefix comes before those inside it
	last := netip.Prefix{}
	return slices.DeleteFunc(set, func(p netip.Prefix) bool {
		if last.IsValid() && last.Overlaps(p) {
			return true
		}
		last = p
		return false
	})
}

// find returns the prefix that a lies in.
func (s prefixSet) find(a netip.Addr) (netip.Prefix, bool) {
	i, exact := slices.BinarySearchFunc(s, a, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	if !exact {
		i--
	}
	if i < 0 || !s[i].Contains(a) {
		return netip.Prefix{}, false
	}
	return s[i], true
}

// overlaps reports whether r has an address in common with s.
func (s prefixSet) overlaps(r netip.Prefix) bool {
	if _, inside := s.find(r.Masked().Addr()); inside {
		return true
	}
	i, _ := slices.BinarySearchFunc(s, r.Masked().Addr(), func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	return i < len(s) && r.Contains(s[i].Addr())
}
