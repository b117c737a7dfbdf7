package device

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Route is the node's route to the backends of a member.
type Route struct {
	Cluster string     // the member
	To      netip.Addr // one backend; the route to the others is assumed to be the same
	Device  int        // index of the device; 0 when there is no route
	MTU     int        // the largest packet that the route carries
}

// FindRoute asks the kernel for its route to a backend.
func FindRoute(cluster string, to netip.Addr, devices []Device) (Route, error) {
	w := Route{Cluster: cluster, To: to}
	routes, err := netlink.RouteGet(to.AsSlice())
	for _, noRoute := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL} { // EACCES and EINVAL are of prohibit and blackhole routes
		if errors.Is(err, noRoute) {
			return w, nil
		}
	}
	if err != nil {
		return w, fmt.Errorf("find the route to %s: %w", to, err)
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
