package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Severity says what comes of a Finding.
type Severity int

// A Warning costs some packets in some cases, a Fault all of a kind.
const (
	Warning Severity = iota
	Fault
)

// String returns "warning" or "fault".
func (s Severity) String() string {
	if s == Fault {
		return "fault"
	}
	return "warning"
}

// Finding is something about a node that does not go well with the packet path.
type Finding struct {
	Name     string // what kind of thing, such as "rp_filter"
	Severity Severity
	Message  string // one sentence: what is so, and what comes of it
	Fix      string // what to do, a command where one does it
}

// Check returns what the packet path needs and does not find. devices are those it is on. sysctl is where the
// settings of the kernel's network stack are, /proc/sys/net but in tests.
func Check(devices []Device, sysctl string) ([]Finding, error) {
	var found []Finding
	for _, family := range []struct{ name, file, key string }{
		{"ip_forward", "ipv4/ip_forward", "net.ipv4.ip_forward"},
		{"ipv6_forward", "ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding"},
	} {
		on, err := setting(sysctl, family.file)
		if err != nil {
			return nil, err
		}
		if on == "0" {
			found = append(found, Finding{
				family.name, Fault, family.key + " is 0: the kernel drops translated packets that it must route.", "sysctl -w " + family.key + "=1",
			})
		}
	}
	strict, err := checkReversePath(devices, sysctl)
	if err != nil {
		return nil, err
	}
	return append(append(found, strict...), checkMTU(devices)...), nil
}

// checkReversePath finds uplinks whose replies the kernel may drop because it would send by another one.
// The filter that holds is the stricter one of a device's own and that for all; see ip-sysctl, rp_filter.
func checkReversePath(devices []Device, sysctl string) ([]Finding, error) {
	var uplinks []Device
	for _, d := range devices {
		if d.Uplink() {
			uplinks = append(uplinks, d)
		}
	}
	if len(uplinks) < 2 {
		return nil, nil // one road: what comes by it also goes by it
	}
	all, err := setting(sysctl, "ipv4/conf/all/rp_filter")
	if err != nil {
		return nil, err
	}
	var found []Finding
	for _, d := range uplinks {
		own, err := setting(sysctl, filepath.Join("ipv4/conf", d.Name, "rp_filter"))
		if err != nil {
			return nil, err
		}
		if max(all, own) == "1" { // they are "", "0", "1" or "2", and the larger one holds
			found = append(found, Finding{
				"rp_filter", Warning,
				fmt.Sprintf("rp_filter is strict on %s and the node has %d uplinks: a reply that comes by another one than its request left by is dropped.", d.Name, len(uplinks)),
				fmt.Sprintf("sysctl -w net.ipv4.conf.%s.rp_filter=2", strings.ReplaceAll(d.Name, ".", "/")),
			})
		}
	}
	return found, nil
}

// checkMTU finds devices of clients that may send larger packets than every uplink can carry.
func checkMTU(devices []Device) []Finding {
	largest := 0
	for _, d := range devices {
		if d.Uplink() {
			largest = max(largest, d.MTU)
		}
	}
	if largest == 0 {
		return nil
	}
	var found []Finding
	for _, d := range devices {
		if !d.Uplink() && d.client() && d.MTU > largest {
			found = append(found, Finding{
				"mtu", Warning,
				fmt.Sprintf("%s has an MTU of %d, the uplinks %d at most: large packets depend on ICMP errors reaching the client.", d.Name, d.MTU, largest),
				fmt.Sprintf("set the MTU of the pod network to %d in its CNI's configuration", largest),
			})
		}
	}
	return found
}

// setting returns a setting of the kernel, "" when this kernel or device has none.
func setting(sysctl, file string) (string, error) {
	text, err := os.ReadFile(filepath.Join(sysctl, file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read kernel setting: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
