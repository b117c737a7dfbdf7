package bpf

import "github.com/cilium/ebpf"

// The keys and values of the packet path's own maps, as abi.h describes them.
type (
	// ConnKey is the key of the map conns: one direction of a flow.
	ConnKey = packetConnKey
	// Conn is the value of the map conns.
	Conn = packetConn
	// ConnState says how far a flow has come.
	ConnState = packetConnState
	// ConnFlags are the flags of a Conn.
	ConnFlags = packetConnFlags
	// FragmentKey is the key of the map fragments: the datagram a fragment is of.
	FragmentKey = packetFragmentKey
	// Fragment is its value: the ports, which only the first fragment carries.
	Fragment = packetFragment
	// Device is the value of the map devices, whose key is an interface's index, a uint32.
	Device = packetDevice
	// Answers is the value of the map answers: how many refusals a CPU has answered in a second.
	Answers = packetAnswers
	// PacketSettings is the one value of the map packet_settings.
	PacketSettings = packetPacketSettings
	// PacketFlags are the flags of PacketSettings.
	PacketFlags = packetPacketFlags
	// DeviceFlags are the flags of a Device.
	DeviceFlags = packetDeviceFlags
)

// What a device is.
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

// How far a flow has come, and which road it takes.
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

// The maps of the packet path alone, by the names they are pinned under. All others it shares with the socket path.
const (
	MapConns          = packetMapConns
	MapFragments      = packetMapFragments
	MapDevices        = packetMapDevices
	MapPacketSettings = packetMapPacketSettings
	MapRoutedClients  = packetMapRoutedClients
	MapAnswers        = packetMapAnswers
)

// The programs of the packet path. All are classifiers for TCX or for clsact with direct action; they return
// TC_ACT_UNSPEC for whatever they let pass, so that others on the same hook see it.
const (
	// ProgFromClient belongs at the ingress of a client's device: a pod's host veth, a tap, a bridge.
	ProgFromClient = packetProgFromClient
	// ProgFromNetwork belongs at the ingress of an uplink. It does what ProgFromClient does, and brings home the
	// answers of flows on the fast road.
	ProgFromNetwork = packetProgFromNetwork
	// ProgToClient belongs at the egress of a client's device.
	ProgToClient = packetProgToClient
	// ProgToNetwork belongs at the egress of an uplink. It does what ProgToClient does, once a client came from
	// elsewhere than the other end of a DeviceClient.
	ProgToNetwork = packetProgToNetwork
)

// VarLinkHeader names the variable of the packet programs that holds the bytes before the IP header, a uint32: 14
// unless it is set before loading, 0 for devices without a link layer.
const VarLinkHeader = packetVarLINK_HEADER

// LoadPacketSpec parses the embedded object of the packet path for this machine's byte order. The result is the
// caller's. Its maps that [LoadSpec] has too must be the same ones.
func LoadPacketSpec() (*ebpf.CollectionSpec, error) {
	spec, err := loadPacket()
	if err != nil {
		return nil, err
	}
	// The header with the shared maps declares them all.
	for _, unused := range []string{packetMapTcpVips, packetMapSockVips, packetMapUdpVips, packetMapUdpVipsAdded} {
		delete(spec.Maps, unused)
	}
	return spec, nil
}
