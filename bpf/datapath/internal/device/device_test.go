package device

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func names(devices []Device) []string {
	var n []string
	for _, d := range devices {
		n = append(n, d.Name)
	}
	return n
}

func TestSelect(t *testing.T) {
	node := []Device{
		{Index: 1, Name: "lo", Kind: "device", Addressed: true},
		{Index: 2, Name: "eth0", Kind: "device", Default: true, Addressed: true},
		{Index: 3, Name: "eth1", Kind: "device", Addressed: true},
		{Index: 4, Name: "eth2", Kind: "device"}, // a port, or unused
		{Index: 5, Name: "cni0", Kind: "bridge", Addressed: true},
		{Index: 6, Name: "veth1", Kind: "veth", PeerElsewhere: true, Master: 5},
		{Index: 7, Name: "veth2", Kind: "veth"}, // both ends are here
		{Index: 8, Name: "br0", Kind: "bridge", Addressed: true},
		{Index: 9, Name: "tap0", Kind: "tuntap"},
		{Index: 10, Name: "dns", Kind: "dummy", Addressed: true},
		{Index: 11, Name: "bond0.7", Kind: "vlan", Addressed: true},
		{Index: 12, Name: "tun0", Kind: "tuntap", Bare: true},
		{Index: 13, Name: "wg0", Kind: "wireguard", Addressed: true, Bare: true},
	}
	for name, c := range map[string]struct {
		patterns []string
		want     []string
		bare     int // devices that are named as left out
	}{
		"automatic":      {nil, []string{"eth0", "eth1", "cni0", "veth1", "tap0", "bond0.7"}, 1},
		"by name":        {[]string{"veth2", "absent"}, []string{"veth2"}, 0},
		"by pattern":     {[]string{"eth*", "br?"}, []string{"eth0", "eth1", "eth2", "br0"}, 0},
		"loopback":       {[]string{"lo"}, []string{"lo"}, 0},
		"dots are plain": {[]string{"bond0.*"}, []string{"bond0.7"}, 0},
		"bare":           {[]string{"tun0", "wg0"}, nil, 2},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, names(Select(node, c.patterns))); diff != "" {
				t.Errorf("chosen (-want +got):\n%s", diff)
			}
			if found := CheckBare(node, c.patterns); len(found) != c.bare {
				t.Errorf("found %v, want %d", found, c.bare)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	for pattern, ok := range map[string]bool{"eth0": true, "eth*": true, "eth[0-3]": true, "": false, "eth[": false} {
		if err := Validate(pattern); (err == nil) != ok {
			t.Errorf("Validate(%q): %v, want ok %v", pattern, err, ok)
		}
	}
}

// List describes real devices of each kind.
func TestList(t *testing.T) {
	netlab.Privileged(t)
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	other, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	if err := ns.Connect(other, netip.MustParsePrefix("10.9.0.1/24"), netip.MustParsePrefix("10.9.0.2/24")); err != nil {
		t.Fatal(err)
	}
	if err := ns.Route(netip.MustParseAddr("10.9.0.2")); err != nil {
		t.Fatal(err)
	}
	attrs := func(name string) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name = name
		return a
	}
	var have []Device
	err = ns.Do(func() error {
		tap := &netlink.Tuntap{LinkAttrs: attrs("tap0"), Mode: netlink.TUNTAP_MODE_TAP}
		tun := &netlink.Tuntap{LinkAttrs: attrs("tun0"), Mode: netlink.TUNTAP_MODE_TUN}
		bridge := &netlink.Bridge{LinkAttrs: attrs("br0")}
		err := errors.Join(netlink.LinkAdd(bridge), netlink.LinkAdd(tap), netlink.LinkAdd(tun),
			netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs("here"), PeerName: "alsohere"}), netlink.LinkSetMaster(tap, bridge))
		if err != nil {
			return err
		}
		have, err = List()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Device{
		"lo":        {Kind: "device"},
		"v0a090001": {Kind: "veth", PeerElsewhere: true, Default: true, Addressed: true},
		"br0":       {Kind: "bridge"},
		"tap0":      {Kind: "tuntap"},
		"tun0":      {Kind: "tuntap", Bare: true},
		"here":      {Kind: "veth"}, "alsohere": {Kind: "veth"},
	}
	bridge := 0
	for _, d := range have {
		if d.Name == "br0" {
			bridge = d.Index
		}
	}
	got := map[string]Device{}
	for _, d := range have {
		if (d.Name == "tap0") != (d.Master == bridge) {
			t.Errorf("%s has master %d", d.Name, d.Master)
		}
		if d.MTU == 0 {
			t.Errorf("%s has no MTU", d.Name)
		}
		d.Index, d.MTU, d.Master = 0, 0, 0
		n := d.Name
		d.Name = ""
		got[n] = d
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"v0a090001", "br0", "tap0"}, names(Select(have, nil))); diff != "" {
		t.Errorf("chosen (-want +got):\n%s", diff)
	}
}

