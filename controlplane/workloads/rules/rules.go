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
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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

const (
	// MaxRules is the largest number of rules in a group. Neutron's own default is a quota of 100 for all groups of a project.
	MaxRules = 1000
	// maxFaults is how many faults of a policy are told.
	maxFaults = 10
)

// tooMany is the fault of policies with which a machine has too many rules.
var tooMany = fmt.Sprintf("a machine needs more than %d rules with it, and gets the first ones; use fewer or larger blocks of addresses", MaxRules)

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
	// Known are the machines that are in Of or in no group for certain. Others, such as those that a cloud left out of its list, keep what
	// they have. A nil map stands for all machines.
	Known  map[string]bool
	Faults []Fault // sorted by policy
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
	all := parse(policies)
	built := map[string]bool{}
	for _, m := range machines {
		var selecting []*policy
		for _, p := range all {
			if p.Namespace == m.Namespace && p.selector.Matches(labels.Set(m.Labels)) {
				p.compile()
				selecting = append(selecting, p)
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
		if len(g.Rules) > MaxRules {
			g.Rules = g.Rules[:MaxRules]
			for _, p := range selecting {
				p.fault(tooMany)
			}
		}
		plan.Groups = append(plan.Groups, g)
	}
	slices.SortFunc(plan.Groups, func(a, b Group) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range all {
		if len(p.faults) > 0 {
			plan.Faults = append(plan.Faults, Fault{p.NetworkPolicy, strings.Join(p.faults, "; ")})
		}
	}
	return plan
}

// policy is a policy with its rules.
type policy struct {
	*networkingv1.NetworkPolicy

	selector labels.Selector
	compiled bool   // because it selects a machine
	rules    []rule // at most some more than MaxRules
	faults   []string
}

// rule is a Rule whose port may still have a name.
type rule struct {
	Rule

	port string
}

// parse returns policies in the order of their names.
func parse(policies []*networkingv1.NetworkPolicy) (all []*policy) {
	for _, o := range policies {
		selector, err := metav1.LabelSelectorAsSelector(&o.Spec.PodSelector)
		if err != nil {
			continue // the API server admits no such selector
		}
		all = append(all, &policy{NetworkPolicy: o, selector: selector})
	}
	slices.SortFunc(all, func(a, b *policy) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return all
}

// compile sets the rules of a policy that selects a machine.
func (p *policy) compile() {
	if p.compiled {
		return
	}
	p.compiled = true
	for i, r := range p.Spec.Ingress {
		p.admit(Ingress, fmt.Sprintf("spec.ingress[%d]", i), "from", r.From, r.Ports)
	}
	for i, r := range p.Spec.Egress {
		p.admit(Egress, fmt.Sprintf("spec.egress[%d]", i), "to", r.To, r.Ports)
	}
}

// fault adds a fault once.
func (p *policy) fault(text string) {
	if len(p.faults) < maxFaults && !slices.Contains(p.faults, text) {
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
	if len(peers) == 0 {
		for _, remote := range everywhere {
			p.admitAt(d, field, remote, ports)
		}
	}
	for i, peer := range peers {
		switch {
		case len(p.rules) > MaxRules: // none of the others would be in a group
			p.fault(tooMany)
			return
		case peer.IPBlock != nil:
			remotes, err := prefixes(peer.IPBlock)
			if err != nil {
				p.fault(fmt.Sprintf("%s.%s[%d].ipBlock admits nothing: %v; write addresses such as 10.0.0.0/8", field, peersField, i, err))
			}
			for _, remote := range remotes {
				p.admitAt(d, field, remote, ports)
			}
		case !namesService(peer):
			const text = "%s.%s[%d] selects pods, and admits nothing to machines; name a federated Service by the label %s, or an ipBlock"
			p.fault(fmt.Sprintf(text, field, peersField, i, v1alpha1.LabelPeerService))
		}
	}
}

// admitAt adds rules for one remote.
func (p *policy) admitAt(d Direction, field string, remote netip.Prefix, ports []networkingv1.NetworkPolicyPort) {
	if len(ports) == 0 {
		p.rules = append(p.rules, rule{Rule: Rule{Direction: d, Remote: remote}})
	}
	for i, port := range ports {
		if len(p.rules) > MaxRules {
			p.fault(tooMany)
			return
		}
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
		if n := len(p.rules); n > 0 && p.rules[n-1] == r {
			continue // many equal ports must not take the room of others
		}
		p.rules = append(p.rules, r)
	}
}

// namesService reports whether a peer names a federated Service, whose addresses leaders admit by a policy of their own: by its label alone.
func namesService(peer networkingv1.NetworkPolicyPeer) bool {
	s := peer.PodSelector
	return s != nil && len(s.MatchLabels) == 1 && len(s.MatchExpressions) == 0 && s.MatchLabels[v1alpha1.LabelPeerService] != ""
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

// prefixes returns the addresses of a block, at most some more than MaxRules of them. API servers before Kubernetes 1.36 admit text such as
// 10.010.0.0/16, whose meaning depends on the reader. An exception that cannot be understood must not make the block larger.
func prefixes(block *networkingv1.IPBlock) ([]netip.Prefix, error) {
	whole, err := parsePrefix(block.CIDR)
	if err != nil {
		return nil, err
	}
	var except []netip.Prefix
	for _, text := range block.Except {
		p, err := parsePrefix(text)
		if err != nil {
			return nil, err
		}
		except = append(except, p)
	}
	return subtract(nil, whole, except), nil
}

// parsePrefix parses a prefix. An IPv4 address in the form of an IPv6 one is no valid remote.
func parsePrefix(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() {
		return p, fmt.Errorf("%q is not a prefix of IPv4 or IPv6", text)
	}
	return p.Masked(), nil
}

// subtract appends the prefixes that make up whole without except, until there are more than MaxRules.
func subtract(to []netip.Prefix, whole netip.Prefix, except []netip.Prefix) []netip.Prefix {
	except = slices.DeleteFunc(slices.Clone(except), func(e netip.Prefix) bool { return !e.Overlaps(whole) })
	switch {
	case len(to) > MaxRules || slices.ContainsFunc(except, func(e netip.Prefix) bool { return e.Bits() <= whole.Bits() }):
		return to
	case len(except) == 0:
		return append(to, whole)
	}
	low, high := halves(whole)
	return subtract(subtract(to, low, except), high, except)
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
	// Authors of policies choose parts of the input, so it takes a hash without collisions: machines of two tenants must not share a group.
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", cluster, g.Policies, slices.Compact(named)))
	g.Name = "isthmus-" + hex.EncodeToString(sum[:16])
	return g
}
