package clusterset

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Member is the registration of one cluster: its addresses, and when it joined and left.
type Member struct {
	ID       ClusterID
	Blocks   []netip.Prefix // of its ClusterSetIPs, at most one per family
	Routed   []netip.Prefix // of its pods, nodes and other endpoints to which other members may send traffic
	Services []netip.Prefix // of its own Services; several members may use the same
	// Supernets belong to the member alone. Extended are CIDRs of its pods by its own account, which count inside of Supernets.
	Supernets, Extended []netip.Prefix
	// ServiceVIP tells that the member exports the addresses of its Services instead of its pods.
	ServiceVIP bool
	JoinedAt   time.Time
	LeftAt     time.Time // zero while it is a member
}

// MemberRegistry holds the members of the ClusterSet, and tells which addresses each may publish. For example, it refuses
// an endpoint 10.2.0.7 from "west" if the pods of "east" have 10.2.0.0/16. It is immutable and does not depend on the
// order of its members. The zero MemberRegistry is empty.
type MemberRegistry struct {
	ranges  []netip.Prefix
	members map[ClusterID]entry
}

// entry is a member, the prefixes of its endpoints, and those that it registered but may not publish, because an earlier member
// has them.
type entry struct {
	Member
	routed, denied []netip.Prefix
}

// NewMemberRegistry returns the registry of a ClusterSet whose ClusterSetIPs come from ranges. An address that two members
// register belongs to the one that joined first; ties go to the lower id. That holds for whole supernets: what a member has not
// extended itself to is no other member's. No member may publish an address of ranges as an endpoint.
func NewMemberRegistry(ranges []netip.Prefix, members []Member) *MemberRegistry {
	byAge := slices.SortedFunc(slices.Values(members), func(a, b Member) int {
		return cmp.Or(a.JoinedAt.Compare(b.JoinedAt), strings.Compare(string(a.ID), string(b.ID)))
	})
	r := &MemberRegistry{ranges: slices.Clone(ranges), members: map[ClusterID]entry{}}
	var taken []netip.Prefix
	for _, m := range byAge {
		extends, _ := m.Beyond(m.Extended)
		e := entry{Member: m, routed: slices.Concat(m.Routed, extends)}
		for _, t := range taken {
			if slices.ContainsFunc(e.routed, t.Overlaps) {
				e.denied = append(e.denied, t)
			}
		}
		if m.LeftAt.IsZero() {
			taken = append(append(taken, m.Routed...), m.Supernets...)
		}
		r.members[m.ID] = e
	}
	return r
}

// Member returns the registration of id, and whether it is a member now.
func (r *MemberRegistry) Member(id ClusterID) (Member, bool) {
	e, ok := r.members[id]
	return e.Member, ok && e.LeftAt.IsZero()
}

// CheckEndpoint returns the reason why member id may not publish a as an endpoint, or nil.
func (r *MemberRegistry) CheckEndpoint(id ClusterID, a netip.Addr) error {
	a = a.Unmap()
	contains := func(p netip.Prefix) bool { return p.Contains(a) }
	e, ok := r.members[id]
	switch {
	case !IsUnicast(a):
		return fmt.Errorf("%s is a loopback, link-local, multicast, broadcast or unspecified address", a)
	case !ok || !e.LeftAt.IsZero():
		return fmt.Errorf("cluster %s is not a member", id)
	case slices.ContainsFunc(r.ranges, contains):
		return fmt.Errorf("%s lies in the range of ClusterSetIPs", a)
	case !slices.ContainsFunc(e.routed, contains) && !slices.ContainsFunc(e.Services, contains):
		return fmt.Errorf("%s lies outside of the CIDRs that cluster %s has registered", a, id)
	case slices.ContainsFunc(e.denied, contains):
		return fmt.Errorf("%s belongs to another member, which joined earlier", a)
	}
	return nil
}

