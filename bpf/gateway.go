package bpf

import (
	"maps"

	"github.com/cilium/ebpf"
)

// The keys and values of a gateway's own maps, as gateway.h describes them, and those of abi.h as it uses them.
type (
	// GatewayVIP is the value of the map vips, whose key is an address, [16]byte.
	GatewayVIP = gatewayGatewayVip
	// GatewayFrontendKey is the key of the maps frontends and origins.
	GatewayFrontendKey = gatewayFrontendKey
	// GatewayFrontend is the value of the map frontends. Its flags are GatewayAffinity and GatewaySources.
	GatewayFrontend = gatewayFrontend
	// GatewayBackend is the value of the map backends, whose key is its number.
	GatewayBackend = gatewayBackend
	// GatewaySourceKey is the key of the map sources.
	GatewaySourceKey = gatewayGatewaySourceKey
	// GatewayMember is the key of the map members.
	GatewayMember = gatewayGatewayMember
	// GatewayAffinityKey is the key of the map affinities: a client of a frontend.
	GatewayAffinityKey = gatewayAffinityKey
	// GatewayClient is the value of the map affinities: with whom it stays, since CLOCK_BOOTTIME in ns.
	GatewayClient = gatewayAffinity
	// GatewayOrigin is the value of the map origins.
	GatewayOrigin = gatewayGatewayOrigin
	// GatewaySettings is the one value of the map gateway_settings.
	GatewaySettings = gatewayGatewaySettings
	// GatewayXDPDevice is the value of the map xdp_devices, whose key is an interface index.
	GatewayXDPDevice = gatewayGatewayXdpDevice
	// GatewayConnKey is the key of the map conns: one direction of a flow.
	GatewayConnKey = gatewayConnKey
	// GatewayConn is its value. Its flags are GatewayTwice and GatewayStandby, besides those of a Conn.
	GatewayConn = gatewayConn
	// GatewayOpened is a record of the ring buffer opened.
	GatewayOpened = gatewayGatewayOpened
	// GatewayRefusalKey is the key of the map refusals, whose value is a count.
	GatewayRefusalKey = gatewayRefusalKey
	// GatewayTable is the one value of each map in tables: which backend has which slot.
	GatewayTable = [16381]uint32
)

// GatewayABIVersion is that of these layouts. Maps of different ones have nothing in common.
const GatewayABIVersion = 1

// The flags of a GatewayFrontend, a GatewayVIP and a GatewayConn.
const (
	GatewayAffinity = uint32(gatewayGatewayFrontendFlagsGATEWAY_AFFINITY)
	GatewaySources  = uint32(gatewayGatewayFrontendFlagsGATEWAY_SOURCES)

	GatewayOwn = gatewayGatewayVipFlagsGATEWAY_OWN

	GatewayTwice   = uint8(gatewayGatewayConnFlagsGATEWAY_TWICE)
	GatewayStandby = uint8(gatewayGatewayConnFlagsGATEWAY_STANDBY)
)

// The reasons for which a gateway drops a packet, besides those of [DropReason].
const (
	GatewayDropSource = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_SOURCE)
	GatewayDropNoFlow = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_NO_FLOW)
	GatewayDropTooBig = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_TOO_BIG)
	GatewayDropHops   = DropReason(gatewayGatewayDropReasonGATEWAY_DROP_HOPS)
)

// The maps that only a gateway has, by the names they are pinned under.
const (
	MapGatewayVIPs     = gatewayMapVips
	MapGatewayTables   = gatewayMapTables
	MapGatewaySources  = gatewayMapSources
	MapGatewayMembers  = gatewayMapMembers
	MapGatewayOrigins  = gatewayMapOrigins
	MapGatewaySettings = gatewayMapGatewaySettings
	MapGatewayOpened   = gatewayMapOpened
	MapGatewayLost     = gatewayMapOpenedLost
	MapXDPDevices      = gatewayMapXdpDevices
	MapXDPSent         = gatewayMapXdpSent
)

// The programs of a gateway's balancer.
const (
	// ProgGateway is for the ingress of its devices. It does all that is to be done.
	ProgGateway = gatewayProgGateway
	// ProgGatewayXDP is for the XDP hook of those whose driver has it. It sends what is of flows under way.
	ProgGatewayXDP = gatewayProgGatewayXdp
)

// LoadGatewaySpec parses the embedded object of a gateway's balancer for this machine's byte order. The result is the
// caller's. It shares no map with any other.
func LoadGatewaySpec() (*ebpf.CollectionSpec, error) {
	spec, err := loadGateway()
	if err != nil {
		return nil, err
	}
	// The headers that it shares with a node's programs declare maps that it does not use.
	used := map[string]bool{}
	for _, p := range spec.Programs {
		for i := range p.Instructions {
			used[p.Instructions[i].Reference()] = true
		}
	}
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return !used[name] })
	return spec, nil
}
