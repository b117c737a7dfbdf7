package device

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Way is how this node sends packets to the backends of a member.
type Way struct {
	Cluster string     // whose
	To      netip.Addr // one of them; the others are taken to be reached alike
	Device  int        // index of the device by which packets leave; 0 when there is no route
	MTU     int        // the largest packet that the route takes
}

// FindWay asks the kernel for its route to a backend.
func FindWay(cluster string, to netip.Addr, devices []Device) (Way, error) {
	w := Way{Cluster: cluster, To: to}
	routes, err := netlink.RouteGet(to.AsSlice())
	for _, none := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL} { // the last are of routes that refuse
		if errors.Is(err, none) {
			return w, nil
		}
	}
	if err != nil {
		return w, fmt.Errorf("ask for the route to %s: %w", to, err)
	}
	for _, r := range routes {
		w.Device, w.MTU = r.LinkIndex, r.MTU
		if d := find(devices, r.LinkIndex); w.MTU == 0 && d != nil {
			w.MTU = d.MTU
		}
	}
	return w, nil
}

func find(devices []Device, index int) *Device {
	for i := range devices {
		if devices[i].Index == index {
			return &devices[i]
		}
	}
	return nil
}
