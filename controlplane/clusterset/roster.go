package clusterset

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Member is the registration of one cluster: which addresses are its own, and since when it is one.
type Member struct {
	ID       ClusterID
	Blocks   []netip.Prefix // of its ClusterSetIPs, at most one a family
	Routed   []netip.Prefix // of its pods, nodes and whatever else others may send traffic to
	Services []netip.Prefix // of its own Services; several members may have the same
	JoinedAt time.Time
	LeftAt   time.Time // zero while it is a member
}

// Roster is who belongs to the ClusterSet and which addresses each may speak for. It is immutable, and
// the same for everybody who knows the same members, whatever their order. The zero Roster knows nobody.
type Roster struct {
	ranges  []netip.Prefix
	members map[ClusterID]entry
}

// entry is a member, and what it may not speak for although it registered it, because a member that joined
// earlier has it.
type entry struct {
	Member
	denied []netip.Prefix
}

// NewRoster returns the roster of a ClusterSet whose ClusterSetIPs come from ranges. An address that two
// members register belongs to the one that joined first, ties to the lower id; nobody speaks for an address
// of the ranges as an endpoint.
func NewRoster(ranges []netip.Prefix, members []Member) *Roster {
	byAge := slices.SortedFunc(slices.Values(members), func(a, b Member) int {
		return cmp.Or(a.JoinedAt.Compare(b.JoinedAt), strings.Compare(string(a.ID), string(b.ID)))
	})
	r := &Roster{ranges: slices.Clone(ranges), members: map[ClusterID]entry{}}
	var taken []netip.Prefix
	for _, m := range byAge {
		e := entry{Member: m}
		for _, t := range taken {
			if slices.ContainsFunc(m.Routed, t.Overlaps) {
				e.denied = append(e.denied, t)
			}
		}
		if m.LeftAt.IsZero() {
			taken = append(taken, m.Routed...)
		}
		r.members[m.ID] = e
	}
	return r
}

// Member returns the registration of id, and whether it is a member now.
func (r *Roster) Member(id ClusterID) (Member, bool) {
	e, ok := r.members[id]
	return e.Member, ok && e.LeftAt.IsZero()
}

// CheckEndpoint reports why no traffic may be sent to a on the word of member id, or nil.
func (r *Roster) CheckEndpoint(id ClusterID, a netip.Addr) error {
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
	case !slices.ContainsFunc(e.Routed, contains) && !slices.ContainsFunc(e.Services, contains):
		return fmt.Errorf("%s lies outside of the CIDRs that cluster %s has registered", a, id)
	case slices.ContainsFunc(e.denied, contains):
		return fmt.Errorf("%s is another member's address, which joined earlier", a)
	}
	return nil
}

// CheckIP reports why a cannot be a ClusterSetIP that member by has allocated, or nil. The address stays
// good when by has left, whoever has its block now.
func (r *Roster) CheckIP(by ClusterID, a netip.Addr) error {
	a = a.Unmap()
	contains := func(p netip.Prefix) bool { return p.Contains(a) }
	e, ok := r.members[by]
	switch {
	case !IsUnicast(a):
		return fmt.Errorf("%s is a loopback, link-local, multicast, broadcast or unspecified address", a)
	case len(r.ranges) > 0 && !slices.ContainsFunc(r.ranges, contains):
		return fmt.Errorf("%s lies outside of the ranges of ClusterSetIPs", a)
	case ok && e.LeftAt.IsZero() && len(e.Blocks) > 0 && !slices.ContainsFunc(e.Blocks, contains):
		return fmt.Errorf("%s lies outside of the block of cluster %s, which is said to have allocated it", a, by)
	}
	return nil
}

// ExportedAt returns when an export counts as created that claims a time: not before its member joined, so
// that nobody wins a conflict by an old date.
func (r *Roster) ExportedAt(id ClusterID, claimed time.Time) time.Time {
	if joined := r.members[id].JoinedAt; claimed.Before(joined) {
		return joined
	}
	return claimed
}

// CheckRemembered reports why member id cannot remember a as a Service's ClusterSetIP, or nil. What it
// remembers counts only where the aggregate is lost, so it is believed for its own block and for a block
// that nobody has any more; for another member's block that member speaks itself.
func (r *Roster) CheckRemembered(id ClusterID, a netip.Addr) error {
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
