package clusterset_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func addrs(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

// The allocator adds the second family while it exports the Service and can. Otherwise the oldest exporter with such a block does.
func TestExtender(t *testing.T) {
	t.Parallel()
	type ids = []clusterset.ClusterID
	for name, tt := range map[string]struct {
		listed, exporters, blocks ids
		want                      clusterset.ClusterID
	}{
		"the allocator exports":                           {ids{"a", "b"}, ids{"b", "a"}, ids{"a", "b"}, "a"},
		"the allocator is listed, without a record":       {ids{"a", "b"}, ids{"b"}, ids{"a", "b"}, "a"},
		"the allocator has a record, and is not listed":   {ids{"b"}, ids{"b", "a"}, ids{"a", "b"}, "a"},
		"the allocator has left":                          {ids{"b", "c"}, ids{"c", "b"}, ids{"a", "b", "c"}, "c"},
		"the allocator has no block of the family":        {ids{"a", "b", "c"}, ids{"a", "b", "c"}, ids{"b", "c"}, "b"},
		"nor has the oldest exporter":                     {ids{"b", "c"}, ids{"b", "c"}, ids{"a", "c"}, "c"},
		"nobody who exports has a block of the family":    {ids{"b"}, ids{"b"}, ids{"a", "c"}, ""},
		"nobody exports but who has a block of no family": {nil, nil, ids{"a"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := clusterset.Aggregate{IPs: addrs("fd00:243::1"), AllocatedBy: "a", Clusters: tt.listed}
			hasBlock := func(id clusterset.ClusterID, f clusterset.Family) bool {
				return f == clusterset.IPv4 && slices.Contains(tt.blocks, id)
			}
			if have := a.Extender(clusterset.IPv4, tt.exporters, hasBlock); have != tt.want {
				t.Errorf("%q adds the address, want %q", have, tt.want)
			}
		})
	}
}

// An address that another member added counts while an exporter has its family, one of the allocator always.
func TestServed(t *testing.T) {
	t.Parallel()
	both := addrs("fd00:243::1", "243.2.0.1")
	six, four := of("b", 1), of("c", 2)
	six.Families = []clusterset.Family{clusterset.IPv6}
	for name, tt := range map[string]struct {
		by      clusterset.ClusterID
		exports []clusterset.Export
		want    int
	}{
		"the allocator's, no exporter has the family": {"", []clusterset.Export{six}, 2},
		"another's, no exporter has the family":       {"b", []clusterset.Export{six}, 1},
		"another's, the younger has the family":       {"b", []clusterset.Export{six, four}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := clusterset.Aggregate{IPs: both, AllocatedBy: "a", ExtendedBy: tt.by}
			if have := a.Served(tt.exports); !slices.Equal(have, both[:tt.want]) {
				t.Errorf("the import has %v, want %v", have, both[:tt.want])
			}
		})
	}
}

// A record has only those addresses that its member may remember, so it takes none from who knows more.
func TestRecalled(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ known, remembered, want []netip.Addr }{
		"nothing remembered":       {addrs("243.1.0.1"), nil, addrs("243.1.0.1")},
		"nothing known":            {nil, addrs("243.1.0.1"), addrs("243.1.0.1")},
		"a part remembered":        {addrs("fd00:243::1", "243.1.0.1"), addrs("243.1.0.1"), addrs("fd00:243::1", "243.1.0.1")},
		"another one remembered":   {addrs("243.1.0.1"), addrs("243.2.0.1"), addrs("243.2.0.1")},
		"more is remembered":       {addrs("243.1.0.1"), addrs("243.1.0.1", "fd00:243::1"), addrs("243.1.0.1", "fd00:243::1")},
		"neither of the two knows": {nil, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if have := clusterset.Recalled(tt.known, tt.remembered); !slices.Equal(have, tt.want) {
				t.Errorf("%v, want %v", have, tt.want)
			}
		})
	}
}
