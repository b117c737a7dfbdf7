package datapath

import (
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/bpf"
)

func TestEncodeNets(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ranges  []string
		in, out []string // addresses that the nets hold, or do not
		more    bool     // than one range of a family
	}{
		"none":        {out: []string{"0.0.0.0", "243.0.0.5", "255.255.255.255", "::", "fd00::1"}},
		"IPv4":        {ranges: []string{"243.0.0.0/8"}, in: []string{"243.0.0.0", "243.255.255.255"}, out: []string{"242.255.255.255", "244.0.0.0", "::"}},
		"IPv6":        {ranges: []string{"fd99:1::/45"}, in: []string{"fd99:1::", "fd99:1:7::1"}, out: []string{"fd99:1:8::", "fd99::", "0.0.0.0"}},
		"both":        {ranges: []string{"10.96.0.0/12", "fd99::/48"}, in: []string{"10.111.1.1", "fd99::1"}, out: []string{"10.112.0.0", "fd98::1"}},
		"one address": {ranges: []string{"10.1.2.3/32", "fd99::1/128"}, in: []string{"10.1.2.3", "fd99::1"}, out: []string{"10.1.2.2", "fd99::"}},
		"all":         {ranges: []string{"0.0.0.0/0", "::/0"}, in: []string{"0.0.0.0", "255.255.255.255", "::", "ffff::"}},
		"neighbours":  {ranges: []string{"10.2.0.0/16", "10.3.0.0/16"}, in: []string{"10.2.0.1", "10.3.0.1"}, out: []string{"10.1.0.1", "10.4.0.1"}, more: true},
		"far apart":   {ranges: []string{"10.2.0.0/16", "243.0.0.0/8"}, in: []string{"10.2.0.1", "243.0.0.1"}, more: true},
		"one inside":  {ranges: []string{"fd99::/48", "fd99::1:0/112"}, in: []string{"fd99::1", "fd99::1:1"}, out: []string{"fd99:1::"}, more: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ranges []netip.Prefix
			for _, r := range c.ranges {
				ranges = append(ranges, netip.MustParsePrefix(r))
			}
			s := encodeNets(ranges)
			if one := s.Flags&bpf.PacketOneRange != 0; one == c.more {
				t.Errorf("one range: %v", one)
			}
			for want, addrs := range map[bool][]string{true: c.in, false: c.out} {
				for _, a := range addrs {
					if got := netHolds(s, netip.MustParseAddr(a)); got != want {
						t.Errorf("%s in the nets: %v, want %v", a, got, want)
					}
				}
			}
		})
	}
}

// netHolds compares as the programs do.
func netHolds(s bpf.PacketSettings, a netip.Addr) bool {
	if a.Is4() {
		b := a.As4()
		return nativeWord(b)&s.Mask4 == s.Net4
	}
	b := a.As16()
	for i := range b {
		if b[i]&s.Mask6[i] != s.Net6[i] {
			return false
		}
	}
	return true
}

// The flag that clients are routed moves from one ABI to the next with its flows. If the old ABI has no flag, some
// clients may be routed.
func TestRoutedClientsOfAnotherABI(t *testing.T) {
	n := newPacketNode(t)
	whole, err := currentBuild(true)
	if err != nil {
		t.Fatal(err)
	}
	maps := whole.specs[len(whole.specs)-1].Maps
	with := func(b build, names ...string) build {
		for _, name := range names {
			b.specs[len(b.specs)-1].Maps[name] = maps[name].Copy()
		}
		return b
	}
	routed := func(d *Datapath) (v uint32) {
		t.Helper()
		if err := d.maps[bpf.MapRoutedClients].Lookup(uint32(0), &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	openPackets(t, n.cfg, with(counted(t, false), bpf.MapFlows))
	second := openPackets(t, n.cfg, nextABI(with(counted(t, false), bpf.MapFlows, bpf.MapRoutedClients)))
	if routed(second) != 1 {
		t.Error("without a flag of the old ABI, clients may be routed")
	}
	if err := second.maps[bpf.MapRoutedClients].Put(uint32(0), uint32(0)); err != nil {
		t.Fatal(err)
	}
	third := openPackets(t, n.cfg, nextABI(nextABI(with(counted(t, false), bpf.MapFlows, bpf.MapRoutedClients))))
	if routed(third) != 0 {
		t.Error("what was written down is not known to the next version")
	}
}
