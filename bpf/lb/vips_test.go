package lb

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// clusterOf is the addresses of a cluster: its Services, its pods and a node.
var clusterOf = []Own{
	{netip.MustParsePrefix("10.96.0.0/12"), "Services"},
	{netip.MustParsePrefix("10.96.0.1/32"), "API server"},
	{netip.MustParsePrefix("10.201.0.0/16"), "pods"},
	{netip.MustParsePrefix("192.0.2.11/32"), "nodes"},
	{netip.MustParsePrefix("243.9.0.0/16"), "nodes"},
	{netip.MustParsePrefix("fd00:96::/112"), "Services"},
}

// An import is served only at addresses inside of the ranges, and never at one that the cluster uses itself.
func TestServedVIPs(t *testing.T) {
	ranges := prefixes("243.0.0.0/8", "fd00:243::/48")
	served := map[netip.Addr]cs.ServiceName{
		netip.MustParseAddr("243.0.0.5"): {Namespace: "demo", Name: "hello"}, netip.MustParseAddr("243.0.0.6"): {Namespace: "demo", Name: "other"},
		netip.MustParseAddr("243.0.0.7"): {}, netip.MustParseAddr("10.96.0.1"): {Namespace: "demo", Name: "hello"},
	}
	for name, c := range map[string]struct {
		vips   *VIPs
		vip    string
		reason Reason
		says   string // words of the Problem
	}{
		"a ClusterSetIP":                    {NewVIPs(ranges, clusterOf, nil), "243.0.0.5", "", ""},
		"a ClusterSetIP of IPv6":            {NewVIPs(ranges, clusterOf, nil), "fd00:243::5", "", ""},
		"in the IPv6 form of IPv4":          {NewVIPs(ranges, clusterOf, nil), "::ffff:243.0.0.5", "", ""},
		"no rules, as on a gateway":         {nil, "192.0.2.1", "", ""},
		"the API server":                    {NewVIPs(ranges, clusterOf, nil), "10.96.0.1", VIPOfCluster, "10.96.0.0/12 Services delete"},
		"the API server, as IPv6":           {NewVIPs(ranges, clusterOf, nil), "::ffff:10.96.0.1", VIPOfCluster, "10.96.0.1 10.96.0.0/12"},
		"a Service of IPv6":                 {NewVIPs(ranges, clusterOf, nil), "fd00:96::1", VIPOfCluster, "Services"},
		"a pod":                             {NewVIPs(ranges, clusterOf, nil), "10.201.3.4", VIPOfCluster, "pods"},
		"a node":                            {NewVIPs(ranges, clusterOf, nil), "192.0.2.11", VIPOfCluster, "nodes"},
		"a node inside of the ranges":       {NewVIPs(ranges, clusterOf, nil), "243.9.0.1", VIPOfCluster, "243.9.0.0/16"},
		"the last address before a range":   {NewVIPs(ranges, clusterOf, nil), "242.255.255.255", VIPOutsideRanges, "243.0.0.0/8 fd00:243::/48 Federation"},
		"the Internet":                      {NewVIPs(ranges, nil, nil), "203.0.113.1", VIPOutsideRanges, "delete"},
		"no range known":                    {NewVIPs(nil, clusterOf, nil), "243.0.0.5", VIPRangesUnknown, "--clusterset-ip-range Member"},
		"no range known, served already":    {NewVIPs(nil, clusterOf, served), "243.0.0.5", "", ""},
		"no range known, of another":        {NewVIPs(nil, clusterOf, served), "243.0.0.6", VIPRangesUnknown, ""},
		"no range known, of an unnamed one": {NewVIPs(nil, clusterOf, served), "243.0.0.7", "", ""},
		"served already, and the cluster's": {NewVIPs(nil, clusterOf, served), "10.96.0.1", VIPOfCluster, ""},
		"served already, but outside":       {NewVIPs(prefixes("242.0.0.0/8"), clusterOf, served), "243.0.0.5", VIPOutsideRanges, ""},
	} {
		t.Run(name, func(t *testing.T) {
			in := snapshotOf(service("hello", c.vip))
			in.VIPs = c.vips
			p := NewPlanner(NewState())
			_, problems := p.Plan(in)
			_, programmed := p.State().Frontends[Address{netip.AddrPortFrom(netip.MustParseAddr(c.vip).Unmap(), 80), cs.TCP}]
			if programmed != (c.reason == "") {
				t.Errorf("%s has a frontend: %v", c.vip, programmed)
			}
			if c.reason == "" {
				if len(problems) > 0 {
					t.Errorf("problems %v", problems)
				}
				return
			}
			if len(problems) != 1 || problems[0].Reason != c.reason || !c.reason.RefusesVIP() || !slices.Contains(Reasons(), c.reason) {
				t.Fatalf("problems %v, want one of %s", problems, c.reason)
			}
			for word := range strings.FieldsSeq(c.says) {
				if !strings.Contains(problems[0].Message, word) {
					t.Errorf("%q does not say %q", problems[0].Message, word)
				}
			}
		})
	}
}

