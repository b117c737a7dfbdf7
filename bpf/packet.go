package bpf

import "github.com/cilium/ebpf"

// The keys and values of the packet path's own maps, which abi.h describes.
type (
	// ConnKey is the key of the maps flows and handshakes: one direction of a flow.
	ConnKey = packetConnKey
	// Conn is the value of the maps flows and handshakes.
	Conn = packetConn
	// ConnState is the state of a flow.
	ConnState = packetConnState
	// ConnFlags are the flags of a Conn.
	ConnFlags = packetConnFlags
	// FragmentKey is the key of the map fragments: the datagram a fragment is of.
	FragmentKey = packetFragmentKey
	// Fragment is its value: the ports, which only the first fragment carries.
	Fragment = packetFragment
	// Device is the value of the map devices, whose key is an interface index, a uint32.
	Device = packetDevice
	// Answers is the value of the maps answers and new_flows: how often something happened in a second on a CPU.
	Answers = packetAnswers
	// PacketSettings is the only value of the map packet_settings.
	PacketSettings = packetPacketSettings
	// PacketFlags are the flags of PacketSettings.
	PacketFlags = packetPacketFlags
	// DeviceFlags are the flags of a Device.
	DeviceFlags = packetDeviceFlags
)

// The flags of a Device.
const (
	DevicePeer   = packetDeviceFlagsDEVICE_PEER
	DeviceUplink = packetDeviceFlagsDEVICE_UPLINK
	DeviceClient = packetDeviceFlagsDEVICE_CLIENT
)

// The flags of PacketSettings.
const (
	PacketVIPsInRanges = packetPacketFlagsPACKET_VIPS_IN_RANGES
	PacketAdopt        = packetPacketFlagsPACKET_ADOPT
	PacketFast         = packetPacketFlagsPACKET_FAST
	PacketOneRange     = packetPacketFlagsPACKET_ONE_RANGE
)

// The states and flags of a Conn. A flow with ConnFast takes the fast path.
const (
	ConnOpening  = packetConnStateCONN_OPENING
	ConnAnswered = packetConnStateCONN_ANSWERED
	ConnOpen     = packetConnStateCONN_OPEN
	ConnHalf     = packetConnStateCONN_HALF
	ConnClosing  = packetConnStateCONN_CLOSING
	ConnClosed   = packetConnStateCONN_CLOSED

	ConnFast = packetConnFlagsCONN_FAST
	ConnSelf = packetConnFlagsCONN_SELF
	ConnBack = packetConnFlagsCONN_BACK
)

// The maps of the packet path alone, by the names they are pinned under. It shares all others with the socket path.
const (
	MapFlows          = packetMapFlows
	MapHandshakes     = packetMapHandshakes
	MapUDPFlows       = packetMapUdpFlows
	MapConns          = packetMapConns
	MapFragments      = packetMapFragments
	MapDevices        = packetMapDevices
	MapPacketSettings = packetMapPacketSettings
	MapRoutedClients  = packetMapRoutedClients
	MapAnswers        = packetMapAnswers
	MapNewFlows       = packetMapNewFlows
)

// The programs of the packet path. All are classifiers for TCX or for clsact with direct action. They return
// TC_ACT_UNSPEC for packets that pass, so that other programs on the same hook see them.
const (
	// ProgFromClient belongs at the ingress of a client's device: a pod's host veth, a tap, a bridge.
	ProgFromClient = packetProgFromClient
	// ProgFromNetwork belongs at the ingress of an uplink. It does what ProgFromClient does, and translates replies of
	// flows on the fast path.
	ProgFromNetwork = packetProgFromNetwork
	// ProgToClient belongs at the egress of a client's device.
	ProgToClient = packetProgToClient
	// ProgToNetwork belongs at the egress of an uplink. It does what ProgToClient does, once a client has come in by
	// another device than a DeviceClient.
	ProgToNetwork = packetProgToNetwork
)

// VarLinkHeader is the name of the packet programs' variable with the bytes before the IP header, a uint32. It is 14
// unless it is set before loading; 0 is for devices without a link layer.
const VarLinkHeader = packetVarLINK_HEADER

// LoadPacketSpec parses the embedded object of the packet path for the machine's byte order. Maps that [LoadSpec] has too
// must be shared with it. The caller owns the result.
func LoadPacketSpec() (*ebpf.CollectionSpec, error) { return loadPacket() }
