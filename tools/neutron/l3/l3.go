// Package l3 replaces Neutron's L3 agent and port security on the router of a lab, which runs no agents. It translates floating
// IPs one to one, and drops packets that a gateway sends from an address that Neutron does not allow at its port. Its only
// input is Neutron's API. It does not translate a floating IP whose fixed address no gateway's port may use.
package l3

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Router is the router on which the rules apply.
type Router struct {
	Namespace *netlab.Namespace
	// Ports are the devices that lead to gateways, by the id of the gateway's Neutron port. They are ports of a bridge.
	Ports map[string]string
	// Outside is the device towards clients.
	Outside string
	// Report receives one line with the translations of all floating IPs when they change.
	Report func(string)

	last string // the applied rules
	said string // the last report
}

// State is the input from Neutron.
type State struct {
	// Leads are the translated floating IPs. Refused are those whose fixed address no gateway's port may use.
	Leads, Refused map[netip.Addr]netip.Addr
	Allowed        map[string][]netip.Prefix // by Neutron port: allowed source addresses
}

// Follow applies Neutron's state to the router until ctx ends. While Neutron does not answer, the rules stay as they are.
func (r *Router) Follow(ctx context.Context, network *gophercloud.ServiceClient, every time.Duration) error {
	for {
		if s, err := Read(ctx, network, r.ports()); err == nil {
			if err := r.Apply(ctx, s); err != nil && ctx.Err() == nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every): // a pause, so that Neutron can serve other clients
		}
	}
}

func (r *Router) ports() (ids []string) {
	for id := range r.Ports {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Read reads the floating IPs and the allowed source addresses of the gateways' ports from Neutron, with an administrator's
// rights.
func Read(ctx context.Context, network *gophercloud.ServiceClient, gateways []string) (State, error) {
	s := State{Leads: map[netip.Addr]netip.Addr{}, Refused: map[netip.Addr]netip.Addr{}, Allowed: map[string][]netip.Prefix{}}
	for _, id := range gateways {
		p, err := ports.Get(ctx, network, id).Extract()
		if err != nil {
			return State{}, fmt.Errorf("port %s: %w", id, err)
		}
		if s.Allowed[id], err = allowed(p); err != nil {
			return State{}, fmt.Errorf("port %s: %w", id, err)
		}
	}
	pages, err := floatingips.List(network, floatingips.ListOpts{}).AllPages(ctx)
	if err != nil {
		return State{}, fmt.Errorf("list floating IPs: %w", err)
	}
	all, err := floatingips.ExtractFloatingIPs(pages)
	if err != nil {
		return State{}, err
	}
	for _, f := range all {
		if f.FixedIP == "" {
			continue
		}
		outer, err := netip.ParseAddr(f.FloatingIP)
		if err != nil {
			return State{}, err
		}
		inner, err := netip.ParseAddr(f.FixedIP)
		if err != nil {
			return State{}, err
		}
		if s.allows(inner) {
			s.Leads[outer] = inner
		} else {
			s.Refused[outer] = inner
		}
	}
	return s, nil
}

// allowed returns the source addresses that a port may use: its own addresses and its allowed address pairs.
func allowed(p *ports.Port) (all []netip.Prefix, err error) {
	for _, ip := range p.FixedIPs {
		a, err := netip.ParseAddr(ip.IPAddress)
		if err != nil {
			return nil, err
		}
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, pair := range p.AllowedAddressPairs {
		text := pair.IPAddress
		if !strings.Contains(text, "/") {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return nil, err
			}
			text = netip.PrefixFrom(a, a.BitLen()).String()
		}
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		all = append(all, prefix.Masked())
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all), nil
}

// allows reports whether any gateway may use an address.
func (s *State) allows(a netip.Addr) bool {
	for _, prefixes := range s.Allowed {
		if slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) }) {
			return true
		}
	}
	return false
}