// A refused address costs neither the other address of its Service nor another Service anything.
func TestRefusedVIPCostsItself(t *testing.T) {
	bad := service("bad", "10.96.0.1", slice("10.1.0.1"), slice("fd00:1::1"))
	bad.IPs = append(bad.IPs, netip.MustParseAddr("fd00:243::5"))
	in := snapshotOf(bad, service("good", "243.0.0.5", slice("10.1.0.2")))
	in.VIPs = NewVIPs(prefixes("243.0.0.0/8", "fd00:243::/48"), clusterOf, nil)
	p := NewPlanner(NewState())
	_, problems := p.Plan(in)
	want := "FE 243.0.0.5:80/TCP id=2 service=demo/good backends=[10.1.0.2:8080]\n" +
		"FE [fd00:243::5]:80/TCP id=1 service=demo/bad backends=[[fd00:1::1]:8080]\n" +
		"BE id=1 [fd00:1::1]:8080/TCP cluster=a\nBE id=2 10.1.0.2:8080/TCP cluster=a\n"
	if diff := cmp.Diff(want, p.State().Text()); diff != "" || len(problems) != 1 {
		t.Errorf("problems %v; maps (-want +got):\n%s", problems, diff)
	}
}

// When the ranges or the cluster's own addresses change, the Services that this concerns are rebuilt, and no others.
func TestChangedVIPs(t *testing.T) {
	both := snapshotOf(service("a", "243.0.0.5", slice("10.1.0.1")), service("b", "242.0.0.5", slice("10.1.0.2")))
	p, have := NewPlanner(NewState()), NewState()
	for i, c := range []struct {
		vips   *VIPs
		want   string // the VIPs with a frontend
		writes int
	}{
		{NewVIPs(nil, nil, nil), "", 0},
		{NewVIPs(prefixes("243.0.0.0/8"), nil, nil), "243.0.0.5", 5},                          // service, cluster, backend, slot, frontend
		{NewVIPs(prefixes("243.0.0.0/8", "242.0.0.0/8"), nil, nil), "242.0.0.5 243.0.0.5", 4}, // the cluster is there already
		{NewVIPs(prefixes("243.0.0.0/8", "242.0.0.0/8"), clusterOf, nil), "242.0.0.5 243.0.0.5", 0},
		{NewVIPs(prefixes("242.0.0.0/8"), clusterOf, nil), "242.0.0.5", 4},
	} {
		in := both
		in.VIPs = c.vips
		plan, _ := p.Plan(in)
		have.Apply(plan)
		var vips []string
		for _, a := range slices.SortedFunc(maps.Keys(have.Frontends), Address.Compare) {
			vips = append(vips, a.AddrPort.Addr().String())
		}
		if strings.Join(vips, " ") != c.want || plan.Writes() != c.writes {
			t.Errorf("step %d: %v after %d writes, want %s after %d", i, vips, plan.Writes(), c.want, c.writes)
		}
	}
}

// A range that contains addresses of the cluster would refuse its Services: it is not programmed.
func TestRangeOverTheClusterRefusesNothing(t *testing.T) {
	in := snapshotOf()
	in.Ranges = prefixes("10.0.0.0/8", "10.201.7.0/24", "192.0.2.0/28", "243.0.0.0/16", "fd00:243::/48", "::/0")
	in.VIPs = NewVIPs(in.Ranges, clusterOf, nil)
	p := NewPlanner(NewState())
	p.Plan(in)
	if diff := cmp.Diff("RANGE 243.0.0.0/16\nRANGE fd00:243::/48\n", p.State().Text()); diff != "" {
		t.Errorf("maps (-want +got):\n%s", diff)
	}
}

// A prefixSet finds what a search through all prefixes finds, however they overlap.
func TestPrefixSet(t *testing.T) {
	addr := rapid.Custom(func(t *rapid.T) netip.Addr {
		b := byte(rapid.IntRange(0, 7).Draw(t, "byte"))
		if rapid.Bool().Draw(t, "v6") {
			return netip.AddrFrom16([16]byte{0: 0xfd, 15: b << 5})
		}
		return netip.AddrFrom4([4]byte{b << 5, 0, 0, 0})
	})
	rapid.Check(t, func(t *rapid.T) {
		all := rapid.SliceOf(rapid.Custom(func(t *rapid.T) netip.Prefix {
			a := addr.Draw(t, "addr")
			bits := rapid.IntRange(0, 4).Draw(t, "bits")
			if a.Is6() {
				bits += 120
			}
			return netip.PrefixFrom(a, bits)
		})).Draw(t, "prefixes")
		a := addr.Draw(t, "asked")
		found, is := newPrefixSet(all).find(a)
		want := slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
		if is != want || is && !found.Contains(a) {
			t.Errorf("%s in %v: found %s, %v", a, all, found, is)
		}
		r := netip.PrefixFrom(a, max(0, a.BitLen()-rapid.IntRange(0, 6).Draw(t, "host bits")-rapid.IntRange(0, 1).Draw(t, "more")*24))
		want = slices.ContainsFunc(all, r.Overlaps)
		if is := newPrefixSet(all).overlaps(r); is != want {
			t.Errorf("%s overlaps %v: %v", r, all, is)
		}
	})
}
