package membership

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func cidrs(texts ...string) []netip.Prefix {
	var ps []netip.Prefix
	for _, t := range texts {
		ps = append(ps, netip.MustParsePrefix(t))
	}
	return ps
}

func TestFirstFree(t *testing.T) {
	tests := map[string]struct {
		in    string
		bits  int
		taken []netip.Prefix
		want  string // "" means ErrNoBlock
	}{
		"the first block of an empty range":    {in: "243.0.0.0/8", bits: 16, want: "243.0.0.0/16"},
		"a gap is filled":                      {in: "243.0.0.0/8", bits: 16, taken: cidrs("243.0.0.0/16", "243.2.0.0/16"), want: "243.1.0.0/16"},
		"a smaller block occupies a whole one": {in: "243.0.0.0/8", bits: 16, taken: cidrs("243.0.128.0/20"), want: "243.1.0.0/16"},
		"a larger block is skipped":            {in: "243.0.0.0/8", bits: 16, taken: cidrs("243.0.0.0/12"), want: "243.16.0.0/16"},
		"blocks outside the range are ignored": {in: "243.0.0.0/8", bits: 16, taken: cidrs("242.0.0.0/8", "fd00::/8"), want: "243.0.0.0/16"},
		"IPv6":                                 {in: "fd00:1:2::/48", bits: 64, taken: cidrs("fd00:1:2::/64", "fd00:1:2:1::/64"), want: "fd00:1:2:2::/64"},
		"a full range":                         {in: "243.0.0.0/15", bits: 16, taken: cidrs("243.0.0.0/16", "243.1.0.0/16")},
		"the end of the address space":         {in: "255.255.0.0/16", bits: 16, taken: cidrs("255.255.0.0/16")},
		"a range smaller than a block":         {in: "243.0.0.0/20", bits: 16},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := firstFree(netip.MustParsePrefix(tc.in), tc.bits, tc.taken)
			if tc.want == "" {
				if !errors.Is(err, ErrNoBlock) {
					t.Errorf("got %v, %v; want ErrNoBlock", got, err)
				}
				return
			}
			if err != nil || got != netip.MustParsePrefix(tc.want) {
				t.Errorf("got %v, %v; want %s", got, err, tc.want)
			}
		})
	}
	conformance.Holds(t, "L37")
}

// The block lies in the range and overlaps no taken one, and no lower block does.
func TestFirstFreeLaws(t *testing.T) {
	rng := netip.MustParsePrefix("243.0.0.0/24")
	const bits = 28
	rapid.Check(t, func(t *rapid.T) {
		var taken []netip.Prefix
		for range rapid.IntRange(0, 12).Draw(t, "n") {
			a := netip.AddrFrom4([4]byte{243, 0, 0, rapid.Byte().Draw(t, "addr")})
			taken = append(taken, netip.PrefixFrom(a, rapid.IntRange(24, 32).Draw(t, "bits")).Masked())
		}
		var want netip.Prefix
		for i := range 16 {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{243, 0, 0, byte(16 * i)}), bits)
			if !slices.ContainsFunc(taken, p.Overlaps) {
				want = p
				break
			}
		}
		got, err := firstFree(rng, bits, taken)
		if got != want || (err != nil) == want.IsValid() {
			t.Fatalf("taken %v: got %v, %v; want %v", taken, got, err, want)
		}
	})
	conformance.Holds(t, "L37")
}

func TestParseCIDRsRefuses(t *testing.T) {
	for _, text := range []string{"", "10.0.0.0", "10.0.0.0/33", "10.0.0.1/8", "::1/64", "fd00::/-1", "a/8"} {
		if got, err := ParseCIDRs([]string{"10.0.0.0/8", text}); err == nil {
			t.Errorf("%q was taken as %v", text, got)
		}
	}
}

func TestCheckVIPs(t *testing.T) {
	tests := map[string]struct {
		in []netip.Prefix
		ok bool
	}{
		"one per family":         {cidrs("243.0.0.0/8", "fd00:1::/48"), true},
		"none":                   {nil, true},
		"two per family":         {cidrs("243.0.0.0/8", "10.0.0.0/8"), false},
		"all addresses":          {cidrs("0.0.0.0/0"), false},
		"loopback":               {cidrs("127.0.0.0/16"), false},
		"link-local":             {cidrs("169.254.0.0/16"), false},
		"link-local IPv6":        {cidrs("fe80::/64"), false},
		"multicast":              {cidrs("224.0.0.0/8"), false},
		"class E with broadcast": {cidrs("240.0.0.0/4"), false},
		"too small":              {cidrs("243.0.0.0/31"), false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if err := checkVIPs(tc.in); (err == nil) != tc.ok {
				t.Errorf("checkVIPs(%v) = %v", tc.in, err)
			}
		})
	}
	conformance.Holds(t, "L37")
}

func TestRandomULA(t *testing.T) {
	a, b := randomULA(), randomULA()
	if !clusterset.Within(a, netip.MustParsePrefix("fd00::/8")) || a.Bits() != 48 || a != a.Masked() || a == b {
		t.Errorf("drew %s and %s", a, b)
	}
}

