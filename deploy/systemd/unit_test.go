// Package systemd tests the unit of a gateway on a virtual machine. Its ExecStartPre commands run in network namespaces.
package systemd

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/ipv6"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// word is a word of a command line, as far as the unit uses them (systemd.service(5), COMMAND LINES).
var word = regexp.MustCompile(`'[^']*'|[^\s']+`)

// before returns the ExecStartPre commands of the unit.
func before(t *testing.T) (all [][]string) {
	t.Helper()
	unit, err := os.ReadFile("isthmus-gateway.service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(unit)) {
		command, ok := strings.CutPrefix(strings.TrimSpace(line), "ExecStartPre=")
		if !ok {
			continue
		}
		marks := len(command) - len(strings.TrimLeft(command, "+-"))
		if strings.Contains(command[:marks], "-") {
			continue // it may fail, and would load a module into this machine
		}
		var words []string
		for _, w := range word.FindAllString(command[marks:], -1) {
			words = append(words, strings.ReplaceAll(strings.Trim(w, "'"), "$$", "$"))
		}
		all = append(all, words)
	}
	return all
}

// script returns a shell script that runs commands until one fails.
func script(all [][]string) string {
	var b strings.Builder
	b.WriteString("set -e\n")
	for _, words := range all {
		for _, w := range words {
			fmt.Fprintf(&b, "'%s' ", w)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func run(program string, args ...string) error {
	if said, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, said)
	}
	return nil
}

func machine(t *testing.T) *netlab.Namespace {
	t.Helper()
	netlab.Privileged(t)
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	return ns
}

func setting(path string) (string, error) {
	b, err := os.ReadFile("/proc/sys/net/" + path)
	return strings.TrimSpace(string(b)), err
}

// A machine that learned its IPv6 default route from its router keeps it when it becomes a gateway.
func TestDefaultRouteStays(t *testing.T) {
	gateway, router := machine(t), machine(t)
	here, there := netip.MustParsePrefix("fd00::1/64"), netip.MustParsePrefix("fd00::2/64")
	managedHere, managedThere := netip.MustParsePrefix("fd01::3/64"), netip.MustParsePrefix("fd01::4/64")
	device, managed := netlab.DeviceName(here), netlab.DeviceName(managedHere)
	set := func(path, value string) error { return os.WriteFile("/proc/sys/net/ipv6/conf/"+path, []byte(value), 0) }
	atOnce := func() error { return set("default/accept_dad", "0") }
	if err := errors.Join(
		gateway.Do(atOnce), router.Do(atOnce), gateway.Connect(router, here, there), gateway.Connect(router, managedHere, managedThere),
		gateway.Do(func() error { return set(managed+"/accept_ra", "0") }),
	); err != nil {
		t.Fatal(err)
	}
	learned := func() bool {
		t.Helper()
		var routes []netlink.Route
		if err := gateway.Do(func() (err error) {
			routes, err = netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: 254}, netlink.RT_FILTER_TABLE)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if r.Gw != nil && (r.Dst == nil || r.Dst.IP.IsUnspecified()) {
				return true
			}
		}
		return false
	}
	for end := time.Now().Add(20 * time.Second); !learned(); <-time.After(20 * time.Millisecond) {
		if err := router.Do(func() error { return advertise(netlab.DeviceName(there)) }); err != nil && time.Now().After(end) {
			t.Fatal(err)
		}
		if time.Now().After(end) {
			t.Fatal("the router's advertisement makes no default route")
		}
	}

	if err := gateway.Do(func() error {
		if err := run("/bin/sh", "-c", script(before(t))); err != nil {
			return err
		}
		for path, want := range map[string]string{
			"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1", "ipv6/conf/" + device + "/forwarding": "1", "netfilter/nf_conntrack_tcp_loose": "1", "netfilter/nf_conntrack_tcp_be_liberal": "1",
			"ipv6/conf/" + device + "/accept_ra": "2", "ipv6/conf/default/accept_ra": "2", "ipv6/conf/" + managed + "/accept_ra": "0",
		} {
			if have, err := setting(path); err != nil || have != want {
				t.Errorf("%s is %q, want %q, %v", path, have, want, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !learned() {
		t.Error("a gateway forgets the default route that its router advertised")
	}
}

// advertise sends one router advertisement (RFC 4861, 4.2) to all nodes at a device.
func advertise(device string) error {
	at, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	addrs, err := at.Addrs()
	if err != nil {
		return err
	}
	for _, a := range addrs {
		own, ok := a.(*net.IPNet)
		if !ok || !own.IP.IsLinkLocalUnicast() {
			continue
		}
		raw, err := net.ListenPacket("ip6:ipv6-icmp", own.IP.String()+"%"+device)
		if err != nil {
			return err
		}
		defer raw.Close()
		to := &net.IPAddr{IP: net.IPv6linklocalallnodes, Zone: device}
		_, err = ipv6.NewPacketConn(raw).WriteTo([]byte{134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0}, &ipv6.ControlMessage{HopLimit: 255, IfIndex: at.Index}, to)
		return err
	}
	return errors.New("the router has no link-local address yet")
}

// A machine without IPv6 can be a gateway.
func TestWithoutIPv6(t *testing.T) {
	if err := machine(t).Do(func() error {
		return run("/usr/bin/unshare", "--mount", "/bin/sh", "-ec", "mount -t tmpfs none /proc/sys/net/ipv6\n"+script(before(t)))
	}); err != nil {
		t.Error(err)
	}
}
