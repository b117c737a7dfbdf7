package bpf

import (
	_ "embed"

	"github.com/cilium/ebpf"
)

// The keys and values of a gateway's maps, which gateway.h and abi.h describe.
type (
	// GatewayVIP is the value of the map vips, whose key is an address, [16]byte.
	GatewayVIP = gatewayGatewayVip
	// GatewayFrontendKey is the key of the map frontends.
	GatewayFrontendKey = gatewayFrontendKey
	// GatewayFrontend is the value of the map frontends. Its flags are GatewayAffinity and GatewaySources.
	GatewayFrontend = gatewayGatewayFrontend
	// GatewayBackend is the value of the map backends, whose key is a backend id.
	GatewayBackend = gatewayBackend
	// GatewaySourceKey is the key of the map sources.
	GatewaySourceKey = gatewayGatewaySourceKey
	// GatewayMember is the key of the map members.
	GatewayMember = gatewayGatewayMember
	// GatewayAffinityKey is the key of the map affinities: a client of a frontend.
	GatewayAffinityKey = gatewayAffinityKey
	// GatewayClient is the value of the map affinities: the backend that the client keeps, and when it last used it,
	// CLOCK_BOOTTIME in ns.
	GatewayClient = gatewayAffinity
	// GatewayOriginKey is the key of the map origins: the address, port and protocol of a backend.
	GatewayOriginKey = gatewayGatewayOriginKey
	// GatewayOrigin is the value of the map origins.
	GatewayOrigin = gatewayGatewayOrigin
	// GatewaySlot is the value of the map slots, whose key is the number of a slot.
	GatewaySlot = gatewayGatewaySlot
	// GatewaySettings is the only value of the map gateway_settings.
	GatewaySettings = gatewayGatewaySettings
	// GatewayXDPDevice is the value of the map xdp_devices, whose key is an interface index.
	GatewayXDPDevice = gatewayGatewayXdpDevice
	// GatewayConnKey is the key of the maps flows and handshakes: one direction of a flow.
	GatewayConnKey = gatewayConnKey
	// GatewayConn is its value. It has the flags of a Conn, and GatewayDoubleNAT and GatewayStandby.
	GatewayConn = gatewayConn
	// GatewayPeerFlow is the value of the map peer_flows, whose key is that of a client's packets.
	GatewayPeerFlow = gatewayGatewayPeerFlow
	// GatewayOpened is a record of the ring buffer opened.
	GatewayOpened = gatewayGatewayOpened
	// GatewayRefusalKey is the key of the map refusals, whose value is a count.
	GatewayRefusalKey = gatewayRefusalKey
	// GatewayTraffic is the value of the map traffic on each CPU, whose key is the id of a frontend.
	GatewayTraffic = gatewayGatewayTraffic
	// GatewayTable is the only value of each map in tables: the backend id of every slot.
	GatewayTable = [16381]uint32
)

//go:embed gateway.h
var gatewayHeader string

// GatewayPeers is GATEWAY_PEERS_MAX of gateway.h.
var GatewayPeers = versionIn(gatewayHeader, "GATEWAY_PEERS_MAX")

// GatewayABIVersion is GATEWAY_ABI_VERSION of gateway.h, the version of these layouts.
var GatewayABIVersion = versionIn(gatewayHeader, "GATEWAY_ABI_VERSION")

// The flags of a GatewayFrontend, a GatewayVIP and a GatewayConn.
const (
	GatewayAffinity = gatewayGatewayFrontendFlagsGATEWAY_AFFINITY
	GatewaySources  = gatewayGatewayFrontendFlagsGATEWAY_SOURCES

	GatewayOwn = gatewayGatewayVipFlagsGATEWAY_OWN

	GatewayDoubleNAT = uint8(gatewayGatewayConnFlagsGATEWAY_DOUBLE_NAT)
	GatewayStandby   = uint8(gatewayGatewayConnFlagsGATEWAY_STANDBY)

	// GatewaySecond marks the window of an entry of the second translation.
	GatewaySecond = uint8(packetConnWindowWINDOW_SECOND)
)

// The reasons for which only a gateway drops a packet.
const (
	GatewayDropSource = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_SOURCE)
	GatewayDropNoFlow = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_NO_FLOW)
	GatewayDropTooBig = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_TOO_BIG)
	GatewayDropHops   = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_HOPS)
)

// The maps that only a gateway has, by the names they are pinned under. Its other maps have the names of a node's.
const (
	MapGatewayVIPs      = gatewayMapVips
	MapGatewayTables    = gatewayMapTables
	MapGatewaySources   = gatewayMapSources
	MapGatewayMembers   = gatewayMapMembers
	MapGatewayOrigins   = gatewayMapOrigins
	MapGatewaySlots     = gatewayMapSlots
	MapGatewayPeers     = gatewayMapPeers
	MapGatewayPeerFlows = gatewayMapPeerFlows
	MapHandedOver       = gatewayMapHandedOver
	MapGatewaySettings  = gatewayMapGatewaySettings
	MapHalfOpen         = gatewayMapHalfOpen
	MapGatewayTraffic   = gatewayMapTraffic
	MapGatewayOpened    = gatewayMapOpened
	MapGatewayLost      = gatewayMapOpenedLost
	MapXDPDevices       = gatewayMapXdpDevices
	MapXDPSent          = gatewayMapXdpSent
)

// VarHalfOpenMax is the name of the gateway program's variable with the entries of MapHandshakes that a CPU fills with half-open
// flows in a third of a second, a uint32. It should be a quarter of the map's capacity, divided by the number of CPUs.
const VarHalfOpenMax = gatewayVarHALF_OPEN_MAX

// The programs of a gateway's balancer.
const (
	// ProgGateway belongs at the ingress of the devices. It handles every packet.
	ProgGateway = gatewayProgGateway
	// ProgGatewayXDP belongs at the XDP hook of devices whose driver supports it. It forwards frames of established flows.
	ProgGatewayXDP = gatewayProgGatewayXdp
)

// LoadGatewaySpec parses the embedded object of a gateway's balancer for the machine's byte order. It shares no map with
// other objects. The caller owns the result.
func LoadGatewaySpec() (*ebpf.CollectionSpec, error) { return loadGateway() }