// Watch reports each kind of change: a new device, a removed one, an address, a default route.
func TestWatch(t *testing.T) {
	netlab.Privileged(t)
	ctx, cancel := context.WithCancel(t.Context())
	changed, ended := make(chan struct{}, 100), make(chan error, 1)
	go func() { ended <- Watch(ctx, func() { changed <- struct{}{} }) }()
	reported := func(what string) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Fatalf("%s is not reported", what)
		}
		quiet := time.NewTimer(50 * time.Millisecond) // more of it may follow
		defer quiet.Stop()
		for {
			select {
			case <-changed:
			case <-quiet.C:
				return
			}
		}
	}
	reported("the beginning")
	a := netlink.NewLinkAttrs()
	a.Name = "watched"
	l := &netlink.Bridge{LinkAttrs: a}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(netlink.LinkAdd(l))
	must(os.WriteFile("/proc/sys/net/ipv6/conf/watched/disable_ipv6", []byte("1"), 0)) // it would get addresses later
	must(netlink.LinkSetUp(l))
	reported("a device")
	must(netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 8, 0, 1), Mask: net.CIDRMask(24, 32)}}))
	reported("an address")
	must(netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.IPv4(10, 8, 0, 9)}))
	reported("a default route")
	must(netlink.LinkDel(l))
	reported("a removed device")
	cancel()
	must(<-ended)
}

