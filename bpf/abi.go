package bpf

import (
	"fmt"
	"maps"
	"net/netip"

	"github.com/cilium/ebpf"
)

// The map keys and values of abi.h, where every field is described. Addresses are 16 bytes in network
// order ([Addr16]), ports are in host order.
type (
	// FrontendKey is the key of the map frontends.
	FrontendKey = sockFrontendKey
	// Frontend is the value of the map frontends.
	Frontend = sockFrontend
	// SlotKey is the key of the map slots, whose value is a backend's number.
	SlotKey = sockSlotKey
	// Backend is the value of the map backends, whose key is its number.
	Backend = sockBackend
	// Service is the value of the map services, whose key is its number.
	Service = sockService
	// Cluster is the value of the map clusters, an array.
	Cluster = sockCluster
	// RangeKey is the key of the map ranges.
	RangeKey = sockRangeKey
	// AffinityKey is the key of the map affinities.
	AffinityKey = sockAffinityKey
	// Affinity is the value of the map affinities.
	Affinity = sockAffinity
	// TCPVIP is the value of the map tcp_vips, an array.
	TCPVIP = sockTcpVip
	// RefusalKey is the key of the map refusals, whose value is a count.
	RefusalKey = sockRefusalKey
	// UDPVIPKey is the key of the map udp_vips.
	UDPVIPKey = sockUdpVipKey
	// UDPVIP is the value of the map udp_vips.
	UDPVIP = sockUdpVip
	// Settings is the one value of the map settings.
	Settings = sockSettings
	// Event is a record of the ring buffer events, in this machine's byte order.
	Event = sockEvent
)

// ABIVersion is that of the layouts above. Maps of different ones have nothing in common, except that [MapConns],
// [MapFragments] and [MapRoutedClients] go on from one to the next: whoever changes their layout renames them, or
// connections are misread.
const ABIVersion = 3

// The flags of Frontend and Backend.
const (
	FrontendMaglev  = sockFrontendFlagsFRONTEND_MAGLEV
	BackendDraining = sockBackendFlagsBACKEND_DRAINING
)

// What an event tells, and on which path the client came.
const (
	EventChosen  = sockEventKindEVENT_CHOSEN
	EventRefused = sockEventKindEVENT_REFUSED
	PathSocket   = sockEventPathPATH_SOCKET
	PathPacket   = sockEventPathPATH_PACKET
)

// The maps, by the names they are pinned under.
const (
	MapFrontends = sockMapFrontends
	MapSlots     = sockMapSlots
	MapBackends  = sockMapBackends
	MapTCPVIPs   = sockMapTcpVips
	MapSockVIPs  = sockMapSockVips
	MapUDPVIPs   = sockMapUdpVips
	MapRefusals  = sockMapRefusals

	MapServices   = sockMapServices
	MapClusters   = sockMapClusters
	MapRanges     = sockMapRanges
	MapSettings   = sockMapSettings
	MapAffinities = sockMapAffinities
	MapEvents     = sockMapEvents

	MapUDPVIPsAdded = sockMapUdpVipsAdded
)

// Hook is one program of the socket path and the place of the cgroup it belongs to.
type Hook struct {
	Name   string // of the program, and of its pins
	Attach ebpf.AttachType
}

// Hooks lists the programs of the socket path in the order in which they are attached: those that
// give names back first, so that no socket ever sees a translation that is not undone; and what counts before what
// is counted.
func Hooks() []Hook {
	return []Hook{
		{sockProgGetpeername4, ebpf.AttachCgroupInet4GetPeername},
		{sockProgGetpeername6, ebpf.AttachCgroupInet6GetPeername},
		{sockProgRecvmsg4, ebpf.AttachCGroupUDP4Recvmsg},
		{sockProgRecvmsg6, ebpf.AttachCGroupUDP6Recvmsg},
		{sockProgSendmsg4, ebpf.AttachCGroupUDP4Sendmsg},
		{sockProgSendmsg6, ebpf.AttachCGroupUDP6Sendmsg},
		{sockopsProgEvidence, ebpf.AttachCGroupSockOps},
		{sockProgRelease, ebpf.AttachCgroupInetSockRelease},
		{sockProgConnect4, ebpf.AttachCGroupInet4Connect},
		{sockProgConnect6, ebpf.AttachCGroupInet6Connect},
	}
}

