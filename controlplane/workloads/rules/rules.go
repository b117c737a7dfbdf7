// Package rules turns NetworkPolicies of Kubernetes into rules that admit packets to and from machines outside of the cluster,
// in the form of a cloud's security groups.
//
// A machine counts as a pod of its namespace with the machine's labels. For example, a NetworkPolicy of namespace shop with the
// podSelector app=db and the type Ingress isolates the server whose metadata have app=db: the server gets a group whose rules admit
// only what the policy does, and all egress. Rules add up, as in NetworkPolicies, so one group holds the rules of all policies
// that select a machine. Machines that the same policies select share a group.
//
// Only peers with an ipBlock have addresses here. Leaders write federated Services as such peers, in a policy of their own. Pods
// that a peer selects are left out, because outside of the cluster their packets may have the address of a node.
//
// Source: https://kubernetes.io/docs/reference/kubernetes-api/policy-resources/network-policy-v1/
package rules

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// MaxRules is the largest number of rules in a group. Neutron's own default is a quota of 100 for all groups of a project.
const MaxRules = 1000

// Machine is a machine that policies of its namespace may select.
type Machine struct {
	ID        string // unique
	Namespace string
	Labels    map[string]string
	Ports     []Port
}

// Port is a port of a machine, which rules may name.
type Port struct {
	Name     string
	Protocol corev1.Protocol
	Number   int32 // at which the machine accepts packets
}

// Direction is the direction of the packets that begin a connection, as seen by the machine.
type Direction string

// The directions, as Neutron writes them.
const (
	Ingress Direction = "ingress"
	Egress  Direction = "egress"
)

// Rule admits packets, and the replies to them.
type Rule struct {
	Direction   Direction
	Protocol    string       // tcp, udp or sctp; empty means any
	First, Last uint16       // destination ports; 0 means any
	Remote      netip.Prefix // sources of ingress or destinations of egress; a prefix of no bits means any of its family
}

// compare gives rules an order.
func (r Rule) compare(o Rule) int {
	return cmp.Or(
		strings.Compare(string(r.Direction), string(o.Direction)), strings.Compare(r.Protocol, o.Protocol), cmp.Compare(r.First, o.First),
		cmp.Compare(r.Last, o.Last), r.Remote.Compare(o.Remote),
	)
}

// Group holds all rules of some machines. What its rules do not admit is dropped.
type Group struct {
	// Name is unique among the groups of all clusters. It depends on which policies select the machines, not on their rules,
	// so it stays the same when these change.
	Name     string
	Policies []string // that select the machines, as NAMESPACE/NAME, sorted
	Rules    []Rule   // sorted, at most MaxRules
}

// Plan is the wanted state of the machines of one cloud.
type Plan struct {
	Groups []Group           // sorted by name
	Of     map[string]string // name of the group by the ID of the machine; a machine that no policy selects is not in it
	Faults []Fault           // sorted by policy
}

// Fault is a part of a policy that is not applied to machines.
type Fault struct {
	Policy *networkingv1.NetworkPolicy
	Text   string // names the field and the remedy
}

