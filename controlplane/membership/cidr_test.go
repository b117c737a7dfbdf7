package membership

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"

	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
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
		"the first of an empty range":            {in: "243.0.0.0/8", bits: 16, want: "243.0.0.0/16"},
		"a hole is filled":                       {in: "243.0.0.0/8", bits: 16, taken: cidrs("243.0.0.0/16", "243.2.0.0/16"), want: "243.1.0.0/16"},
		"a smaller block spoils a whole one":     {in: "243.0.0.0/8", bits: 16, taken: cidrs("243.0.128.0/20"), want: "243.1.0.0/16"},
		"a larger block is stepped over":         {in: "243.0.0.0/8", bits: 16, taken: cidrs("243.0.0.0/12"), want: "243.16.0.0/16"},
		"what is taken elsewhere does not count": {in: "243.0.0.0/8", bits: 16, taken: cidrs("242.0.0.0/8", "fd00::/8"), want: "243.0.0.0/16"},
		"IPv6":                                   {in: "fd00:1:2::/48", bits: 64, taken: cidrs("fd00:1:2::/64", "fd00:1:2:1::/64"), want: "fd00:1:2:2::/64"},
		"a full range":                           {in: "243.0.0.0/15", bits: 16, taken: cidrs("243.0.0.0/16", "243.1.0.0/16")},
		"the last of all addresses":              {in: "255.255.0.0/16", bits: 16, taken: cidrs("255.255.0.0/16")},
		"a range smaller than a block":           {in: "243.0.0.0/20", bits: 16},
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
}

// TestFirstFreeLaws: the block lies in the range, overlaps nothing, and no lower one would do.
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
		"one a family":           {cidrs("243.0.0.0/8", "fd00:1::/48"), true},
		"none":                   {nil, true},
		"two of a family":        {cidrs("243.0.0.0/8", "10.0.0.0/8"), false},
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
}

func TestRandomULA(t *testing.T) {
	a, b := randomULA(), randomULA()
	if !within(a, netip.MustParsePrefix("fd00::/8")) || a.Bits() != 48 || a != a.Masked() || a == b {
		t.Errorf("drew %s and %s", a, b)
	}
}

func TestCheckAddresses(t *testing.T) {
	ranges := cidrs("243.0.0.0/8")
	others := map[string]v1alpha1.MemberSpec{"b": {
		PodCIDRs: []string{"10.2.0.0/16"}, NodeCIDRs: []string{"192.0.2.2/32"}, ServiceCIDRs: []string{"10.96.0.0/12"},
	}}
	tests := map[string]struct {
		spec  v1alpha1.MemberSpec
		ok    bool
		notes int
	}{
		"distinct":                 {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.1.0.0/16"}, NodeCIDRs: []string{"192.0.2.1/32"}, ServiceCIDRs: []string{"10.200.0.0/16"}}, ok: true},
		"the same service CIDR":    {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.1.0.0/16"}, ServiceCIDRs: []string{"10.96.0.0/12"}}, ok: true, notes: 1},
		"pods on pods":             {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.2.128.0/24"}}},
		"pods on nodes":            {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"192.0.2.0/24"}}},
		"pods on services":         {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"10.97.0.0/16"}}},
		"nodes on nodes":           {spec: v1alpha1.MemberSpec{NodeCIDRs: []string{"192.0.2.2/32"}}},
		"services on pods":         {spec: v1alpha1.MemberSpec{ServiceCIDRs: []string{"10.2.0.0/16"}}},
		"pods on ClusterSetIPs":    {spec: v1alpha1.MemberSpec{PodCIDRs: []string{"243.1.0.0/16"}}},
		"service on ClusterSetIPs": {spec: v1alpha1.MemberSpec{ServiceCIDRs: []string{"240.0.0.0/4"}}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var j Joined
			err := checkAddresses(tc.spec, ranges, others, &j)
			if (err == nil) != tc.ok || err != nil && !errors.Is(err, ErrOverlap) {
				t.Errorf("got %v", err)
			}
			if len(j.Notes) != tc.notes {
				t.Errorf("notes %q, want %d", j.Notes, tc.notes)
			}
		})
	}
}

func TestNewerDefinitionsStay(t *testing.T) {
	crd := func(release, schema string) *apiextensionsv1.CustomResourceDefinition {
		labels := map[string]string{}
		if release != "" {
			labels[mcscrd.ReleaseVersionLabel] = release
		}
		if schema != "" {
			labels[mcscrd.CustomResourceDefinitionSchemaRevisionLabel] = schema
		}
		return &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
	}
	tests := map[string]struct {
		have, ours *apiextensionsv1.CustomResourceDefinition
		want       bool
	}{
		"the same":        {crd("v0.5.2", "0"), crd("v0.5.2", "0"), false},
		"older":           {crd("v0.5.1", "7"), crd("v0.5.2", "0"), false},
		"newer release":   {crd("v0.10.0", "0"), crd("v0.5.2", "0"), true},
		"newer schema":    {crd("v0.5.2", "2"), crd("v0.5.2", "1"), true},
		"without labels":  {crd("", ""), crd("v0.5.2", "0"), false},
		"ours has none":   {crd("", ""), crd("", ""), false},
		"a strange label": {crd("latest", "x"), crd("v0.5.2", "0"), false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := newer(tc.have, tc.ours); got != tc.want {
				t.Errorf("newer = %t", got)
			}
		})
	}
}

func TestBrokerInfoFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "info.yaml")
	want := BrokerInfo{
		Kind: brokerInfoKind, ClusterSetID: "prod", Server: "https://192.0.2.1:6443", CA: []byte("pem"),
		Namespace: "isthmus-broker", Token: "secret", Expires: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
	for range 2 { // the second time over the first
		if err := want.Write(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := ReadBrokerInfo(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if err := want.Check(want.Expires); err != nil {
		t.Errorf("at its last moment: %v", err)
	}
	if err := want.Check(want.Expires.Add(1)); !errors.Is(err, ErrExpired) {
		t.Errorf("after its last moment: %v", err)
	}
}
