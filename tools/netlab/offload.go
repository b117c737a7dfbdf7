package netlab

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offload is an offload of a device: an ethtool command that turns it on or off.
type Offload uint32

const (
	// TxChecksum computes checksums in the device. Without it, the kernel computes them before the device gets a packet.
	TxChecksum Offload = unix.ETHTOOL_STXCSUM
	// GRO merges packets into larger ones. The other end of a veth accepts frames of XDP programs only with it.
	GRO Offload = unix.ETHTOOL_SGRO
)

// Set turns an offload on or off, for a device in the namespace of the calling thread.
func (o Offload) Set(device string, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	defer unix.Close(fd)
	value := struct{ command, on uint32 }{command: uint32(o)}
	if on {
		value.on = 1
	}
	request := struct { // struct ifreq
		name  [unix.IFNAMSIZ]byte
		value unsafe.Pointer
		_     [16]byte
	}{value: unsafe.Pointer(&value)}
	copy(request.name[:], device)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("set offload %#x of %s: %w", uint32(o), device, errno)
	}
	return nil
}
