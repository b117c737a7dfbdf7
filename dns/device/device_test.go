package device

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestOwns(t *testing.T) {
	tests := map[string]bool{
		IPv4.String():          true,
		IPv6.String():          true,
		"169.254.20.10":        true,
		"::ffff:169.254.20.53": true,
		"10.0.0.1":             false,
		"127.0.0.1":            false,
		"fd47:2d53:7699::53":   false,
		"fe80::1":              false,
	}
	for addr, want := range tests {
		if got := Owns(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Owns(%s) = %t, want %t", addr, got, want)
		}
	}
}

// inNetns runs the rest of the test in a new network namespace, which ends with the test.
func inNetns(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		netlab.Skip(t, fmt.Sprintf("make a network namespace: %v; run as root", err))
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
}

// assignedAddrs returns the addresses that Ensure may assign and that some interface has, with the name of the interface.
func assignedAddrs(t *testing.T) map[string]string {
	t.Helper()
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, a := range all {
		addr, _ := netip.AddrFromSlice(a.IP)
		if !Owns(addr.Unmap()) {
			continue
		}
		link, err := netlink.LinkByIndex(a.LinkIndex)
		if err != nil {
			t.Fatal(err)
		}
		found[a.IPNet.String()] = link.Attrs().Name
	}
	return found
}

func TestEnsureAndRemove(t *testing.T) {
	inNetns(t)
	addrs := []netip.Addr{IPv4, IPv6}
	var first map[string]string
	for i := range 2 { // the second time changes nothing
		name, assigned, err := Ensure(addrs)
		if err != nil || len(assigned) != 2 {
			t.Fatalf("Ensure: %v, %v", assigned, err)
		}
		want := map[string]string{IPv4.String() + "/32": name, IPv6.String() + "/128": name}
		have := assignedAddrs(t)
		if diff := cmp.Diff(want, have); diff != "" {
			t.Fatalf("addresses after Ensure number %d (-want +have):\n%s", i+1, diff)
		}
		first = have
	}
	for addr := range first {
		host, _, _ := net.ParseCIDR(addr)
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: host})
		if err != nil {
			t.Errorf("cannot listen on the address immediately: %v", err)
			continue
		}
		c.Close()
	}
	for range 2 {
		if err := Remove(addrs); err != nil {
			t.Fatal(err)
		}
		if have := assignedAddrs(t); len(have) != 0 {
			t.Fatalf("left after Remove: %v", have)
		}
	}
}

func TestEnsureWithoutIPv6(t *testing.T) {
	inNetns(t)
	for _, conf := range []string{"all", "default", "lo"} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+conf+"/disable_ipv6", []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	name, assigned, err := Ensure([]netip.Addr{IPv6, IPv4})
	if err != nil || !slices.Equal(assigned, []netip.Addr{IPv4}) {
		t.Errorf("Ensure: %v, %v; want IPv4 alone", assigned, err)
	}
	if diff := cmp.Diff(map[string]string{IPv4.String() + "/32": name}, assignedAddrs(t)); diff != "" {
		t.Errorf("addresses (-want +have):\n%s", diff)
	}
}

// Packets to and from the node-local addresses have no conntrack entries; other packets have.
func TestUntrack(t *testing.T) {
	inNetns(t)
	addrs := []netip.Addr{IPv4, IPv6}
	if _, _, err := Ensure(append(addrs, netip.MustParseAddr("169.254.20.99"))); err != nil {
		t.Fatal(err)
	}
	// A network namespace tracks connections only once a rule uses their state.
	run(t, "nft", "add table inet test; add chain inet test c { type filter hook output priority 0; }; add rule inet test c ct state new counter")
	tests := []struct {
		addr    netip.Addr
		tracked bool
	}{{IPv4, false}, {IPv6, false}, {netip.MustParseAddr("169.254.20.99"), true}}
	for range 2 { // the second time it replaces the first
		if err := Untrack(addrs); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range tests {
		exchange(t, tc.addr)
		if have := connections(t); (have > 0) != tc.tracked {
			t.Errorf("%s: %d connections are tracked, want some: %t", tc.addr, have, tc.tracked)
		}
	}
	for range 2 {
		if err := Remove(addrs); err != nil {
			t.Fatal(err)
		}
	}
	if out := run(t, "nft", "list tables"); strings.Contains(out, Table) {
		t.Errorf("left after Remove:\n%s", out)
	}
}

// exchange sends a datagram to an address of this namespace and one back.
func exchange(t *testing.T, at netip.Addr) {
	t.Helper()
	server, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	client, err := net.DialUDP("udp", nil, server.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	buf := make([]byte, 16)
	if _, err := client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	_, from, err := server.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := server.WriteToUDPAddrPort([]byte("answer"), from); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(buf); err != nil {
		t.Fatal(err)
	}
}

// connections returns the number of conntrack entries of this namespace.
func connections(t *testing.T) int {
	t.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	flows6, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET6)
	if err != nil {
		t.Fatal(err)
	}
	return len(flows) + len(flows6)
}

// run runs a command in the test's namespace and returns what it printed.
func run(t *testing.T, name, arg string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, arg).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, arg, err, out)
	}
	return string(out)
}
