// Package desired describes the state that a controller wants of a gateway. Each request carries all of it: a gateway
// that missed some requests, or was reinstalled, needs only the last one.
package desired

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"
)

// Request is the body of POST /v1/reconfigure. A gateway keeps the last one on disk.
type Request struct {
	// Generation grows with every change. A gateway refuses an older generation than its own, so neither a controller
	// that lost its Lease nor a replayed request can roll it back. A controller that takes over reads the generations of
	// the gateways and continues from the highest.
	Generation uint64 `json:"generation"`
	// Hash is State.Hash. Both sides compare states by it.
	Hash  string `json:"hash"`
	State State  `json:"state"`

	encoded []byte         // the JSON that Hash was computed from; nil: not known
	parts   [][]byte       // those of encoded that State.VIPs are; nil: not known
	vips    map[string]VIP // by their JSON, as Parse read them
}

// NewRequest returns the request for a state, which must not change afterwards.
func NewRequest(generation uint64, s State) Request {
	return (*Request)(nil).Next(generation, s)
}

// Next is NewRequest for the state that follows that of r, which may be nil. Few of a thousand VIPs change at a time: those that are as
// in r are not encoded again.
func (r *Request) Next(generation uint64, s State) Request {
	next := Request{Generation: generation, State: s}
	next.encode(r)
	next.Hash = hash(next.encoded)
	return next
}

// encode encodes the state, and takes the VIPs that last has from there.
func (r *Request) encode(last *Request) {
	if len(r.State.VIPs) == 0 {
		r.encoded = encode(&r.State)
		return
	}
	had := map[netip.Addr]int{}
	if last != nil {
		for i := range last.parts {
			had[last.State.VIPs[i].Addr] = i
		}
	}
	rest := r.State
	rest.VIPs = make([]VIP, 1)
	// Quotes in a string are escaped, so nothing else looks like the list.
	before, after, _ := bytes.Cut(encode(&rest), slices.Concat([]byte(`"vips":[`), encode(&rest.VIPs[0]), []byte("]")))
	b := append(slices.Clip(before), `"vips":[`...)
	ends := make([]int, 0, len(r.State.VIPs))
	for i := range r.State.VIPs {
		v := &r.State.VIPs[i]
		if i > 0 {
			b = append(b, ',')
		}
		if at, ok := had[v.Addr]; ok && v.Equal(&last.State.VIPs[at]) {
			b = append(b, last.parts[at]...)
		} else {
			b = append(b, encode(v)...)
		}
		ends = append(ends, len(b))
	}
	r.encoded = slices.Concat(b, []byte("]"), after)
	begin := len(before) + len(`"vips":[`)
	for _, end := range ends {
		r.parts = append(r.parts, r.encoded[begin:end])
		begin = end + len(",")
	}
}

// JSON returns the JSON that Parse reads. It is encoded only once: that of a thousand VIPs is half a megabyte.
func (r *Request) JSON() []byte {
	encoded := r.encoded
	if encoded == nil {
		encoded = encode(&r.State)
	}
	return slices.Concat(fmt.Appendf(nil, `{"generation":%d,"hash":%q,"state":`, r.Generation, r.Hash), encoded, []byte("}"))
}

// State is everything that one gateway has to do.
type State struct {
	// Cluster is the id of the controller's cluster. A gateway obeys one cluster.
	Cluster string `json:"cluster"`
	// Group names the gateways that replace one another. All of a group have the same VIPs and balancer.
	Group    string   `json:"group"`
	Balancer Balancer `json:"balancer"`
	// Cordoned gateways announce nothing, and keep balancing what still arrives.
	Cordoned bool `json:"cordoned,omitempty"`
	// Peers are the other gateways of the group. This gateway sends them its connections, which then survive its death.
	Peers []PeerGateway `json:"peers,omitempty"` // by name
	// Slots divide the ports that a VIP may have towards backends among the gateways of the group: SlotCount in the order of
	// their ports, or none, and this gateway takes any port.
	Slots []Slot `json:"slots,omitempty"`
	VIPs  []VIP  `json:"vips,omitempty"` // by address
	BGP   *BGP   `json:"bgp,omitempty"`  // required by VIPs announced by BGP
	VRRP  *VRRP  `json:"vrrp,omitempty"` // required by VIPs announced by VRRP
}

// PeerGateway is another gateway of the group.
type PeerGateway struct {
	URL  string `json:"url"`  // such as https://192.0.2.12:9479
	Name string `json:"name"` // the identity in its certificate
	// Address is the one to which packets for it can be handed over, if it is on one link with this gateway; none: no packets
	// are.
	Address netip.Addr `json:"address,omitzero"`
	// OtherAddress is the one of the other family, if that is known. nftables hands a packet over to the address of its family; eBPF
	// hands all packets over to Address.
	OtherAddress netip.Addr `json:"otherAddress,omitzero"`
}

