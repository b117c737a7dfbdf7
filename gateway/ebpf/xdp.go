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

// XDP says whether drivers forward frames of established flows before the kernel turns them into packets
// (bpf/gateway_xdp.h). The zero value is XDPOff.
type XDP string

// The values of XDP.
const (
	XDPOff  XDP = "off"
	XDPAuto XDP = "auto" // on all devices whose driver supports XDP
)

// Features of a driver: enum netdev_xdp_act in Linux' uapi/linux/netdev.h.
const (
	xdpBasic    = 1
	xdpRedirect = 2
	xdpSends    = 4 // forwards frames that came in by another device
)

// features returns the XDP features of a device's driver. Kernels before 6.3 do not report them, which is an error.
func features(index int) (uint64, error) {
	const (
		getDevice   = 1 // NETDEV_CMD_DEV_GET
		attrIndex   = 1 // NETDEV_A_DEV_IFINDEX
		attrFeature = 3 // NETDEV_A_DEV_XDP_FEATURES
	)
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return 0, fmt.Errorf("the kernel does not report what drivers support, which came with Linux 6.3: %w", err)
	}
	r := nl.NewNetlinkRequest(int(family.ID), 0)
	// nl.Genlmsg leaves two reserved bytes undefined, but this family requires zeros.
	r.AddRawData(append([]byte{getDevice, 1, 0, 0}, nl.NewRtAttr(attrIndex, nl.Uint32Attr(uint32(index))).Serialize()...))
	answers, err := r.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("query the features of its driver: %w", err)
	}
	for _, a := range answers {
		attrs, err := nl.ParseRouteAttr(a[nl.SizeofGenlmsg:])
		if err != nil {
			return 0, fmt.Errorf("query the features of its driver: %w", err)
		}
		for _, attr := range attrs {
			if attr.Attr.Type == attrFeature && len(attr.Value) == 8 {
				return binary.NativeEndian.Uint64(attr.Value), nil
			}
		}
	}
	return 0, nil
}

// mayRun returns nil if a device's driver can run our program, else the reason.
func mayRun(index int) error {
	can, err := features(index)
	if err != nil {
		return err
	}
	if can&(xdpBasic|xdpRedirect) != xdpBasic|xdpRedirect {
		return errors.New("its driver does not support XDP")
	}
	return nil
}

// putXDP attaches our program to a device's driver. A program of another process stays, and the error names it.
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
		return fmt.Errorf("it runs XDP program %d of another process: %w", id, err)
	}
	defer p.Close()
	return fmt.Errorf("it runs %s of another process: %w", p, err)
}

// xdpDevices returns the map entries of these devices. It omits devices that were removed meanwhile.
func xdpDevices(devices map[int]string) (map[uint32]bpf.GatewayXDPDevice, error) {
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

// setXDPDevices makes these devices the only ones that the XDP program knows.
func (k *kernel) setXDPDevices(devices map[int]string) error {
	want, err := xdpDevices(devices)
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

// hasXDPDevices reports whether the XDP program knows exactly these devices, with their current addresses and
// features.
func (k *kernel) hasXDPDevices(devices map[int]string) (bool, error) {
	want, err := xdpDevices(devices)
	if err != nil {
		return false, err
	}
	have := map[uint32]bpf.GatewayXDPDevice{}
	if err := dump(k.maps[bpf.MapXDPDevices], have); err != nil {
		return false, err
	}
	return maps.Equal(have, want), nil
}
