package clusterset_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, t := range texts {
		all = append(all, netip.MustParsePrefix(t))
	}
	return all
}

// registryOfThree knows a, which joined first, b, which claims a part of a's addresses too, and left, which has
// left and whose addresses c has now.
func registryOfThree() *clusterset.MemberRegistry {
	day := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	return clusterset.NewMemberRegistry(prefixes("243.0.0.0/8", "fd00:243::/48"), []clusterset.Member{
		{ID: "c", JoinedAt: day.Add(3 * time.Hour), Routed: prefixes("10.9.0.0/16"), Blocks: prefixes("243.3.0.0/16")},
		{ID: "b", JoinedAt: day.Add(time.Hour), Routed: prefixes("10.2.0.0/16", "10.1.128.0/17", "243.2.0.0/16"), Services: prefixes("10.96.0.0/16"), Blocks: prefixes("243.2.0.0/16")},
		{ID: "a", JoinedAt: day, Routed: prefixes("10.1.0.0/16", "fd00:1::/64"), Services: prefixes("10.96.0.0/16"), Blocks: prefixes("243.1.0.0/16", "fd00:243:0:1::/64")},
		{ID: "left", JoinedAt: day, LeftAt: day.Add(2 * time.Hour), Routed: prefixes("10.9.0.0/16"), Blocks: prefixes("243.9.0.0/16")},
	})
}

func TestRegistryChecksEndpoints(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		id      clusterset.ClusterID
		address string
		refused string // part of the reason; empty: it is believed
	}{
		"a pod":                          {"a", "10.1.2.3", ""},
		"a pod, IPv6":                    {"a", "fd00:1::7", ""},
		"a mapped address":               {"a", "::ffff:10.1.2.3", ""},
		"a Service":                      {"a", "10.96.0.1", ""},
		"the same Service CIDR":          {"b", "10.96.0.1", ""},
		"outside":                        {"a", "10.3.0.1", "outside of the CIDRs"},
		"of another member":              {"b", "10.1.2.3", "outside of the CIDRs"},
		"claimed, but an older member's": {"b", "10.1.128.1", "joined earlier"},
		"and the older member keeps it":  {"a", "10.1.128.1", ""},
		"what a member that left had":    {"c", "10.9.0.1", ""},
		"of a member that left":          {"left", "10.9.0.1", "not a member"},
		"of a stranger":                  {"evil", "10.1.2.3", "not a member"},
		"a ClusterSetIP, though claimed": {"b", "243.2.0.1", "range of ClusterSetIPs"},
		"loopback":                       {"a", "127.0.0.1", "loopback"},
		"metadata service":               {"a", "169.254.169.254", "link-local"},
		"multicast":                      {"a", "224.0.0.1", "multicast"},
		"unspecified":                    {"a", "::", "unspecified"},
	}
	registry := registryOfThree()
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkRefusal(t, registry.CheckEndpoint(tt.id, netip.MustParseAddr(tt.address)), tt.refused)
		})
	}
}