// CheckEndpointFor returns the reason why the cluster reader must not use a as an endpoint of member id, or nil. Beside
// CheckEndpoint it holds that an address of a Service is an endpoint only if the member exports those, or if the exported
// Service declined a ClusterSetIP; and that an address in the reader's own service CIDRs is never one of another cluster.
// There, 10.96.0.1 is the API server of the reader itself.
func (r *MemberRegistry) CheckEndpointFor(reader, id ClusterID, a netip.Addr, declined bool) error {
	if err := r.CheckEndpoint(id, a); err != nil {
		return err
	}
	a = a.Unmap()
	contains := func(p netip.Prefix) bool { return p.Contains(a) }
	e := r.members[id]
	switch {
	case !declined && !e.ServiceVIP && !slices.ContainsFunc(e.routed, contains):
		return fmt.Errorf("%s is an address of a Service of cluster %s, which is registered to export pods; deploy the broker with --endpoints=service-vip and join again", a, id)
	case reader != id && slices.ContainsFunc(r.members[reader].Services, contains):
		return fmt.Errorf("%s lies in the service CIDRs of cluster %s itself", a, reader)
	}
	return nil
}

// Refusing returns the other members that must not use a as an endpoint of member id, sorted.
func (r *MemberRegistry) Refusing(id ClusterID, a netip.Addr, declined bool) []ClusterID {
	var ids []ClusterID
	for _, e := range r.members {
		if e.ID != id && e.LeftAt.IsZero() && r.CheckEndpointFor(e.ID, id, a, declined) != nil {
			ids = append(ids, e.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// CheckIP returns the reason why a cannot be a ClusterSetIP that member by allocated, or nil. The address stays valid when
// by has left, even if its block has a new owner.
func (r *MemberRegistry) CheckIP(by ClusterID, a netip.Addr) error {
	a = a.Unmap()
	contains := func(p netip.Prefix) bool { return p.Contains(a) }
	e, ok := r.members[by]
	switch {
	case !IsUnicast(a):
		return fmt.Errorf("%s is a loopback, link-local, multicast, broadcast or unspecified address", a)
	case len(r.ranges) > 0 && !slices.ContainsFunc(r.ranges, contains):
		return fmt.Errorf("%s lies outside of the ranges of ClusterSetIPs", a)
	case ok && e.LeftAt.IsZero() && len(e.Blocks) > 0 && !slices.ContainsFunc(e.Blocks, contains):
		return fmt.Errorf("%s lies outside of the block of cluster %s, which is recorded as its allocator", a, by)
	}
	return nil
}

// HasBlock reports whether id is a member now and allocates ClusterSetIPs of family f.
func (r *MemberRegistry) HasBlock(id ClusterID, f Family) bool {
	m, ok := r.Member(id)
	return ok && slices.ContainsFunc(m.Blocks, func(p netip.Prefix) bool { return FamilyOf(p.Addr()) == f })
}

// ExportedAt returns the effective creation time of an export that claims a time: not before its member joined, so that
// no member wins a conflict by an old date.
func (r *MemberRegistry) ExportedAt(id ClusterID, claimed time.Time) time.Time {
	if joined := r.members[id].JoinedAt; claimed.Before(joined) {
		return joined
	}
	return claimed
}

// CheckRemembered returns the reason why member id cannot remember a as a Service's ClusterSetIP, or nil. Remembered
// addresses count only where the aggregate is lost, so a member may remember addresses of its own block and of blocks
// without an owner; the owner of any other block remembers them itself.
func (r *MemberRegistry) CheckRemembered(id ClusterID, a netip.Addr) error {
	if err := r.CheckIP("", a); err != nil {
		return err
	}
	for _, e := range r.members {
		if e.ID != id && e.LeftAt.IsZero() && slices.ContainsFunc(e.Blocks, func(p netip.Prefix) bool { return p.Contains(a.Unmap()) }) {
			return fmt.Errorf("%s lies in the block of cluster %s", a, e.ID)
		}
	}
	return nil
}
