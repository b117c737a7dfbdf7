// Package desired is what a controller wants of a gateway: the whole of it every time, so that a gateway that missed some
// requests, or was made anew, needs nothing but the last one.
package desired

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Request is the body of POST /v1/reconfigure, and what a gateway keeps on its disk.
type Request struct {
	// Generation grows with every change. A gateway refuses what is older than what it has, so that neither a controller
	// that lost its Lease nor somebody who repeats a request can turn it back. A controller that takes over reads
	// what gateways have and goes on from the highest.
	Generation uint64 `json:"generation"`
	// Hash is State.Hash, by which both sides know that they speak of the same.
	Hash  string `json:"hash"`
	State State  `json:"state"`

	encoded []byte         // State's JSON, of which Hash is; nil: not known
	vips    map[string]VIP // by their JSON, as Parse has read them
}

// NewRequest returns the request for a state, which must not change afterwards.
func NewRequest(generation uint64, s State) Request {
	encoded := s.encode()
	return Request{Generation: generation, Hash: hash(encoded), State: s, encoded: encoded}
}

// JSON returns the request's, which Parse reads. It is ready: of a thousand VIPs it is half a MB.
func (r *Request) JSON() []byte {
	encoded := r.encoded
	if encoded == nil {
		encoded = r.State.encode()
	}
	return slices.Concat(fmt.Appendf(nil, `{"generation":%d,"hash":%q,"state":`, r.Generation, r.Hash), encoded, []byte("}"))
}

// State is all that one gateway is to do.
type State struct {
	// Cluster is the id of the cluster whose controller this is. A gateway obeys one cluster.
	Cluster string `json:"cluster"`
	// Group is the name of the gateways that stand in for one another; all of it have the same VIPs and balancer.
	Group    string   `json:"group"`
	Balancer Balancer `json:"balancer"`
	// Cordoned gateways announce nothing and go on to balance what still arrives.
	Cordoned bool `json:"cordoned,omitempty"`
	// Mates are the other gateways of the group, which are told of connections so that those survive this gateway.
	Peers []PeerGateway `json:"peers,omitempty"` // by name
	VIPs  []VIP         `json:"vips,omitempty"`  // by address
	BGP   *BGP          `json:"bgp,omitempty"`   // needed by VIPs that are announced so
	VRRP  *VRRP         `json:"vrrp,omitempty"`  // needed by VIPs that are announced so
}

// Mate is another gateway of the group.
type PeerGateway struct {
	URL  string `json:"url"`  // such as https://192.0.2.12:9479
	Name string `json:"name"` // the identity in its certificate
}

// Balancer is what balances packets on a gateway.
type Balancer string

// The balancers.
const (
	NFTables Balancer = "nftables"
	EBPF     Balancer = "ebpf"
)

// Announce names the announcer that tells routers or hosts which gateway takes the packets to a VIP.
type Announce string

// The announcers.
const (
	ByBGP  Announce = "bgp"
	ByVRRP Announce = "vrrp"
	ByNone Announce = "none" // no announcer: something else sends packets here, such as a floating IP at a gateway's own port
)

// Announces are the values that a pool may have. Each but ByNone is the Name of an announcer of the gateways.
var Announces = []Announce{ByBGP, ByVRRP, ByNone}

// Return is how backends' packets find back to the client.
type Return string

// The ways back.
const (
	// Routed keeps the client's address; the backends' network routes what goes to clients through a gateway.
	Routed Return = "routed"
	// SNAT makes the VIP the source: packets come back to whichever gateway has it.
	SNAT Return = "snat"
	// Masquerade makes the gateway's own address the source. Connections do not survive their gateway.
	Masquerade Return = "masquerade"
)

// VIP is an address that a gateway takes packets for.
type VIP struct {
	Addr      netip.Addr `json:"addr"`
	Announce  Announce   `json:"announce"`
	Return    Return     `json:"return"`
	Frontends []Frontend `json:"frontends"` // by port and protocol
}

// Serves reports whether any frontend has a backend for new connections: only then a VIP is announced.
func (v *VIP) Serves() bool {
	for i := range v.Frontends {
		for j := range v.Frontends[i].Backends {
			if !v.Frontends[i].Backends[j].Draining {
				return true
			}
		}
	}
	return false
}