// A member extends itself inside of its own supernet and nowhere else, and no member has addresses of another one's supernet.
func TestRegistryExtendsInsideOfSupernets(t *testing.T) {
	t.Parallel()
	day := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	registry := clusterset.NewMemberRegistry(prefixes("243.0.0.0/8"), []clusterset.Member{
		{
			ID: "a", JoinedAt: day, Routed: prefixes("10.128.0.0/24"), Supernets: prefixes("10.128.0.0/10"),
			Extended: prefixes("10.128.7.0/24", "10.1.7.0/24", "10.0.0.0/8", "0.0.0.0/0"),
		},
		{ID: "b", JoinedAt: day.Add(time.Hour), Routed: prefixes("10.1.0.0/16", "10.129.0.0/16"), Extended: prefixes("10.128.7.0/24", "10.2.0.0/16")},
		{ID: "c", JoinedAt: day.Add(2 * time.Hour), Routed: prefixes("10.3.0.0/16"), Supernets: prefixes("10.128.0.0/9"), Extended: prefixes("10.128.9.0/24", "10.200.0.0/24")},
		{ID: "left", JoinedAt: day, LeftAt: day.Add(time.Hour), Supernets: prefixes("10.64.0.0/10"), Extended: prefixes("10.64.1.0/24")},
		{ID: "d", JoinedAt: day.Add(3 * time.Hour), Routed: prefixes("10.64.0.0/16")},
	})
	for name, tt := range map[string]struct {
		id      clusterset.ClusterID
		address string
		refused string // part of the reason; empty: it is believed
	}{
		"registered":                             {"a", "10.128.0.1", ""},
		"extended":                               {"a", "10.128.7.1", ""},
		"in the supernet, not extended":          {"a", "10.128.8.1", "outside of the CIDRs"},
		"extended beyond the supernet":           {"a", "10.1.7.1", "outside of the CIDRs"},
		"extended around the supernet":           {"a", "10.9.0.1", "outside of the CIDRs"},
		"extended into another's supernet":       {"b", "10.128.7.1", "outside of the CIDRs"},
		"extended without a supernet":            {"b", "10.2.0.1", "outside of the CIDRs"},
		"registered in another's supernet":       {"b", "10.129.0.1", "joined earlier"},
		"its own, beside that":                   {"b", "10.1.0.1", ""},
		"supernets overlap: of the later member": {"c", "10.128.9.1", "joined earlier"},
		"beside the overlap":                     {"c", "10.200.0.1", ""},
		"of a member that left":                  {"left", "10.64.1.1", "not a member"},
		"in the supernet of one that left":       {"d", "10.64.0.1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := netip.MustParseAddr(tt.address)
			checkRefusal(t, registry.CheckEndpoint(tt.id, a), tt.refused)
			checkRefusal(t, registry.CheckEndpointFor("d", tt.id, a, false), tt.refused)
		})
	}
}

func checkRefusal(t *testing.T, err error, want string) {
	t.Helper()
	if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestRegistryChecksAddresses(t *testing.T) {
	t.Parallel()
	registry := registryOfThree()
	tests := map[string]struct {
		by                  clusterset.ClusterID
		address             string
		refused, remembered string // parts of the reasons
	}{
		"of its block":                     {"a", "243.1.0.1", "", ""},
		"of its IPv6 block":                {"a", "fd00:243:0:1::1", "", ""},
		"of another's block":               {"a", "243.2.0.1", "outside of the block", "block of cluster b"},
		"of nobody's block":                {"a", "243.77.0.1", "outside of the block", ""},
		"allocated by one that left":       {"left", "243.9.0.1", "", ""},
		"outside of the range":             {"a", "10.1.0.1", "outside of the ranges", "outside of the ranges"},
		"loopback":                         {"a", "127.0.0.1", "loopback", "loopback"},
		"allocated by one that left, kept": {"b", "243.9.0.1", "outside of the block", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkRefusal(t, registry.CheckIP(tt.by, netip.MustParseAddr(tt.address)), tt.refused)
			checkRefusal(t, registry.CheckRemembered(tt.by, netip.MustParseAddr(tt.address)), tt.remembered)
		})
	}
}

func TestNobodyExportedBeforeHeJoined(t *testing.T) {
	t.Parallel()
	registry := registryOfThree()
	a, ok := registry.Member("a")
	if !ok {
		t.Fatal("a is not a member")
	}
	if got := registry.ExportedAt("a", time.Unix(0, 0)); !got.Equal(a.JoinedAt) {
		t.Errorf("an export from 1970 counts from %s", got)
	}
	later := a.JoinedAt.Add(time.Minute)
	if got := registry.ExportedAt("a", later); !got.Equal(later) {
		t.Errorf("an export from %s counts from %s", later, got)
	}
}