func TestCheck(t *testing.T) {
	uplink, second := Device{Index: 1, Name: "eth0", Kind: "device", Default: true, MTU: 1500}, Device{Index: 2, Name: "eth1.7", Kind: "vlan", Addressed: true, MTU: 1400}
	pod, jumbo := Device{Index: 3, Name: "veth1", Kind: "veth", PeerElsewhere: true, MTU: 1500}, Device{Index: 4, Name: "veth2", Kind: "veth", PeerElsewhere: true, MTU: 9000}
	tunnel := Device{Index: 5, Name: "wg0", Kind: "wireguard", MTU: 1420} // without a program
	port := Device{Index: 6, Name: "tap0", Kind: "tuntap", Master: 7, MTU: 1500}
	b := func(device, mtu int) Route { return Route{"b", netip.MustParseAddr("10.2.0.1"), device, mtu} }
	six := func(device, mtu int) Route { return Route{"c", netip.MustParseAddr("fd00::1"), device, mtu} }
	good := map[string]string{
		"ipv4/ip_forward": "1\n", "ipv6/conf/all/forwarding": "1\n", "ipv4/conf/all/rp_filter": "0\n",
		"ipv4/conf/eth0/rp_filter": "0\n", "ipv4/conf/eth1.7/rp_filter": "2\n",
		"ipv4/conf/eth0/forwarding": "1\n", "ipv4/conf/veth1/forwarding": "1\n",
	}
	type ways = []Route
	for name, c := range map[string]struct {
		served   []Device
		ways     []Route
		settings map[string]string // that differ from the good ones
		want     []string          // name, severity, fix
	}{
		"no fault":                           {[]Device{uplink, second, pod}, ways{b(1, 1500), six(1, 1500)}, nil, nil},
		"no forwarding":                      {[]Device{uplink}, ways{b(1, 1500)}, map[string]string{"ipv4/ip_forward": "0\n", "ipv4/conf/eth0/forwarding": "0\n"}, []string{"ip_forward fault sysctl -w net.ipv4.ip_forward=1"}},
		"no forwarding on one device":        {[]Device{uplink, pod}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/veth1/forwarding": "0\n"}, []string{"ip_forward fault sysctl -w net.ipv4.conf.veth1.forwarding=1"}},
		"no forwarding where replies arrive": {[]Device{pod}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/eth0/forwarding": "0\n"}, []string{"ip_forward fault sysctl -w net.ipv4.conf.eth0.forwarding=1"}},
		"no forwarding on a port":            {[]Device{uplink, port}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/tap0/forwarding": "0\n"}, nil},
		"no forwarding, no packet path":      {nil, ways{b(1, 1500)}, map[string]string{"ipv4/ip_forward": "0\n"}, nil},
		"no forwarding of IPv6":              {[]Device{uplink}, ways{six(1, 1500)}, map[string]string{"ipv6/conf/all/forwarding": "0\n"}, []string{"ipv6_forward fault sysctl -w net.ipv6.conf.all.forwarding=1"}},
		"IPv6 is not used":                   {[]Device{uplink}, ways{b(1, 1500)}, map[string]string{"ipv6/conf/all/forwarding": "0\n"}, nil},
		"no IPv6":                            {[]Device{uplink}, ways{six(1, 1500)}, map[string]string{"ipv6/conf/all/forwarding": ""}, nil},
		"strict, one device out":             {[]Device{uplink, pod}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/eth0/rp_filter": "1\n", "ipv4/conf/eth1.7/rp_filter": "0\n"}, nil},
		"strict, two devices out":            {[]Device{uplink, second}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/eth0/rp_filter": "1\n"}, []string{"rp_filter warning sysctl -w net.ipv4.conf.eth0.rp_filter=2"}},
		"strict beside a tunnel":             {[]Device{uplink, tunnel}, ways{b(5, 1500)}, map[string]string{"ipv4/conf/eth0/rp_filter": "1\n"}, []string{"rp_filter warning sysctl -w net.ipv4.conf.eth0.rp_filter=2"}},
		"strict, IPv6 only":                  {[]Device{uplink, second}, ways{six(1, 1500)}, map[string]string{"ipv4/conf/eth0/rp_filter": "1\n"}, nil},
		"strict for all":                     {[]Device{uplink, second}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/all/rp_filter": "1\n"}, []string{"rp_filter warning sysctl -w net.ipv4.conf.eth0.rp_filter=2"}},
		"loose for all":                      {[]Device{uplink, second}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/all/rp_filter": "2\n", "ipv4/conf/eth0/rp_filter": "1\n"}, nil},
		"a name with a dot":                  {[]Device{uplink, second}, ways{b(1, 1500)}, map[string]string{"ipv4/conf/eth1.7/rp_filter": "1\n"}, []string{"rp_filter warning sysctl -w net.ipv4.conf.eth1/7.rp_filter=2"}},
		"MTU above the route's":              {[]Device{uplink, pod, jumbo}, ways{b(1, 1500)}, nil, []string{"mtu warning set the MTU of the pod network to 1500 in its CNI's configuration"}},
		"MTU above the tunnel's":             {[]Device{uplink, pod}, ways{b(5, 1420), six(1, 1500)}, nil, []string{"mtu warning set the MTU of the pod network to 1420 in its CNI's configuration"}},
		"no route":                           {[]Device{uplink, pod}, ways{b(0, 0)}, nil, []string{"route fault route the pod networks of cluster b on this node"}},
		"no route, no packet path":           {nil, ways{b(0, 0)}, nil, []string{"route fault route the pod networks of cluster b on this node"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(settings map[string]string) {
				t.Helper()
				for file, text := range settings {
					path := filepath.Join(dir, file)
					err := os.MkdirAll(filepath.Dir(path), 0o700)
					if text == "" {
						err = errors.Join(err, os.Remove(path))
					} else {
						err = errors.Join(err, os.WriteFile(path, []byte(text), 0o600))
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			write(good)
			write(c.settings)
			devices := c.served
			if !slices.ContainsFunc(devices, func(d Device) bool { return d.Index == uplink.Index }) {
				devices = append([]Device{uplink}, devices...)
			}
			found, err := Node{Devices: devices, Served: c.served, Routes: c.ways, Sysctl: dir}.Check()
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range found {
				got = append(got, f.Name+" "+f.Severity.String()+" "+f.Fix)
				if f.Message == "" {
					t.Errorf("%s says nothing", f.Name)
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}