// Apply replaces the router's rules by those for s, in one transaction.
func (r *Router) Apply(ctx context.Context, s State) error {
	rules := r.rules(s)
	if rules == r.last {
		return nil
	}
	err := r.Namespace.Do(func() error {
		cmd := exec.CommandContext(ctx, "nft", "--file", "-")
		cmd.Stdin = strings.NewReader(rules)
		if said, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w\n%s\n%s", err, said, rules)
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.last = rules
	if is := s.String(); r.Report != nil && is != r.said {
		r.said = is
		r.Report(is)
	}
	return nil
}

// String lists the floating IPs with their targets, sorted.
func (s *State) String() string {
	var lines []string
	for outer, inner := range s.Leads {
		lines = append(lines, fmt.Sprintf("%s leads to %s", outer, inner))
	}
	for outer, inner := range s.Refused {
		lines = append(lines, fmt.Sprintf("%s leads nowhere: no gateway's port has an allowed address pair for %s", outer, inner))
	}
	if len(lines) == 0 {
		return "no floating IP leads anywhere"
	}
	slices.Sort(lines)
	return strings.Join(lines, ", ")
}

// rules returns two tables: the allowed source addresses of each port, and the translations of floating IPs.
func (r *Router) rules(s State) string {
	var b strings.Builder
	b.WriteString("table ip l3\ndelete table ip l3\ntable bridge l3\ndelete table bridge l3\n")
	b.WriteString("table ip l3 {\n")
	to, from := []string{}, []string{}
	for outer, inner := range s.Leads {
		to = append(to, fmt.Sprintf("%s : %s", outer, inner))
		from = append(from, fmt.Sprintf("%s : %s", inner, outer))
	}
	writeSet(&b, "map to", "ipv4_addr : ipv4_addr", to)
	writeSet(&b, "map from", "ipv4_addr : ipv4_addr", from)
	b.WriteString("chain prerouting { type nat hook prerouting priority dstnat; dnat to ip daddr map @to; }\n")
	fmt.Fprintf(&b, "chain postrouting { type nat hook postrouting priority srcnat; oifname %q snat to ip saddr map @from; }\n}\n", r.Outside)
	b.WriteString("table bridge l3 {\n")
	var chain strings.Builder
	for i, id := range r.ports() {
		var four, six []string
		for _, p := range s.Allowed[id] {
			if p.Addr().Is4() {
				four = append(four, p.String())
			} else {
				six = append(six, p.String())
			}
		}
		writeSet(&b, fmt.Sprintf("set four%d", i), "ipv4_addr; flags interval", four)
		writeSet(&b, fmt.Sprintf("set six%d", i), "ipv6_addr; flags interval", append(six, "fe80::/10", "::"))
		fmt.Fprintf(&chain, "iifname %q ip saddr != @four%d counter drop\niifname %[1]q ip6 saddr != @six%[2]d counter drop\n", r.Ports[id], i)
	}
	fmt.Fprintf(&b, "chain from { type filter hook prerouting priority 0;\n%s}\n}\n", chain.String())
	return b.String()
}

func writeSet(b *strings.Builder, name, kind string, elements []string) {
	slices.Sort(elements)
	fmt.Fprintf(b, "%s { type %s;", name, kind)
	if len(elements) > 0 {
		fmt.Fprintf(b, " elements = { %s }", strings.Join(elements, ", "))
	}
	b.WriteString(" }\n")
}

// Dropped returns the number of gateways' packets that were dropped because of their source address.
func (r *Router) Dropped(ctx context.Context) (n uint64, err error) {
	err = r.Namespace.Do(func() error {
		said, err := exec.CommandContext(ctx, "nft", "list", "chain", "bridge", "l3", "from").Output()
		if err != nil {
			return errors.Join(err, ctx.Err())
		}
		fields := strings.Fields(string(said))
		for i, f := range fields {
			if f == "packets" && i+1 < len(fields) {
				var one uint64
				if _, err := fmt.Sscan(fields[i+1], &one); err != nil {
					return err
				}
				n += one
			}
		}
		return nil
	})
	return n, err
}