// AddressOf returns the address of a family, the zero Addr if it is not known.
func (p *PeerGateway) AddressOf(v4 bool) netip.Addr {
	for _, a := range []netip.Addr{p.Address, p.OtherAddress} {
		if a.IsValid() && a.Is4() == v4 {
			return a
		}
	}
	return netip.Addr{}
}

// The slots: SlotPorts ports each.
const (
	SlotCount = 64
	SlotPorts = 1 << 16 / SlotCount
)

// Slot is a range of ports. Only its owner takes ports in it for connections of clients, so the destination port of a
// backend's answer says which gateway has the connection, even if that has just begun.
type Slot struct {
	// Owner and Previous are gateways: 0 is this one, and n is Peers[n-1]. Previous gets the packets that the owner does not
	// know: it had the slot before the owner joined.
	Owner    int `json:"owner"`
	Previous int `json:"previous"`
}

// OwnSlots returns for each slot the one that this gateway uses instead: the slot itself if it is its own, else one of its
// own. A gateway without any uses all of them.
func (s *State) OwnSlots() (instead [SlotCount]int) {
	var own []int // without the ports below 1024, which are those of servers
	for i := range instead {
		instead[i] = i
		if i > 0 && s.owns(i) {
			own = append(own, i)
		}
	}
	for i := range instead {
		if !s.owns(i) && len(own) > 0 {
			instead[i] = own[i%len(own)]
		}
	}
	return instead
}

func (s *State) owns(slot int) bool { return len(s.Slots) == 0 || s.Slots[slot].Owner == 0 }

// Balancer names the technology that balances packets on a gateway.
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

// Return says how replies of backends reach the client.
type Return string

// The return paths.
const (
	// Routed keeps the client's address. The network of the backends routes replies through a gateway.
	Routed Return = "routed"
	// SNAT makes the VIP the source. Replies come back to the gateway that has the VIP.
	SNAT Return = "snat"
	// Masquerade makes the gateway's own address the source. Connections break when their gateway dies.
	Masquerade Return = "masquerade"
)

// VIP is an address whose packets a gateway balances.
type VIP struct {
	Addr     netip.Addr `json:"addr"`
	Announce Announce   `json:"announce"`
	Return   Return     `json:"return"`
	Route    *Route     `json:"route,omitempty"` // of a VIP announced by BGP; nil: as all routes of the gateway
	// RouterID is the virtual router of a VIP announced by VRRP; 0: the first one of the gateway. A gateway that is not in it
	// does not announce the VIP.
	RouterID  uint8      `json:"routerID,omitempty"`
	Frontends []Frontend `json:"frontends"` // by port and protocol
}

// Route says how the route to a VIP differs from other routes of its gateway. What is not set is as in BGP.
type Route struct {
	// Peers are the only ones that receive the route, of those that the gateway has; empty: all.
	Peers           []netip.Addr `json:"peers,omitempty"`
	MED             *uint32      `json:"med,omitempty"`
	LocalPreference *uint32      `json:"localPreference,omitempty"`
	Communities     []string     `json:"communities,omitempty"` // instead of those in BGP
}

// Serves reports whether any frontend has a backend for new connections. Only then is the VIP announced.
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
	Sources  []netip.Prefix `json:"sources,omitempty"`  // networks of allowed clients; empty: all clients
	Affinity int32          `json:"affinity,omitempty"` // session affinity in seconds; 0: none
	// Backends are sorted by address and port, because all gateways of a group must choose the same one. Without
	// backends, connections are refused.
	Backends []Backend `json:"backends"`
}

// Equal reports whether two VIPs are the same, and so is their JSON.
func (v *VIP) Equal(o *VIP) bool {
	return v.Addr == o.Addr && v.Announce == o.Announce && v.Return == o.Return && v.RouterID == o.RouterID && reflect.DeepEqual(v.Route, o.Route) &&
		same(v.Frontends, o.Frontends, Frontend.equal)
}

func (f Frontend) equal(o Frontend) bool {
	return f.Service == o.Service && f.Protocol == o.Protocol && f.Port == o.Port && f.Affinity == o.Affinity &&
		slices.Equal(f.Sources, o.Sources) && same(f.Backends, o.Backends, func(a, b Backend) bool { return a == b })
}

// same is slices.EqualFunc, but nil differs from an empty list, as null does from [].
func same[T any](a, b []T, equal func(a, b T) bool) bool {
	return (a == nil) == (b == nil) && slices.EqualFunc(a, b, equal)
}

// Backend is a destination of packets.
type Backend struct {
	Addr   netip.Addr `json:"addr"` // of the VIP's family
	Port   uint16     `json:"port"`
	Weight uint16     `json:"weight"` // 1 or more, relative to the other backends
	// Draining backends keep their connections and get no new ones.
	Draining bool `json:"draining,omitempty"`
}

