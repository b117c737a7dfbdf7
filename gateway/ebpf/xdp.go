package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// XDP says whether drivers send frames of flows under way themselves, before the kernel makes packets of them
// (bpf/gateway_xdp.h). The zero value is XDPOff.
type XDP string

// The values of XDP.
const (
	XDPOff  XDP = "off"
	XDPAuto XDP = "auto" // on all devices whose driver has XDP of its own
)

// What a driver can do: enum netdev_xdp_act of Linux' uapi/linux/netdev.h.
const (
	xdpBasic    = 1
	xdpRedirect = 2
	xdpSends    = 4 // what came in by another device
)

// features asks the kernel what a device's driver can do with XDP. Kernels before 6.3 do not tell, which is an error.
func features(index int) (uint64, error) {
	const (
		getDevice   = 1 // NETDEV_CMD_DEV_GET
		attrIndex   = 1 // NETDEV_A_DEV_IFINDEX
		attrFeature = 3 // NETDEV_A_DEV_XDP_FEATURES
	)
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return 0, fmt.Errorf("the kernel does not tell what drivers can do, which begins with Linux 6.3: %w", err)
	}
	r := nl.NewNetlinkRequest(int(family.ID), 0)
	// Not by nl.Genlmsg, whose two reserved bytes may be anything: this family wants zeros.
	r.AddRawData(append([]byte{getDevice, 1, 0, 0}, nl.NewRtAttr(attrIndex, nl.Uint32Attr(uint32(index))).Serialize()...))
	answers, err := r.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("ask what its driver can do: %w", err)
	}
	for _, a := range answers {
		attrs, err := nl.ParseRouteAttr(a[nl.SizeofGenlmsg:])
		if err != nil {
			return 0, fmt.Errorf("ask what its driver can do: %w", err)
		}
		for _, attr := range attrs {
			if attr.Attr.Type == attrFeature && len(attr.Value) == 8 {
				return binary.NativeEndian.Uint64(attr.Value), nil
			}
		}
	}
	return 0, nil
}

// mayRun returns nil when the driver of a device can run our program, else why not.
func mayRun(index int) error {
	can, err := features(index)
	if err != nil {
		return err
	}
	if can&(xdpBasic|xdpRedirect) != xdpBasic|xdpRedirect {
		return errors.New("its driver has no XDP")
	}
	return nil
}

// putXDP makes a device's driver run our program. Where another one runs, that stays, and the error names it.
func (k *kernel) putXDP(index int) error {
	err := k.put(k.driver(), index)
	if err == nil {
		return nil
	}
	l, missing := netlink.LinkByIndex(index)
	if missing != nil || l.Attrs().Xdp == nil || !l.Attrs().Xdp.Attached {
		return err
	}
	id := ebpf.ProgramID(l.Attrs().Xdp.ProgId)
	p, unknown := ebpf.NewProgramFromID(id)
	if unknown != nil {
		return fmt.Errorf("it runs XDP program %d of somebody else: %w", id, err)
	}
	defer p.Close()
	return fmt.Errorf("it runs %s of somebody else: %w", p, err)
}

// describe returns what the program is to know of these devices. One that has gone is left out.
func describe(devices map[int]string) (map[uint32]bpf.GatewayXDPDevice, error) {
	all := map[uint32]bpf.GatewayXDPDevice{}
	for index := range devices {
		l, err := netlink.LinkByIndex(index)
		if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("find device: %w", err)
		}
		can, err := features(index)
		if err != nil {
			return nil, err
		}
		var d bpf.GatewayXDPDevice
		copy(d.Mac[:], l.Attrs().HardwareAddr)
		if can&xdpSends != 0 {
			d.Sends = 1
		}
		all[uint32(index)] = d
	}
	return all, nil
}

// tell makes the XDP program know these devices, and no others.
func (k *kernel) tell(devices map[int]string) error {
	want, err := describe(devices)
	if err != nil {
		return err
	}
	m := k.maps[bpf.MapXDPDevices]
	have := map[uint32]bpf.GatewayXDPDevice{}
	if err := dump(m, have); err != nil {
		return err
	}
	for index := range have {
		if _, ok := want[index]; !ok {
			if err := m.Delete(index); err != nil {
				return fmt.Errorf("forget device %d: %w", index, err)
			}
		}
	}
	for index, d := range want {
		if have[index] != d {
			if err := m.Put(index, d); err != nil {
				return fmt.Errorf("describe device %d: %w", index, err)
			}
		}
	}
	return nil
}

// knows reports whether the XDP program knows these devices as they are now.
func (k *kernel) knows(devices map[int]string) (bool, error) {
	want, err := describe(devices)
	if err != nil {
		return false, err
	}
	have := map[uint32]bpf.GatewayXDPDevice{}
	if err := dump(k.maps[bpf.MapXDPDevices], have); err != nil {
		return false, err
	}
	return maps.Equal(have, want), nil
}
