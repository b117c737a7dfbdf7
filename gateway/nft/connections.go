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

// pair is a frontend and one of its backends.
type pair struct {
	protocol uint8
	frontend netip.AddrPort
	backend  netip.AddrPort
}

// pairs calls each for every frontend and backend of a VIP.
func pairs(v *desired.VIP, each func(pair)) {
	for i := range v.Frontends {
		f := &v.Frontends[i]
		for _, b := range f.Backends {
			each(pair{uint8(protocol(f)), netip.AddrPortFrom(v.Addr, f.Port), netip.AddrPortFrom(b.Addr, b.Port)})
		}
	}
}

// noteRemoved records the backends that a change removed; had are the previous versions of the changed VIPs.
func (b *Balancer) noteRemoved(had []desired.VIP) {
	for i := range had {
		pairs(&had[i], func(p pair) { b.removed[p] = true })
	}
	for v := range b.vipsOf(b.removed) {
		pairs(v, func(p pair) { delete(b.removed, p) })
	}
}

// notePeers records the peers that a change removed: nobody keeps connections for them any more.
func (b *Balancer) notePeers(before, after *sharedState) {
	stay := after.peerAddrs()
	for a := range before.peerAddrs() {
		if !stay[a] {
			b.gonePeers[a] = true
		}
	}
	for a := range stay {
		delete(b.gonePeers, a)
	}
}

// vipsOf returns the current VIPs of the frontends in all.
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

// noteUnverified records the frontends that a new agent finds in the kernel or in its state. A backend that was removed
// while no agent ran still has connections.
func (b *Balancer) noteUnverified(have map[familySet]map[string]string) {
	b.unverified = map[pair]bool{}
	for p, elements := range have {
		if p.set != maglev && p.set != maglevRestricted && p.set != maglevAffinity && p.set != refused {
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

// frontendOf decodes the endpoint at the start of a key.
func frontendOf(key string, v4 bool) pair {
	length := 16
	if v4 {
		length = 4
	}
	a, _ := netip.AddrFromSlice([]byte(key[:length]))
	return pair{protocol: key[length], frontend: netip.AddrPortFrom(a, binary.BigEndian.Uint16([]byte(key[length+4:])))}
}

// deleteStaleSoon calls deleteStale in the background: listing all tracked connections takes milliseconds.
func (b *Balancer) deleteStaleSoon() {
	if len(b.removed) == 0 && len(b.unverified) == 0 && len(b.gonePeers) == 0 {
		return
	}
	b.deletes.Go(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.sockets == nil {
			return // closed, or a later change failed; then Drift deletes them
		}
		if err := b.deleteStale(b.sockets); err != nil {
			b.log.Warn("connections of removed backends stay for now", "err", err)
		}
	})
}

// deleteStale deletes the connections to removed backends, and those that peers kept which are gone. The client's next packet goes to
// another backend, or is refused.
func (b *Balancer) deleteStale(s *sockets) error {
	if len(b.removed) == 0 && len(b.unverified) == 0 && len(b.gonePeers) == 0 {
		return nil
	}
	f := staleFilter{removed: b.removed, unverified: b.unverified, current: map[pair]bool{}, peers: b.state.Load().peerAddrs(), gone: b.gonePeers}
	for _, all := range []map[pair]bool{b.removed, b.unverified} {
		for v := range b.vipsOf(all) {
			pairs(v, func(p pair) { f.current[p] = true })
		}
	}
	for family := range f.families() {
		if _, err := s.tracked.ConntrackDeleteFilters(netlink.ConntrackTable, family, f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete connections of removed backends: %w", err)
		}
	}
	clear(b.removed)
	clear(b.unverified)
	clear(b.gonePeers)
	return nil
}

// staleFilter selects the connections to delete: those of removed pairs, and those of unverified frontends, whose backend
// is the zero value, unless the pair is current or a peer keeps the connection; and those that peers which are gone kept.
type staleFilter struct {
	removed, unverified, current map[pair]bool
	peers, gone                  map[netip.Addr]bool
}

func (f staleFilter) families() map[netlink.InetFamily]bool {
	families := map[netlink.InetFamily]bool{}
	for a := range f.gone {
		families[inetFamily(a)] = true
	}
	for _, all := range []map[pair]bool{f.removed, f.unverified} {
		for p := range all {
			families[inetFamily(p.frontend.Addr())] = true
		}
	}
	return families
}

func inetFamily(a netip.Addr) netlink.InetFamily {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// MatchConntrackFlow reports whether a connection is to be deleted, whichever end sent the first packet.
func (f staleFilter) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	to := pair{flow.Forward.Protocol, at(flow.Forward.DstIP, flow.Forward.DstPort), at(flow.Reverse.SrcIP, flow.Reverse.SrcPort)}
	from := pair{flow.Forward.Protocol, at(flow.Reverse.DstIP, flow.Reverse.DstPort), at(flow.Forward.SrcIP, flow.Forward.SrcPort)}
	if f.current[to] || f.current[from] {
		return false
	}
	return f.removed[to] || f.removed[from] || f.isUnverified(to) || f.isUnverified(from) || to.frontend != to.backend && f.gone[to.backend.Addr()]
}

// isUnverified reports whether a connection of an unverified frontend was translated.
func (f staleFilter) isUnverified(p pair) bool {
	return p.frontend != p.backend && !f.peers[p.backend.Addr()] && f.unverified[pair{protocol: p.protocol, frontend: p.frontend}]
}

func at(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// checkSysctls returns the kernel settings that keep the machine from working as a gateway.
func checkSysctls(s *desired.State) (faults desired.Faults) {
	need := map[string]string{}
	for i := range s.VIPs {
		// Without it, the kernel does not accept a connection that another gateway began.
		need["net/netfilter/nf_conntrack_tcp_loose"] = "connections would break when their gateway dies"
		if s.VIPs[i].Addr.Is4() {
			need["net/ipv4/ip_forward"] = "no packet to an IPv4 VIP would reach a backend"
		} else {
			need["net/ipv6/conf/all/forwarding"] = "no packet to an IPv6 VIP would reach a backend"
		}
	}
	// Only metrics need it, and of connections that begin afterwards.
	_ = os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_acct", []byte("1"), 0)
	if len(s.Peers) > 0 {
		// A gateway may see the packets of one end alone, and those of a connection that comes back after more than a window. It can set
		// this itself, unless it runs without the right to: no packet of a connection that is known is dropped more than before.
		const beLiberal = "net/netfilter/nf_conntrack_tcp_be_liberal"
		_ = os.WriteFile("/proc/sys/"+beLiberal, []byte("1"), 0)
		need[beLiberal] = "connections through several gateways would stall"
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