// Build returns the groups for machines. cluster is unique to the cluster of the policies. The orders of policies and machines do
// not matter.
func Build(cluster string, policies []*networkingv1.NetworkPolicy, machines []Machine) Plan {
	plan := Plan{Of: map[string]string{}}
	all := compile(policies)
	built := map[string]bool{}
	for _, m := range machines {
		var selecting []*policy
		for _, p := range all {
			if p.Namespace == m.Namespace && p.selector.Matches(labels.Set(m.Labels)) {
				selecting, p.selects = append(selecting, p), true
			}
		}
		if len(selecting) == 0 {
			continue
		}
		g := groupOf(cluster, selecting, m)
		plan.Of[m.ID] = g.Name
		if built[g.Name] {
			continue
		}
		built[g.Name] = true
		if n := len(g.Rules); n > MaxRules {
			g.Rules = g.Rules[:MaxRules]
			for _, p := range selecting {
				p.fault(fmt.Sprintf("a machine needs %d rules with it, and gets the first %d; use fewer or larger blocks of addresses", n, MaxRules))
			}
		}
		plan.Groups = append(plan.Groups, g)
	}
	slices.SortFunc(plan.Groups, func(a, b Group) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range all {
		if p.selects && len(p.faults) > 0 {
			plan.Faults = append(plan.Faults, Fault{p.NetworkPolicy, strings.Join(p.faults, "; ")})
		}
	}
	return plan
}

// policy is a policy with its rules.
type policy struct {
	*networkingv1.NetworkPolicy

	selector labels.Selector
	rules    []rule
	selects  bool // a machine
	faults   []string
}

// rule is a Rule whose port may still have a name.
type rule struct {
	Rule

	port string
}

// compile returns policies in the order of their names.
func compile(policies []*networkingv1.NetworkPolicy) (all []*policy) {
	for _, o := range policies {
		selector, err := metav1.LabelSelectorAsSelector(&o.Spec.PodSelector)
		if err != nil {
			continue // the API server admits no such selector
		}
		p := &policy{NetworkPolicy: o, selector: selector}
		for i, r := range o.Spec.Ingress {
			p.admit(Ingress, fmt.Sprintf("spec.ingress[%d]", i), "from", r.From, r.Ports)
		}
		for i, r := range o.Spec.Egress {
			p.admit(Egress, fmt.Sprintf("spec.egress[%d]", i), "to", r.To, r.Ports)
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *policy) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return all
}

// fault adds a fault once.
func (p *policy) fault(text string) {
	if !slices.Contains(p.faults, text) {
		p.faults = append(p.faults, text)
	}
}

// isolates reports whether the policy isolates what it selects in a direction.
func (p *policy) isolates(d Direction) bool {
	return slices.ContainsFunc(p.Spec.PolicyTypes, func(t networkingv1.PolicyType) bool { return strings.EqualFold(string(t), string(d)) })
}

// admit adds the rules of one entry of the policy.
func (p *policy) admit(d Direction, field, peersField string, peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) {
	if !p.isolates(d) {
		return // the entry has no effect
	}
	remotes := everywhere
	if len(peers) > 0 {
		remotes = nil
	}
	for i, peer := range peers {
		switch {
		case peer.IPBlock != nil:
			remotes = append(remotes, prefixes(peer.IPBlock)...)
		case !namesService(peer):
			const text = "%s.%s[%d] selects pods, and admits nothing to machines; name a federated Service by the label %s, or an ipBlock"
			p.fault(fmt.Sprintf(text, field, peersField, i, v1alpha1.LabelPeerService))
		}
	}
	for _, remote := range remotes {
		if len(ports) == 0 {
			p.rules = append(p.rules, rule{Rule: Rule{Direction: d, Remote: remote}})
		}
		for i, port := range ports {
			r := rule{Rule: Rule{Direction: d, Protocol: protocol(port.Protocol), Remote: remote}}
			switch {
			case port.Port == nil:
			case port.Port.Type == intstr.Int:
				r.First = uint16(port.Port.IntVal)
				r.Last = r.First
				if port.EndPort != nil {
					r.Last = uint16(*port.EndPort)
				}
			case d == Egress:
				p.fault(fmt.Sprintf("%s.ports[%d] has the name %q, and admits nothing from machines; write its number", field, i, port.Port.StrVal))
				continue
			default:
				r.port = port.Port.StrVal
			}
			p.rules = append(p.rules, r)
		}
	}
}

// namesService reports whether a peer names a federated Service, whose addresses leaders admit by a policy of their own.
func namesService(peer networkingv1.NetworkPolicyPeer) bool {
	return peer.PodSelector != nil && peer.PodSelector.MatchLabels[v1alpha1.LabelPeerService] != ""
}

// protocol returns the name of a port's protocol.
func protocol(p *corev1.Protocol) string {
	if p == nil {
		return "tcp"
	}
	return strings.ToLower(string(*p))
}

// everywhere are all addresses.
var everywhere = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}

// prefixes returns the addresses of a block.
func prefixes(block *networkingv1.IPBlock) []netip.Prefix {
	whole, err := netip.ParsePrefix(block.CIDR)
	if err != nil {
		return nil // the API server admits no such block
	}
	var except []netip.Prefix
	for _, text := range block.Except {
		if p, err := netip.ParsePrefix(text); err == nil {
			except = append(except, p.Masked())
		}
	}
	return subtract(whole.Masked(), except)
}

// subtract returns the prefixes that make up whole without except.
func subtract(whole netip.Prefix, except []netip.Prefix) []netip.Prefix {
	except = slices.DeleteFunc(slices.Clone(except), func(e netip.Prefix) bool { return !e.Overlaps(whole) })
	if len(except) == 0 {
		return []netip.Prefix{whole}
	}
	if slices.ContainsFunc(except, func(e netip.Prefix) bool { return e.Bits() <= whole.Bits() }) {
		return nil
	}
	low, high := halves(whole)
	return append(subtract(low, except), subtract(high, except)...)
}

// halves returns the two prefixes that make up p.
func halves(p netip.Prefix) (low, high netip.Prefix) {
	bytes := p.Addr().AsSlice()
	bytes[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	upper, _ := netip.AddrFromSlice(bytes)
	return netip.PrefixFrom(p.Addr(), p.Bits()+1), netip.PrefixFrom(upper, p.Bits()+1)
}

// groupOf returns the group of a machine.
func groupOf(cluster string, selecting []*policy, m Machine) Group {
	g := Group{}
	for _, p := range selecting {
		g.Policies = append(g.Policies, p.Namespace+"/"+p.Name)
	}
	var named []string // the ports that rules name, so that machines with the same ones share a group
	for _, d := range []Direction{Ingress, Egress} {
		if !slices.ContainsFunc(selecting, func(p *policy) bool { return p.isolates(d) }) {
			for _, remote := range everywhere {
				g.Rules = append(g.Rules, Rule{Direction: d, Remote: remote})
			}
		}
	}
	for _, p := range selecting {
		for _, r := range p.rules {
			if r.port == "" {
				g.Rules = append(g.Rules, r.Rule)
				continue
			}
			for _, port := range m.Ports {
				if port.Name == r.port && strings.EqualFold(string(port.Protocol), r.Protocol) {
					r.First, r.Last = uint16(port.Number), uint16(port.Number)
					g.Rules, named = append(g.Rules, r.Rule), append(named, fmt.Sprintf("%s=%s %d", r.port, r.Protocol, port.Number))
				}
			}
		}
	}
	slices.SortFunc(g.Rules, Rule.compare)
	g.Rules = slices.Compact(g.Rules)
	slices.Sort(named)
	hash := fnv.New128a()
	fmt.Fprintf(hash, "%q %q %q", cluster, g.Policies, slices.Compact(named))
	g.Name = "isthmus-" + hex.EncodeToString(hash.Sum(nil))
	return g
}
