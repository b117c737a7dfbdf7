// Package conntrack reads the connections whose source the node translates from the kernel's connection tracking table.
// It detects masquerading by nftables, by both kinds of iptables and by other programs.
package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// From linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
const (
	statusMask = 26     // CTA_STATUS_MASK
	srcNAT     = 1 << 4 // IPS_SRC_NAT
	dstNAT     = 1 << 5 // IPS_DST_NAT
)

// Flow is a connection whose source is translated and whose destination is not.
type Flow struct {
	Source     netip.Addr     // of the client
	Translated netip.Addr     // what the destination sees instead
	To         netip.AddrPort // the destination
	Protocol   uint8
}

// ErrUnsupported means that the kernel does not list its connections.
var ErrUnsupported = errors.New("no connection tracking over netlink")

// Supported returns nil when the kernel lists its connections, else ErrUnsupported or the error of asking.
func Supported() error {
	return dump(func([]byte) bool { return false })
}

// Masqueraded calls visit with every Flow of the calling thread's network namespace, until visit returns false. The
// kernel walks the whole table, which takes milliseconds for each 100,000 connections.
func Masqueraded(visit func(Flow) bool) error {
	var bad error
	err := dump(func(message []byte) bool {
		f, ok, err := parse(message)
		if err != nil {
			bad = err
			return false
		}
		return !ok || visit(f)
	})
	return errors.Join(err, bad)
}

// dump lists the connections of both families whose source is translated; the kernel filters them.
func dump(each func(message []byte) bool) error {
	const get = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	req := nl.NewNetlinkRequest(get, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	bits := binary.BigEndian.AppendUint32(nil, srcNAT)
	req.AddData(nl.NewRtAttr(nl.CTA_STATUS, bits))
	req.AddData(nl.NewRtAttr(statusMask, bits))
	err := req.ExecuteIter(unix.NETLINK_NETFILTER, 0, each)
	switch {
	case errors.Is(err, nl.ErrDumpInterrupted):
		return nil // the table changed during the dump; lasting connections are listed all the same
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("list connections: %w", errors.Join(ErrUnsupported, err))
	case err != nil:
		return fmt.Errorf("list connections: %w", err)
	}
	return nil
}

// parse decodes one connection. ok is false if it is not a Flow.
func parse(message []byte) (f Flow, ok bool, err error) {
	if len(message) < nl.SizeofNfgenmsg {
		return Flow{}, false, fmt.Errorf("list connections: message of %d bytes", len(message))
	}
	attrs, err := attributes(message[nl.SizeofNfgenmsg:])
	if err != nil {
		return Flow{}, false, err
	}
	status := attrs[nl.CTA_STATUS]
	if len(status) != 4 {
		return Flow{}, false, nil
	}
	// Kernels without the filter by status list every connection.
	if bits := binary.BigEndian.Uint32(status); bits&srcNAT == 0 || bits&dstNAT != 0 {
		return Flow{}, false, nil
	}
	source, to, protocol, err := parseTuple(attrs[nl.CTA_TUPLE_ORIG])
	if err != nil {
		return Flow{}, false, err
	}
	_, shown, _, err := parseTuple(attrs[nl.CTA_TUPLE_REPLY]) // replies go to the translated source
	if err != nil {
		return Flow{}, false, err
	}
	f = Flow{Source: source, Translated: shown.Addr(), To: to, Protocol: protocol}
	return f, f.Translated != f.Source, nil // false: only the port is translated
}

// parseTuple decodes one direction of a connection.
func parseTuple(tuple []byte) (source netip.Addr, to netip.AddrPort, protocol uint8, err error) {
	parts, err := attributes(tuple)
	if err != nil {
		return source, to, 0, err
	}
	ip, ipErr := attributes(parts[nl.CTA_TUPLE_IP])
	proto, protoErr := attributes(parts[nl.CTA_TUPLE_PROTO])
	if err := errors.Join(ipErr, protoErr); err != nil {
		return source, to, 0, err
	}
	from, dest := ip[nl.CTA_IP_V4_SRC], ip[nl.CTA_IP_V4_DST]
	if from == nil {
		from, dest = ip[nl.CTA_IP_V6_SRC], ip[nl.CTA_IP_V6_DST]
	}
	source, ok := netip.AddrFromSlice(from)
	addr, okDest := netip.AddrFromSlice(dest)
	if !ok || !okDest || len(proto[nl.CTA_PROTO_NUM]) != 1 {
		return source, to, 0, errors.New("list connections: one without addresses or protocol")
	}
	var port uint16
	if p := proto[nl.CTA_PROTO_DST_PORT]; len(p) == 2 { // ICMP has none
		port = binary.BigEndian.Uint16(p)
	}
	return source, netip.AddrPortFrom(addr, port), proto[nl.CTA_PROTO_NUM][0], nil
}

// attributes returns the attributes of a message, or of another attribute, by type. They have the format of rtnetlink: a
// length of two bytes, which includes the header, a type of two bytes, and a value, padded to four bytes (netlink(7)).
func attributes(b []byte) (map[uint16][]byte, error) {
	const header = 4
	found := map[uint16][]byte{}
	for len(b) >= header {
		length, kind := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
		if length < header || length > len(b) {
			return nil, fmt.Errorf("list connections: attribute of %d bytes where %d are left", length, len(b))
		}
		found[kind&nl.NLA_TYPE_MASK] = b[header:length]
		b = b[min((length+3)&^3, len(b)):]
	}
	return found, nil
}