func TestCheckAddresses(t *testing.T) {
	ranges := cidrs("243.0.0.0/8")
	others := []claim{{id: "b", reservation: reservation{Spec: v1alpha1.MemberSpec{
		PodCIDRs: []string{"10.2.0.0/16"}, NodeCIDRs: []string{"192.0.2.2/32"}, ServiceCIDRs: []string{"10.96.0.0/12"}, ExtraCIDRs: []string{"198.51.100.0/24"},
		PodSupernets: []string{"10.160.0.0/11"},
	}}}}
	vips := v1alpha1.Settings{Endpoints: v1alpha1.EndpointsServiceVIP}
	lighthouse := v1alpha1.Settings{Profile: v1alpha1.ProfileLighthouse}
	tests := map[string]struct {
		spec  v1alpha1.MemberSpec
		ok    bool
		notes int
	}{
		"distinct":                              {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.1.0.0/16"}, NodeCIDRs: []string{"192.0.2.1/32"}, ServiceCIDRs: []string{"10.200.0.0/16"}}, ok: true},
		"the same service CIDR":                 {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.1.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/12"}}, ok: true, notes: 1},
		"the same, as endpoints of exports":     {spec: v1alpha1.MemberSpec{ServiceCIDRs: []string{"10.96.0.0/12"}, Settings: vips}},
		"the same, with the lighthouse profile": {spec: v1alpha1.MemberSpec{ServiceCIDRs: []string{"10.96.0.0/12"}, Settings: lighthouse}},
		"pods overlap pods":                     {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.2.128.0/24"}}},
		"pods overlap nodes":                    {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"192.0.2.0/24"}}},
		"pods overlap services":                 {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.97.0.0/16"}}},
		"pods overlap extra CIDRs":              {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"198.51.100.0/25"}}},
		"extra CIDRs overlap pods":              {spec: v1alpha1.MemberSpec{ExtraCIDRs: []string{"10.2.0.0/24"}}},
		"extra CIDRs overlap ClusterSetIPs":     {spec: v1alpha1.MemberSpec{ExtraCIDRs: []string{"243.9.0.0/24"}}},
		"nodes overlap nodes":                   {spec: v1alpha1.MemberSpec{NodeCIDRs: []string{"192.0.2.2/32"}}},
		"services overlap pods":                 {spec: v1alpha1.MemberSpec{ServiceCIDRs: []string{"10.2.0.0/16"}}},
		"a supernet of its own":                 {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.128.0.0/24"}, PodSupernets: []string{"10.128.0.0/11"}}, ok: true},
		"supernets overlap":                     {spec: v1alpha1.MemberSpec{PodSupernets: []string{"10.160.0.0/10"}}},
		"a supernet overlaps pods":              {spec: v1alpha1.MemberSpec{PodSupernets: []string{"10.2.0.0/15"}}},
		"a supernet overlaps services":          {spec: v1alpha1.MemberSpec{PodSupernets: []string{"10.100.0.0/16"}}},
		"a supernet overlaps ClusterSetIPs":     {spec: v1alpha1.MemberSpec{PodSupernets: []string{"240.0.0.0/4"}}},
		"pods overlap a supernet":               {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.170.1.0/24"}}},
		"nodes overlap a supernet":              {spec: v1alpha1.MemberSpec{NodeCIDRs: []string{"10.170.1.1/32"}}},
		"extra CIDRs overlap a supernet":        {spec: v1alpha1.MemberSpec{ExtraCIDRs: []string{"10.170.0.0/16"}}},
		"pods overlap ClusterSetIPs":            {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"243.1.0.0/16"}}},
		"services overlap ClusterSetIPs":        {spec: v1alpha1.MemberSpec{ServiceCIDRs: []string{"240.0.0.0/4"}}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			notes, err := checkAddresses(tc.spec, ranges, others)
			if (err == nil) != tc.ok || err != nil && !errors.Is(err, ErrOverlap) {
				t.Errorf("got %v", err)
			}
			if len(notes) != tc.notes {
				t.Errorf("notes %q, want %d", notes, tc.notes)
			}
		})
	}
}

func TestBlockBits(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		size int64
		want int
	}{
		"the default":                {"243.0.0.0/8", 0, 16},
		"a power of two":             {"243.0.0.0/8", 4096, 20},
		"rounded up":                 {"243.0.0.0/8", 4097, 19},
		"half of a small range":      {"243.0.0.0/16", 0, 17},
		"half of a tiny range":       {"243.0.0.0/29", 0, 30},
		"IPv6":                       {"fd00::/48", 4096, 64},
		"half of a small IPv6 range": {"fd00::/112", 0, 113},
	} {
		t.Run(name, func(t *testing.T) {
			if got := blockBits(netip.MustParsePrefix(tc.in), tc.size); got != tc.want {
				t.Errorf("blockBits = %d, want %d", got, tc.want)
			}
		})
	}
	conformance.Holds(t, "L37")
}
