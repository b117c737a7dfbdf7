package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Constants of linux/netfilter/nfnetlink_conntrack.h and related headers that golang.org/x/sys/unix lacks. No library
// creates entries with translations.
const (
	subsystem    = 1 << 8 // NFNL_SUBSYS_CTNETLINK
	ctNew        = subsystem
	ctGet        = subsystem | 1
	ctDelete     = subsystem | 2
	groupUpdates = 2 // NFNLGRP_CONNTRACK_UPDATE

	ctaOriginal, ctaReply, ctaStatus, ctaProtoInfo, ctaNATSource, ctaTimeout, ctaNATDestination = 1, 2, 3, 4, 6, 7, 13
	ctaCountersOriginal, ctaCountersReply, ctaID                                                = 9, 10, 12
	countersPackets, countersBytes                                                              = 1, 2

	tupleIP, tupleProto                        = 1, 2
	ipSource4, ipDestination4                  = 1, 2
	ipSource6, ipDestination6                  = 3, 4
	protoNumber, protoSource, protoDestination = 1, 2, 3

	infoTCP                                           = 1
	tcpState, tcpFlagsFrom, tcpFlagsTo                = 1, 4, 5
	tcpEstablished, tcpLastAck, tcpTimeWait, tcpClose = 3, 6, 7, 8
	natMin4, natMax4, natProto, natMin6, natMax6      = 1, 2, 3, 4, 5
	natPortMin, natPortMax                            = 1, 2

	statusSeenReply, statusAssured, statusConfirmed = 2, 4, 8

	tcpBeLiberal = 0x08 // IP_CT_TCP_FLAG_BE_LIBERAL
	// tcpFlags are the flags of an imported connection: nothing is known of its windows.
	tcpFlags = 0x01 | 0x02 | tcpBeLiberal // IP_CT_TCP_FLAG_WINDOW_SCALE, _SACK_PERM
)

// tuple is one direction of a connection.
type tuple struct {
	protocol uint8
	from, to netip.AddrPort
}

// entry is a tracked connection.
type entry struct {
	original, reply tuple
	status          uint32
	open            bool          // TCP that is established, or UDP
	ended           bool          // TCP that both ends have closed, or one has reset
	left            time.Duration // until it expires without a packet
	checksWindows   bool          // TCP whose packets must fit the windows seen here
	id              uint32        // of the entry, unless the kernel has given it to another one since
	forwarded       flows.Traffic // nothing if the kernel did not count when the connection began
}

// parse reads an entry.
func parse(b []byte) (e entry, err error) {
	const header = 4 // struct nfgenmsg
	if len(b) < header {
		return e, errors.New("short message")
	}
	ad, err := netlink.NewAttributeDecoder(b[header:])
	if err != nil {
		return e, err
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		switch ad.Type() {
		case ctaOriginal:
			ad.Nested(e.original.decode)
		case ctaReply:
			ad.Nested(e.reply.decode)
		case ctaStatus:
			e.status = ad.Uint32()
		case ctaTimeout:
			e.left = time.Duration(ad.Uint32()) * time.Second
		case ctaID:
			e.id = ad.Uint32()
		case ctaCountersOriginal:
			ad.Nested(decodeSum(&e.forwarded.ToBackends))
		case ctaCountersReply:
			ad.Nested(decodeSum(&e.forwarded.ToClients))
		case ctaProtoInfo:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				for ad.Next() {
					if ad.Type() == infoTCP {
						ad.Nested(func(ad *netlink.AttributeDecoder) error {
							for ad.Next() {
								switch ad.Type() {
								case tcpState:
									state := ad.Uint8()
									e.open, e.ended = state == tcpEstablished, state == tcpLastAck || state == tcpTimeWait || state == tcpClose
								case tcpFlagsFrom, tcpFlagsTo:
									is := ad.Bytes()
									e.checksWindows = e.checksWindows || len(is) > 0 && is[0]&tcpBeLiberal == 0
								}
							}
							return nil
						})
					}
				}
				return nil
			})
		}
	}
	e.open = e.open || e.original.protocol == unix.IPPROTO_UDP
	return e, ad.Err()
}

func decodeSum(s *flows.Sum) func(*netlink.AttributeDecoder) error {
	return func(ad *netlink.AttributeDecoder) error {
		for ad.Next() {
			switch ad.Type() {
			case countersPackets:
				s.Packets = ad.Uint64()
			case countersBytes:
				s.Bytes = ad.Uint64()
			}
		}
		return nil
	}
}

func (t *tuple) decode(ad *netlink.AttributeDecoder) error {
	var from, to netip.Addr
	var fromPort, toPort uint16
	for ad.Next() {
		switch ad.Type() {
		case tupleIP:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				for ad.Next() {
					a, _ := netip.AddrFromSlice(ad.Bytes())
					switch ad.Type() {
					case ipSource4, ipSource6:
						from = a
					case ipDestination4, ipDestination6:
						to = a
					}
				}
				return nil
			})
		case tupleProto:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				for ad.Next() {
					switch ad.Type() {
					case protoNumber:
						t.protocol = ad.Uint8()
					case protoSource:
						fromPort = ad.Uint16()
					case protoDestination:
						toPort = ad.Uint16()
					}
				}
				return nil
			})
		}
	}
	t.from, t.to = netip.AddrPortFrom(from, fromPort), netip.AddrPortFrom(to, toPort)
	return nil
}

