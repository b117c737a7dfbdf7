package bpf

import (
	_ "embed"
	"fmt"
	"maps"
	"net/netip"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
)

// The map keys and values that abi.h describes field by field. Addresses are 16 bytes in network order ([Addr16]), ports
// are in host order.
type (
	// FrontendKey is the key of the map frontends.
	FrontendKey = sockFrontendKey
	// Frontend is the value of the map frontends.
	Frontend = sockFrontend
	// SlotKey is the key of the map slots, whose value is a backend id.
	SlotKey = sockSlotKey
	// Backend is the value of the map backends, whose key is a backend id.
	Backend = sockBackend
	// Service is the value of the map services, whose key is a service number.
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
	// Settings is the only value of the map settings.
	Settings = sockSettings
	// Event is a record of the ring buffer events, in the machine's byte order.
	Event = sockEvent
)

//go:embed abi.h
var abiHeader string

// ABIVersion is ABI_VERSION of abi.h, the version of the layouts above. Builds of different versions share no maps except
// [MapFlows], [MapHandshakes], [MapUDPFlows], [MapConns], [MapFragments] and [MapRoutedClients]. Rename one of these if its
// layout changes: otherwise the other build misreads its flows.
var ABIVersion = versionIn(abiHeader, "ABI_VERSION")

// versionIn returns the number that a header defines under a name.
func versionIn(header, name string) int {
	_, after, ok := strings.Cut(header, "\n#define "+name+" ")
	number, _, _ := strings.Cut(after, "\n")
	version, err := strconv.Atoi(number)
	if !ok || err != nil {
		panic("the header does not define " + name)
	}
	return version
}

// The flags of Frontend and Backend.
const (
	FrontendMaglev  = sockFrontendFlagsFRONTEND_MAGLEV
	BackendDraining = sockBackendFlagsBACKEND_DRAINING
)

// The kinds of an event, and the paths of a client.
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

// Hook is one program of the socket path and its attach point at the cgroup.
type Hook struct {
	Name   string // name of the program and of its pins
	Attach ebpf.AttachType
}

// Hooks lists the programs of the socket path in the order in which they are attached. Programs that restore the VIP come
// before those that replace it, so that getpeername never returns a backend. The program that counts connections comes
// before those that translate them.
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

// LoadSpec parses the embedded objects of the socket path for the machine's byte order. It returns the programs of Hooks
// and their maps, which every supported kernel can load. The caller owns the result.
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

// ProgramCloseStale is the only program that LoadCloseSpec returns, ProgramFindStale that of LoadFindSpec.
const (
	ProgramCloseStale = closeProgCloseStale
	ProgramFindStale  = closeProgFindStale
)

// LoadCloseSpec returns the iterator that closes UDP sockets of removed backends, and the two maps that it needs. The
// caller replaces these by the pinned ones. Kernels before 6.5 refuse the program. The caller owns the result.
//
// Reading the iterator runs it in the reader's network namespace. It yields the backend id of each closed socket, 4 bytes
// in the machine's byte order.
func LoadCloseSpec() (*ebpf.CollectionSpec, error) { return loadIterator(ProgramCloseStale) }

// LoadFindSpec is LoadCloseSpec for kernels that refuse it. Its iterator closes nothing and yields the cookie of each
// socket, 8 bytes.
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

// DropReason is the reason for which a client was refused or a packet dropped.
type DropReason = sockDropReason

// The reasons of abi.h. DropNone is never counted, DropMax is the number of reasons.
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
	DropNewFlows     = sockDropReasonDROP_REASON_NEW_FLOWS
	DropMax          = sockDropReasonDROP_REASON_MAX
)

// dropReasons holds the names of the reasons in metrics and documents.
var dropReasons = [DropMax]string{
	DropNone: "none", DropNoBackend: "no_backend", DropBackendGone: "backend_gone", DropNoMemory: "no_memory",
	DropNoFrontend: "no_frontend", DropMalformed: "malformed", DropFragment: "fragment", DropProtocol: "protocol",
	DropSCTPPort: "sctp_port", DropNoConnection: "no_connection", DropItself: "itself",
	DropUnanswered: "unanswered", DropNewFlows: "new_flows",
}

// String returns the name of the reason in metrics and documents.
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

// Addr16 returns a as the maps store it: IPv4 is mapped into IPv6.
func Addr16(a netip.Addr) [16]byte { return a.As16() }

// AddrOf is the inverse of Addr16: a mapped address comes back as IPv4.
func AddrOf(b [16]byte) netip.Addr { return netip.AddrFrom16(b).Unmap() }
