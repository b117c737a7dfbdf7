package rules_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
)

// parse returns a policy of namespace shop, with the types that the API server adds.
func parse(t *testing.T, name, spec string) *networkingv1.NetworkPolicy {
	t.Helper()
	p := &networkingv1.NetworkPolicy{}
	if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
		t.Fatal(err)
	}
	p.Namespace, p.Name = "shop", name
	if len(p.Spec.PolicyTypes) == 0 {
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(p.Spec.Egress) > 0 {
			p.Spec.PolicyTypes = append(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
	return p
}

// db is a machine of namespace shop.
func db(id string) rules.Machine {
	return rules.Machine{
		ID: id, Namespace: "shop", Labels: map[string]string{"app": "db"},
		Ports: []rules.Port{{Name: "sql", Protocol: corev1.ProtocolTCP, Number: 5432}, {Name: "dns", Protocol: corev1.ProtocolUDP, Number: 53}},
	}
}

// lines returns rules as text, without those that admit everything in a direction.
func lines(of []rules.Rule) (all []string) {
	for _, r := range of {
		all = append(all, strings.TrimSpace(fmt.Sprintf("%s %s %d-%d %s", r.Direction, r.Protocol, r.First, r.Last, r.Remote)))
	}
	return all
}

func TestRules(t *testing.T) {
	open := []string{"egress  0-0 0.0.0.0/0", "egress  0-0 ::/0"}
	for name, tc := range map[string]struct {
		spec  string
		want  []string
		fault string
	}{
		"nothing is admitted": {`podSelector: {}`, open, ""},
		"everything is":       {`{podSelector: {}, ingress: [{}]}`, append(slices.Clone(open), "ingress  0-0 0.0.0.0/0", "ingress  0-0 ::/0"), ""},
		"only egress is isolated": {
			`{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}], ingress: [{from: [{ipBlock: {cidr: 1.0.0.0/8}}]}]}`,
			[]string{"egress  0-0 10.0.0.0/8", "ingress  0-0 0.0.0.0/0", "ingress  0-0 ::/0"},
			"",
		},
		"ports": {
			`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 2001:db8::/32}}], ports: [{port: 80}, {protocol: UDP, port: 100, endPort: 200}, {protocol: SCTP}]}]}`,
			append(slices.Clone(open), "ingress sctp 0-0 2001:db8::/32", "ingress tcp 80-80 2001:db8::/32", "ingress udp 100-200 2001:db8::/32"), "",
		},
		"a named port": {
			`{podSelector: {}, ingress: [{ports: [{port: sql}, {port: dns}, {port: unknown}]}]}`,
			append(slices.Clone(open), "ingress tcp 5432-5432 0.0.0.0/0", "ingress tcp 5432-5432 ::/0"), "",
		},
		"a block with a hole": {
			`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/30, except: [10.0.0.2/32, 10.9.0.0/16]}}]}]}`,
			append(slices.Clone(open), "ingress  0-0 10.0.0.0/31", "ingress  0-0 10.0.0.3/32"), "",
		},
		"an exception of two meanings": {
			`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.010.0.0/16]}}]}]}`, open, "spec.ingress[0].from[0].ipBlock admits nothing",
		},
		"an exception that is no prefix": {
			`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: "::/0", except: ["::ffff:10.1.0.0/112"]}}]}]}`, open, "spec.ingress[0].from[0].ipBlock admits nothing",
		},
		"a Service and another label": {
			`{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {federation.isthmus.dev/service: shop, app: x}}}]}]}`, open, "spec.ingress[0].from[0] selects pods",
		},
		"the same twice": {
			`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}, {ipBlock: {cidr: 10.0.0.0/8}}]}]}`, append(slices.Clone(open), "ingress  0-0 10.0.0.0/8"), "",
		},
		"a federated Service": {`{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {federation.isthmus.dev/service: shop}}}]}]}`, open, ""},
		"pods":                {`{podSelector: {}, ingress: [{from: [{podSelector: {}}, {namespaceSelector: {}}]}]}`, open, "spec.ingress[0].from[0] selects pods"},
		"a named port elsewhere": {
			`{podSelector: {}, policyTypes: [Egress], egress: [{ports: [{port: sql}]}]}`, []string{"ingress  0-0 0.0.0.0/0", "ingress  0-0 ::/0"}, `spec.egress[0].ports[0] has the name "sql"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			plan := rules.Build("c", []*networkingv1.NetworkPolicy{parse(t, "p", tc.spec)}, []rules.Machine{db("1")})
			if len(plan.Groups) != 1 || !slices.Equal(lines(plan.Groups[0].Rules), tc.want) {
				t.Errorf("%q; want %q", lines(plan.Groups[0].Rules), tc.want)
			}
			if (tc.fault == "") != (len(plan.Faults) == 0) || tc.fault != "" && !strings.HasPrefix(plan.Faults[0].Text, tc.fault) {
				t.Errorf("faults %+v; want %q", plan.Faults, tc.fault)
			}
		})
	}
}

// The rules of all policies that select a machine add up. Machines that the same policies select share a group, whose name stays
// when rules change, and differs in another cluster.
func TestGroups(t *testing.T) {
	first := parse(t, "a", `{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{ipBlock: {cidr: 10.1.0.0/16}}]}]}`)
	second := parse(t, "b", `{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{ipBlock: {cidr: 10.2.0.0/16}}]}]}`)
	foreign := parse(t, "c", `{podSelector: {}, ingress: [{}]}`)
	foreign.Namespace = "other"
	web := rules.Machine{ID: "3", Namespace: "shop", Labels: map[string]string{"app": "web"}}
	all := []*networkingv1.NetworkPolicy{second, foreign, first}
	plan := rules.Build("c", all, []rules.Machine{db("1"), web, db("2")})
	if len(plan.Groups) != 1 || len(plan.Of) != 2 || plan.Of["1"] != plan.Of["2"] || fmt.Sprint(plan.Groups[0].Policies) != "[shop/a shop/b]" {
		t.Fatalf("%+v", plan)
	}
	want := []string{"egress  0-0 0.0.0.0/0", "egress  0-0 ::/0", "ingress  0-0 10.1.0.0/16", "ingress  0-0 10.2.0.0/16"}
	if have := lines(plan.Groups[0].Rules); !slices.Equal(have, want) {
		t.Errorf("%q; want %q", have, want)
	}
	second.Spec.Ingress = nil
	slices.Reverse(all)
	again := rules.Build("c", all, []rules.Machine{db("1")})
	if again.Of["1"] != plan.Of["1"] || len(again.Groups[0].Rules) != 3 {
		t.Errorf("%+v", again)
	}
	if other := rules.Build("d", all, []rules.Machine{db("1")}); other.Of["1"] == plan.Of["1"] {
		t.Error("the groups of two clusters have one name")
	}
	if fewer := rules.Build("c", all[:1], []rules.Machine{db("1")}); fewer.Of["1"] == plan.Of["1"] {
		t.Error("the groups of other policies have the same name")
	}
}

// A machine gets the rules for its own ports.
func TestNamedPortsDiffer(t *testing.T) {
	p := parse(t, "p", `{podSelector: {}, ingress: [{ports: [{port: sql}]}]}`)
	other := db("2")
	other.Ports = []rules.Port{{Name: "sql", Protocol: corev1.ProtocolTCP, Number: 3306}}
	plan := rules.Build("c", []*networkingv1.NetworkPolicy{p}, []rules.Machine{db("1"), other, db("3")})
	if len(plan.Groups) != 2 || plan.Of["1"] == plan.Of["2"] || plan.Of["1"] != plan.Of["3"] {
		t.Errorf("%+v", plan)
	}
}

// Too many rules admit less, never more, and the policy says so.
func TestTooManyRules(t *testing.T) {
	p := parse(t, "p", `podSelector: {}`)
	var peers []networkingv1.NetworkPolicyPeer
	addr := netip.MustParseAddr("10.0.0.0")
	for range rules.MaxRules + 1 {
		peers = append(peers, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: addr.String() + "/32"}})
		addr = addr.Next()
	}
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: peers}}
	plan := rules.Build("c", []*networkingv1.NetworkPolicy{p}, []rules.Machine{db("1"), db("2")})
	if len(plan.Groups[0].Rules) != rules.MaxRules || len(plan.Faults) != 1 || !strings.Contains(plan.Faults[0].Text, "needs more than 1000 rules") {
		t.Errorf("%d rules, %d faults", len(plan.Groups[0].Rules), len(plan.Faults))
	}
}

// A policy whose peers, ports and exceptions multiply costs no more than others, and neither does one that selects no machine.
func TestPoliciesAreBounded(t *testing.T) {
	p := parse(t, "p", `podSelector: {}`)
	block := networkingv1.IPBlock{CIDR: "::/0"}
	for i := range 5000 {
		block.Except = append(block.Except, fmt.Sprintf("2001:db8:%x::1/128", i))
	}
	var r networkingv1.NetworkPolicyIngressRule
	for range 5000 {
		r.From = append(r.From, networkingv1.NetworkPolicyPeer{IPBlock: &block}, networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{}})
		r.Ports = append(r.Ports, networkingv1.NetworkPolicyPort{})
	}
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{r}
	all := []*networkingv1.NetworkPolicy{p}
	if n := testing.AllocsPerRun(1, func() { rules.Build("c", all, []rules.Machine{db("1")}) }); n > 100_000 {
		t.Errorf("%.0f allocations", n)
	}
	plan := rules.Build("c", all, []rules.Machine{db("1")})
	if len(plan.Groups[0].Rules) > rules.MaxRules || len(plan.Faults) != 1 || len(plan.Faults[0].Text) > 5000 {
		t.Errorf("%d rules, %d faults", len(plan.Groups[0].Rules), len(plan.Faults))
	}
	p.Namespace = "other"
	if n := testing.AllocsPerRun(1, func() { rules.Build("c", all, []rules.Machine{db("1")}) }); n > 100 {
		t.Errorf("%.0f allocations for a policy that selects nothing", n)
	}
}

// A policy with many faults tells some of them.
func TestFaultsAreBounded(t *testing.T) {
	p := parse(t, "p", `podSelector: {}`)
	for range 50 {
		p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}})
	}
	plan := rules.Build("c", []*networkingv1.NetworkPolicy{p}, []rules.Machine{db("1")})
	if n := strings.Count(plan.Faults[0].Text, "selects pods"); n != 10 {
		t.Errorf("%d faults", n)
	}
}