// flow returns the connection of an entry, if it was translated on its way to a backend.
func (e *entry) flow() (flows.Flow, bool) {
	if e.reply.from == e.original.to || e.original.from.Port() == 0 {
		return flows.Flow{}, false
	}
	name := "TCP"
	if e.original.protocol == unix.IPPROTO_UDP {
		name = "UDP"
	}
	return flows.Flow{Protocol: name, Client: e.original.from, VIP: e.original.to, Backend: e.reply.from, Source: e.reply.to}, true
}

// createMessage creates an entry for a flow, which expires without a packet. A kept one also expires with packets.
func createMessage(t *tracked, lives time.Duration) (netlink.Message, error) {
	h := netlink.Header{Type: ctNew, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl}
	return tupleMessage(t.original(), h, func(ae *netlink.AttributeEncoder) {
		// The kernel derives this direction from the translations.
		ae.Nested(ctaReply, tuple{t.protocol, t.VIP, t.Client}.encode)
		status := uint32(statusConfirmed)
		if t.kept {
			status |= ipsFixedTimeout
		}
		if t.protocol == unix.IPPROTO_TCP { // the kernel sets those bits for UDP by itself, with the first packets
			status |= statusSeenReply | statusAssured
		}
		ae.Uint32(ctaStatus, status)
		ae.Uint32(ctaTimeout, uint32(lives.Seconds()))
		ae.Nested(ctaNATDestination, translation(t.Backend))
		if t.Source != t.Client {
			ae.Nested(ctaNATSource, translation(t.Source))
		}
		if t.protocol == unix.IPPROTO_TCP {
			ae.Nested(ctaProtoInfo, infoOf(tcpEstablished, tcpFlags))
		}
	})
}

// infoOf encodes a TCP state, and flags for both directions.
func infoOf(state, flags uint8) func(*netlink.AttributeEncoder) error {
	return func(ae *netlink.AttributeEncoder) error {
		ae.Nested(infoTCP, func(ae *netlink.AttributeEncoder) error {
			ae.Uint8(tcpState, state)
			ae.Bytes(tcpFlagsFrom, []byte{flags, flags})
			ae.Bytes(tcpFlagsTo, []byte{flags, flags})
			return nil
		})
		return nil
	}
}

// lookupMessage asks for the entry that has a direction. Its answer has a second part, the acknowledgement.
func lookupMessage(of tuple) (netlink.Message, error) {
	h := netlink.Header{Type: ctGet, Flags: netlink.Request | netlink.Acknowledge}
	return tupleMessage(of, h, func(*netlink.AttributeEncoder) {})
}

// timeoutMessage sets the time after which the entry of a flow expires.
func timeoutMessage(t *tracked, lives time.Duration) (netlink.Message, error) {
	return tupleMessage(t.original(), netlink.Header{Type: ctNew, Flags: netlink.Request | netlink.Acknowledge}, func(ae *netlink.AttributeEncoder) {
		ae.Uint32(ctaTimeout, uint32(lives.Seconds()))
	})
}

// deleteMessage deletes the entry that has a direction.
func deleteMessage(of tuple) (netlink.Message, error) {
	h := netlink.Header{Type: ctDelete, Flags: netlink.Request | netlink.Acknowledge}
	return tupleMessage(of, h, func(*netlink.AttributeEncoder) {})
}

// tupleMessage returns a message about the entry that has a direction. For lookups and deletions, that may be either one.
func tupleMessage(of tuple, h netlink.Header, more func(*netlink.AttributeEncoder)) (netlink.Message, error) {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.Nested(ctaOriginal, of.encode)
	more(ae)
	b, err := ae.Encode()
	return netlink.Message{Header: h, Data: append(nfgenmsg(of.from.Addr()), b...)}, err
}

func (t tuple) encode(ae *netlink.AttributeEncoder) error {
	source, destination := uint16(ipSource4), uint16(ipDestination4)
	if t.from.Addr().Is6() {
		source, destination = ipSource6, ipDestination6
	}
	ae.Nested(tupleIP, func(ae *netlink.AttributeEncoder) error {
		ae.Bytes(source, t.from.Addr().AsSlice())
		ae.Bytes(destination, t.to.Addr().AsSlice())
		return nil
	})
	ae.Nested(tupleProto, func(ae *netlink.AttributeEncoder) error {
		ae.Uint8(protoNumber, t.protocol)
		ae.Uint16(protoSource, t.from.Port())
		ae.Uint16(protoDestination, t.to.Port())
		return nil
	})
	return nil
}

// translation encodes a translation to exactly one address and port.
func translation(to netip.AddrPort) func(*netlink.AttributeEncoder) error {
	return func(ae *netlink.AttributeEncoder) error {
		from, until := uint16(natMin4), uint16(natMax4)
		if to.Addr().Is6() {
			from, until = natMin6, natMax6
		}
		ae.Bytes(from, to.Addr().AsSlice())
		ae.Bytes(until, to.Addr().AsSlice())
		ae.Nested(natProto, func(ae *netlink.AttributeEncoder) error {
			ae.Uint16(natPortMin, to.Port())
			ae.Uint16(natPortMax, to.Port())
			return nil
		})
		return nil
	}
}

// nfgenmsg returns the struct nfgenmsg that every message starts with.
func nfgenmsg(a netip.Addr) []byte {
	if a.Is4() {
		return []byte{unix.AF_INET, unix.NFNETLINK_V0, 0, 0}
	}
	return []byte{unix.AF_INET6, unix.NFNETLINK_V0, 0, 0}
}

// dumpMessage asks for all entries of a family.
func dumpMessage(a netip.Addr) netlink.Message {
	return netlink.Message{Header: netlink.Header{Type: ctGet, Flags: netlink.Request | netlink.Dump}, Data: nfgenmsg(a)}
}

func dialConntrack() (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("reach connection tracking: %w", err)
	}
	return c, nil
}