func TestPlace(t *testing.T) {
	t.Parallel()
	registry := registryOfThree()
	a, _ := registry.Member("a")
	at := func(minutes int) time.Time { return a.JoinedAt.Add(time.Duration(minutes) * time.Minute) }
	for name, tt := range map[string]struct {
		claim clusterset.Claim
		want  time.Time
	}{
		"written at once":               {clusterset.Claim{Exported: at(60), Written: at(60)}, at(60)},
		"written after a restart":       {clusterset.Claim{Exported: at(60), Written: at(62)}, at(60)},
		"written late":                  {clusterset.Claim{Exported: at(60), Written: at(64)}, at(64)},
		"back-dated":                    {clusterset.Claim{Exported: time.Unix(0, 0), Written: at(64)}, at(64)},
		"of a clock that is ahead":      {clusterset.Claim{Exported: at(90), Written: at(60)}, at(90)},
		"before it joined":              {clusterset.Claim{Exported: at(-2), Written: at(-1)}, at(0)},
		"by the broker's time":          {clusterset.Claim{Written: at(60)}, at(60)},
		"written again":                 {clusterset.Claim{Exported: at(60), Written: at(900), Remembered: at(60)}, at(60)},
		"written again, once late":      {clusterset.Claim{Exported: at(60), Written: at(900), Remembered: at(64)}, at(64)},
		"written again, back-dated":     {clusterset.Claim{Exported: at(10), Written: at(900), Remembered: at(60)}, at(60)},
		"created again":                 {clusterset.Claim{Exported: at(800), Written: at(900), Remembered: at(60)}, at(800)},
		"created and written again":     {clusterset.Claim{Exported: at(899), Written: at(900), Remembered: at(60)}, at(899)},
		"again, by the broker's time":   {clusterset.Claim{Written: at(900), Remembered: at(60)}, at(60)},
		"a memory that is worth little": {clusterset.Claim{Exported: at(10), Written: at(60), Remembered: at(70)}, at(60)},
	} {
		if got := registry.Place("a", tt.claim); !got.Equal(tt.want) {
			t.Errorf("%s: counts from %s, want %s", name, got, tt.want)
		}
	}
}

func TestEndpointsForAReader(t *testing.T) {
	t.Parallel()
	registry := clusterset.NewMemberRegistry(prefixes("243.0.0.0/8"), []clusterset.Member{
		{ID: "pods", Routed: prefixes("10.1.0.0/16"), Services: prefixes("10.96.0.0/16")},
		{ID: "vips", Routed: prefixes("10.2.0.0/16"), Services: prefixes("10.97.0.0/16"), ServiceVIP: true},
		{ID: "same", Routed: prefixes("10.3.0.0/16"), Services: prefixes("10.97.0.0/16", "10.96.0.0/16"), ServiceVIP: true},
		{ID: "evil", Routed: prefixes("10.4.0.0/16", "10.96.0.0/12")},
		{ID: "left", Services: prefixes("10.97.0.0/16"), LeftAt: time.Unix(1, 0)},
	})
	for name, tt := range map[string]struct {
		reader, id clusterset.ClusterID
		address    string
		declined   bool
		refused    string
	}{
		"a pod":                                  {"vips", "pods", "10.1.0.1", false, ""},
		"a Service of a member of pods":          {"vips", "pods", "10.96.0.5", false, "registered to export pods"},
		"one that declined":                      {"vips", "pods", "10.96.0.5", true, ""},
		"one that declined, in the same CIDR":    {"same", "pods", "10.96.0.5", true, "service CIDRs of cluster same itself"},
		"a Service of a member of VIPs":          {"pods", "vips", "10.97.0.5", false, ""},
		"... in the same CIDR":                   {"same", "vips", "10.97.0.5", false, "service CIDRs of cluster same itself"},
		"... at home":                            {"vips", "vips", "10.97.0.5", false, ""},
		"the reader's API server, as a pod":      {"pods", "evil", "10.96.0.1", false, "service CIDRs of cluster pods itself"},
		"... of a mapped form":                   {"pods", "evil", "::ffff:10.96.0.1", false, "service CIDRs of cluster pods itself"},
		"outside":                                {"pods", "vips", "10.99.0.5", true, "outside of the CIDRs"},
		"a reader that the registry lacks":       {"new", "vips", "10.97.0.5", false, ""},
		"a Service that declined, as ClusterSet": {"pods", "vips", "243.0.0.1", true, "range of ClusterSetIPs"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkRefusal(t, registry.CheckEndpointFor(tt.reader, tt.id, netip.MustParseAddr(tt.address), tt.declined), tt.refused)
		})
	}
	if ids := registry.Refusing("vips", netip.MustParseAddr("10.97.0.5"), false); !slices.Equal(ids, []clusterset.ClusterID{"same"}) {
		t.Errorf("refusing: %v, want only the present member with that service CIDR", ids)
	}
}