// Frontend is a protocol and port of a VIP.
type Frontend struct {
	// Service is namespace/name, for messages, logs and metrics.
	Service  string         `json:"service"`
	Protocol string         `json:"protocol"` // TCP or UDP
	Port     uint16         `json:"port"`
	Sources  []netip.Prefix `json:"sources,omitempty"`  // who may connect; none: everybody
	Affinity int32          `json:"affinity,omitempty"` // seconds that a client stays with its backend; 0: none
	// Backends are sorted by address and port: every gateway must choose the same. None: connections are refused.
	Backends []Backend `json:"backends"`
}

// Backend is where packets go.
type Backend struct {
	Addr   netip.Addr `json:"addr"` // of the VIP's family
	Port   uint16     `json:"port"`
	Weight uint16     `json:"weight"` // 1 or more, relative to the others'
	// Draining backends keep their connections and get no new ones.
	Draining bool `json:"draining,omitempty"`
}

// BGP is a gateway's speaker. Times are in milliseconds where the unit stands in the name, else in seconds.
type BGP struct {
	ASN      uint32     `json:"asn"`
	RouterID netip.Addr `json:"routerID"` // IPv4
	// MED (lower is preferred by neighbours) and LocalPreference (higher is preferred inside the AS) tell active from
	// standby gateways; without them all are equal.
	MED             *uint32 `json:"med,omitempty"`
	LocalPreference *uint32 `json:"localPreference,omitempty"`
	// Communities are of RFC 1997 ("65000:100", "no-export") or large ones of RFC 8092 ("65000:1:2").
	Communities []string `json:"communities,omitempty"`
	// GracefulRestart is for how many seconds neighbours keep our routes while the gateway restarts; 0: not at all.
	GracefulRestart uint16 `json:"gracefulRestart,omitempty"`
	Peers           []Peer `json:"peers"`
}

// Peer is a router.
type Peer struct {
	Addr     netip.Addr `json:"addr"`
	Port     uint16     `json:"port,omitempty"` // 0: 179
	ASN      uint32     `json:"asn"`
	Password string     `json:"password,omitempty"` // RFC 2385 (MD5)
	HoldTime uint16     `json:"holdTime,omitempty"` // seconds; 0: 9
	BFD      *BFD       `json:"bfd,omitempty"`
}

// BFD is bidirectional forwarding detection with a peer (RFC 5881): routes are announced only while it is up.
type BFD struct {
	IntervalMillis uint32 `json:"intervalMillis"`
	Multiplier     uint8  `json:"multiplier"`
}

// VRRP is a gateway's part in a virtual router (RFC 9568), which has all VIPs that are announced so.
type VRRP struct {
	Interface      string       `json:"interface"`
	Source         netip.Addr   `json:"source"`         // the gateway's own address, unicast to Peers
	Peers          []netip.Addr `json:"peers"`          // none: it stands alone, and speaks by multicast
	RouterID       uint8        `json:"routerID"`       // of IPv4; of IPv6 the next one
	Priority       uint8        `json:"priority"`       // 1 to 254; the highest is the master
	IntervalMillis uint32       `json:"intervalMillis"` // between advertisements, a multiple of 10
}

// Hash returns a digest of the state: SHA-256 of its JSON, in hexadecimal.
func (s *State) Hash() string { return hash(s.encode()) }

func (s *State) encode() []byte {
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("desired: a state is not JSON: %v", err)) // it has none but plain fields
	}
	return b
}

func hash(encoded []byte) string {
	sum := sha256.Sum256(encoded)
	return hex.EncodeToString(sum[:])
}

// Status is the answer to GET /v1/state.
type Status struct {
	// Generation and Hash are of what was applied last; 0 and "" when nothing was yet.
	Generation uint64 `json:"generation"`
	Hash       string `json:"hash"`
	// Drift tells what on the machine is not as it was applied, by part. It is mended without a request.
	Drift []Fault `json:"drift,omitempty"`
	// Announced are the VIPs that neighbours are told about, now.
	Announced []netip.Addr `json:"announced,omitempty"`
	// Version is the gateway's build.
	Version string    `json:"version"`
	Since   time.Time `json:"since"` // when it was applied
}

// Refusal is the body of every answer that is not 200: nothing was changed.
type Refusal struct {
	Message string  `json:"message"`
	Faults  []Fault `json:"faults,omitempty"`
}