// BGP configures the speaker of a gateway. Times are in milliseconds where the name says so, else in seconds.
type BGP struct {
	ASN      uint32     `json:"asn"`
	RouterID netip.Addr `json:"routerID"` // IPv4
	// MED (lower is preferred by neighbours) and LocalPreference (higher is preferred inside the AS) distinguish active
	// from standby gateways. Without them all are equal.
	MED             *uint32 `json:"med,omitempty"`
	LocalPreference *uint32 `json:"localPreference,omitempty"`
	// LinkBandwidth is in Mbit/s, for routers that balance by draft-ietf-idr-link-bandwidth; 0: the community is not sent.
	LinkBandwidth uint32 `json:"linkBandwidth,omitempty"`
	// Communities are those of RFC 1997 ("65000:100", "no-export") or large communities of RFC 8092 ("65000:1:2").
	Communities []string `json:"communities,omitempty"`
	// GracefulRestart is the number of seconds for which neighbours keep our routes while the gateway restarts; 0 turns
	// it off.
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
	// TTLSecurity is the number of hops to the peer, if packets from farther away are dropped (RFC 5082); 0: they are not.
	TTLSecurity uint8 `json:"ttlSecurity,omitempty"`
	// MaxPrefixes is the number of routes of a family that the peer may send; 0: 10,000.
	MaxPrefixes uint32 `json:"maxPrefixes,omitempty"`
	BFD         *BFD   `json:"bfd,omitempty"`
}

// BFD configures bidirectional forwarding detection with a peer (RFC 5881). Routes are announced only while it is up.
type BFD struct {
	IntervalMillis uint32 `json:"intervalMillis"`
	Multiplier     uint8  `json:"multiplier"`
}

// VRRP configures a gateway's role in virtual routers (RFC 9568), which own the VIPs announced by VRRP.
type VRRP struct {
	Interface      string          `json:"interface"`
	Source         netip.Addr      `json:"source"`            // the gateway's own address, which sends unicast to Peers
	Peers          []netip.Addr    `json:"peers"`             // empty: a single gateway, which uses multicast
	RouterID       uint8           `json:"routerID"`          // of the virtual router of VIPs that name none, 1 to 254
	Priority       uint8           `json:"priority"`          // in that one, 1 to 254; the highest is the master
	Routers        []VirtualRouter `json:"routers,omitempty"` // further ones
	IntervalMillis uint32          `json:"intervalMillis"`    // between advertisements, a multiple of 10
}

// VirtualRouters returns the virtual routers: that of VIPs that name none, and the further ones.
func (r *VRRP) VirtualRouters() []VirtualRouter {
	return append([]VirtualRouter{{RouterID: r.RouterID, Priority: r.Priority}}, r.Routers...)
}

// VirtualRouter is a gateway's place in one virtual router.
type VirtualRouter struct {
	RouterID uint8 `json:"routerID"` // 1 to 254
	Priority uint8 `json:"priority"` // 1 to 254; the highest is the master
}

// Hash returns a digest of the state: SHA-256 of its JSON, in hexadecimal.
func (s *State) Hash() string { return hash(encode(s)) }

// encode returns the JSON of a state, or of a part of one.
func encode(part any) []byte {
	b, err := json.Marshal(part)
	if err != nil {
		panic(fmt.Sprintf("desired: a state is not JSON: %v", err)) // it has only plain fields
	}
	return b
}

func hash(encoded []byte) string {
	sum := sha256.Sum256(encoded)
	return hex.EncodeToString(sum[:])
}

// Status is the answer to GET /v1/state.
type Status struct {
	// Generation and Hash are those of the state applied last; 0 and "" before the first.
	Generation uint64 `json:"generation"`
	Hash       string `json:"hash"`
	// Drift lists how the machine differs from the applied state, by component. The agent repairs it without a request.
	Drift []Fault `json:"drift,omitempty"`
	// Refused has a fault for each Service of that state that is not applied: it stays as it was, or is left out. The agent
	// tries again without a request.
	Refused []Fault `json:"refused,omitempty"`
	// Announced are the VIPs announced to neighbours now.
	Announced []netip.Addr `json:"announced,omitempty"`
	// Version is the build of the gateway.
	Version string    `json:"version"`
	Since   time.Time `json:"since"` // time at which it was applied
}

// CertificateRequest is the answer to POST /v1/certificate/request.
type CertificateRequest struct {
	Request string `json:"request"` // for a certificate of the gateway with a new key (PKCS #10, PEM)
}

// Certificate is the body of POST /v1/certificate.
type Certificate struct {
	Certificate string `json:"certificate"` // for the last request (PEM)
}

// Refusal is the body of every answer but 200: nothing was changed. A Service that is refused alone is in Status.Refused.
type Refusal struct {
	Message string  `json:"message"`
	Faults  []Fault `json:"faults,omitempty"`
}