// LoadSpec parses the embedded objects of the socket path for this machine's byte order and returns what all
// kernels we serve can load: the programs of Hooks and their maps. The result is the caller's.
func LoadSpec() (*ebpf.CollectionSpec, error) {
	spec, err := loadSock()
	if err != nil {
		return nil, fmt.Errorf("object of the socket path: %w", err)
	}
	sockops, err := loadSockops()
	if err != nil {
		return nil, fmt.Errorf("object of the evidence: %w", err)
	}
	maps.Copy(spec.Programs, sockops.Programs) // the maps are the same
	return spec, nil
}

// ProgramCloseStale is the one program that LoadCloseSpec returns, ProgramFindStale that of LoadFindSpec.
const (
	ProgramCloseStale = closeProgCloseStale
	ProgramFindStale  = closeProgFindStale
)

// LoadCloseSpec returns the iterator that closes UDP sockets whose backend is gone, and the two maps it needs,
// which are to be replaced by the pinned ones. Kernels before 6.5 refuse it. The result is the caller's.
//
// Reading the iterator runs it in the reader's network namespace; what comes are the numbers of the backends whose
// sockets were closed, 4 bytes in this machine's byte order for each socket.
func LoadCloseSpec() (*ebpf.CollectionSpec, error) { return loadIterator(ProgramCloseStale) }

// LoadFindSpec is LoadCloseSpec for kernels that refuse that: its iterator closes nothing; what comes are the cookies
// of the sockets, 8 bytes each.
func LoadFindSpec() (*ebpf.CollectionSpec, error) { return loadIterator(ProgramFindStale) }

func loadIterator(program string) (*ebpf.CollectionSpec, error) {
	spec, err := loadClose()
	if err != nil {
		return nil, fmt.Errorf("object of the iterators: %w", err)
	}
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return name != program })
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return name != MapSockVIPs && name != MapBackends })
	return spec, nil
}

// DropReason says why a client was refused or a packet dropped.
type DropReason = sockDropReason

// The reasons of abi.h. DropNone is never counted, DropMax is their number.
const (
	DropNone        = sockDropReasonDROP_REASON_NONE
	DropNoBackend   = sockDropReasonDROP_REASON_NO_BACKEND
	DropBackendGone = sockDropReasonDROP_REASON_BACKEND_GONE
	DropNoMemory    = sockDropReasonDROP_REASON_NO_MEMORY

	DropNoFrontend   = sockDropReasonDROP_REASON_NO_FRONTEND
	DropMalformed    = sockDropReasonDROP_REASON_MALFORMED
	DropFragment     = sockDropReasonDROP_REASON_FRAGMENT
	DropProtocol     = sockDropReasonDROP_REASON_PROTOCOL
	DropSCTPPort     = sockDropReasonDROP_REASON_SCTP_PORT
	DropNoConnection = sockDropReasonDROP_REASON_NO_CONNECTION
	DropItself       = sockDropReasonDROP_REASON_ITSELF
	DropUnanswered   = sockDropReasonDROP_REASON_UNANSWERED
	DropMax          = sockDropReasonDROP_REASON_MAX
)

// dropReasons are the names of the reasons, as metrics and documents spell them.
var dropReasons = [DropMax]string{
	DropNone: "none", DropNoBackend: "no_backend", DropBackendGone: "backend_gone", DropNoMemory: "no_memory",
	DropNoFrontend: "no_frontend", DropMalformed: "malformed", DropFragment: "fragment", DropProtocol: "protocol",
	DropSCTPPort: "sctp_port", DropNoConnection: "no_connection", DropItself: "itself",
	DropUnanswered: "unanswered",
}

// String returns the reason as metrics and documents spell it.
func (r sockDropReason) String() string {
	switch {
	case r < DropMax:
		return dropReasons[r]
	case r == GatewayDropSource:
		return "source"
	case r == GatewayDropNoFlow:
		return "no_flow"
	case r == GatewayDropTooBig:
		return "too_big"
	case r == GatewayDropHops:
		return "hops"
	}
	return fmt.Sprintf("reason(%d)", uint32(r))
}

// Addr16 returns a as the maps hold it: IPv4 is mapped into IPv6.
func Addr16(a netip.Addr) [16]byte { return a.As16() }

// AddrOf is the inverse of Addr16: a mapped address comes back as IPv4.
func AddrOf(b [16]byte) netip.Addr { return netip.AddrFrom16(b).Unmap() }
