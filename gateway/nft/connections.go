package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// pair is a frontend and a backend that connections may be between.
type pair struct {
	protocol uint8
	frontend netip.AddrPort
	backend  netip.AddrPort
}

// pairs calls each with the frontends and backends of a VIP.
func pairs(v *desired.VIP, each func(pair)) {
	for i := range v.Frontends {
		f := &v.Frontends[i]
		for _, b := range f.Backends {
			each(pair{uint8(protocol(f)), netip.AddrPortFrom(v.Addr, f.Port), netip.AddrPortFrom(b.Addr, b.Port)})
		}
	}
}

// remember notes which backends went with a change of the VIPs that were had.
func (b *Balancer) noteRemoved(had []desired.VIP) {
	for i := range had {
		pairs(&had[i], func(p pair) { b.removed[p] = true })
	}
	for v := range b.vipsOf(b.removed) {
		pairs(v, func(p pair) { delete(b.removed, p) })
	}
}

// vipsOf returns the VIPs of the book that have frontends in all.
func (b *Balancer) vipsOf(all map[pair]bool) iter.Seq[*desired.VIP] {
	addrs := map[netip.Addr]bool{}
	for p := range all {
		addrs[p.frontend.Addr()] = true
	}
	return func(yield func(*desired.VIP) bool) {
		for a := range addrs {
			if v, ok := b.contents.vips[a]; ok && !yield(&v) {
				return
			}
		}
	}
}

// doubt notes which frontends an agent that starts finds in the kernel, besides those of the book: whoever lost a backend while
// no agent was there still has its connections.
func (b *Balancer) noteUnverified(have map[familySet]map[string]string) {
	b.unverified = map[pair]bool{}
	for p, elements := range have {
		if p.set != slotsOpen && p.set != slotsRestricted && p.set != slotsAffine && p.set != refused {
			continue
		}
		for key := range elements {
			b.unverified[frontendOf(key, p.v4)] = true
		}
	}
	for at := range b.contents.tables {
		p := uint8(protocol(&desired.Frontend{Protocol: at.protocol}))
		b.unverified[pair{protocol: p, frontend: netip.AddrPortFrom(at.vip, at.port)}] = true
	}
}

// frontendOf reads what endpoint made the beginning of a key.
func frontendOf(key string, v4 bool) pair {
	length := 16
	if v4 {
		length = 4
	}
	a, _ := netip.AddrFromSlice([]byte(key[:length]))
	return pair{protocol: key[length], frontend: netip.AddrPortFrom(a, binary.BigEndian.Uint16([]byte(key[length+4:])))}
}

// forgetSoon forgets when nobody waits for it: to go through all that the kernel tracks takes milliseconds.
func (b *Balancer) deleteStaleSoon() {
	if len(b.removed) == 0 && len(b.unverified) == 0 {
		return
	}
	b.deletes.Go(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.sockets == nil {
			return // closed, or a later change failed; then Drift does it
		}
		if err := b.deleteStale(b.sockets); err != nil {
			b.log.Warn("connections of backends that are gone stay for now", "err", err)
		}
	})
}

// forget ends the connections to backends that are gone: the client's next packet goes to another one, or is refused.
func (b *Balancer) deleteStale(s *sockets) error {
	if len(b.removed) == 0 && len(b.unverified) == 0 {
		return nil
	}
	f := staleFilter{removed: b.removed, unverified: b.unverified, current: map[pair]bool{}}
	for _, all := range []map[pair]bool{b.removed, b.unverified} {
		for v := range b.vipsOf(all) {
			pairs(v, func(p pair) { f.current[p] = true })
		}
	}
	for family := range f.families() {
		if _, err := s.tracked.ConntrackDeleteFilters(netlink.ConntrackTable, family, f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("forget connections of backends that are gone: %w", err)
		}
	}
	clear(b.removed)
	clear(b.unverified)
	return nil
}

// forgetting says which connections are to be forgotten: those of gone, and those of doubtful frontends, whose backend is the
// zero value, that are not among served.
type staleFilter struct{ removed, unverified, current map[pair]bool }

func (f staleFilter) families() map[netlink.InetFamily]bool {
	families := map[netlink.InetFamily]bool{}
	for _, all := range []map[pair]bool{f.removed, f.unverified} {
		for p := range all {
			if p.frontend.Addr().Is4() {
				families[unix.AF_INET] = true
			} else {
				families[unix.AF_INET6] = true
			}
		}
	}
	return families
}

// MatchConntrackFlow reports whether a connection is one to forget, whichever end was seen first.
func (f staleFilter) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	to := pair{flow.Forward.Protocol, at(flow.Forward.DstIP, flow.Forward.DstPort), at(flow.Reverse.SrcIP, flow.Reverse.SrcPort)}
	from := pair{flow.Forward.Protocol, at(flow.Reverse.DstIP, flow.Reverse.DstPort), at(flow.Forward.SrcIP, flow.Forward.SrcPort)}
	if f.current[to] || f.current[from] {
		return false
	}
	return f.removed[to] || f.removed[from] || f.isUnverified(to) || f.isUnverified(from)
}

// doubts reports whether a connection of a doubtful frontend was translated.
func (f staleFilter) isUnverified(p pair) bool {
	return p.frontend != p.backend && f.unverified[pair{protocol: p.protocol, frontend: p.frontend}]
}

func at(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// surroundings returns what of the machine keeps it from being a gateway.
func checkSysctls(s *desired.State) (faults desired.Faults) {
	need := map[string]string{}
	for i := range s.VIPs {
		// Without it a connection that another gateway began is not recognised as one.
		need["net/netfilter/nf_conntrack_tcp_loose"] = "connections would end when their gateway does"
		if s.VIPs[i].Addr.Is4() {
			need["net/ipv4/ip_forward"] = "no packet to an IPv4 VIP would reach a backend"
		} else {
			need["net/ipv6/conf/all/forwarding"] = "no packet to an IPv6 VIP would reach a backend"
		}
	}
	for name, why := range need {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err == nil && strings.TrimSpace(string(b)) != "0" {
			continue
		}
		key := strings.ReplaceAll(name, "/", ".")
		message := fmt.Sprintf("%s is 0: %s; set it with sysctl -w %s=1", key, why, key)
		if err != nil {
			message = fmt.Sprintf("read %s: %v", key, err)
		}
		faults = append(faults, desired.Fault{Component: desired.ComponentBalancer, Message: message})
	}
	return faults
}
