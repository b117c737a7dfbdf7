package clusterset

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// ClusterID names one member of the ClusterSet: an RFC 1123 label, or two joined by a dot
// (KEP-1645, "ClusterSet Membership"). At most 63 characters in all.
type ClusterID string

// Validate returns the reason why id cannot name a member, or nil.
func (id ClusterID) Validate() error {
	if len(id) == 0 || len(id) > 63 {
		return fmt.Errorf("cluster id %q must have 1 to 63 characters, has %d", string(id), len(id))
	}
	labels := strings.Split(string(id), ".")
	if len(labels) > 2 {
		return fmt.Errorf("cluster id %q has %d labels; use one, or two joined by a dot", string(id), len(labels))
	}
	for _, l := range labels {
		if !IsLabel(l, 63) {
			return fmt.Errorf("cluster id %q: %q is not an RFC 1123 label; use a-z, 0-9 and '-', with a letter or digit at both ends", string(id), l)
		}
	}
	return nil
}

// IsLabel reports whether s has the form of an RFC 1123 label in lower case, and at most most characters.
func IsLabel(s string, most int) bool {
	if s == "" || len(s) > most || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if !(c == '-' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z') {
			return false
		}
	}
	return true
}

// ServiceName is the namespaced name by which Services of all members are the same Service
// (namespace sameness, KEP-1645).
type ServiceName struct {
	Namespace string
	Name      string
}

// String returns "namespace/name".
func (n ServiceName) String() string { return n.Namespace + "/" + n.Name }

// IsShared reports whether namespace is the same one in all members. The namespaces kube-* belong to each cluster alone: an
// import into kube-system could replace the endpoints of a cluster's own DNS.
func IsShared(namespace string) bool { return !strings.HasPrefix(namespace, "kube-") }

// Compare orders names by namespace, then by name.
func (n ServiceName) Compare(o ServiceName) int {
	return cmp.Or(strings.Compare(n.Namespace, o.Namespace), strings.Compare(n.Name, o.Name))
}

// Protocol is an IP protocol number (IANA). Only the constants below occur.
type Protocol uint8

// The transport protocols of a Service port.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns the Kubernetes spelling: TCP, UDP or SCTP.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	default:
		return fmt.Sprintf("protocol(%d)", uint8(p))
	}
}

// Family is an IP address family.
type Family uint8

// The address families, in the order in which lists have them.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// String returns the Kubernetes spelling: IPv4 or IPv6.
func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	default:
		return fmt.Sprintf("family(%d)", uint8(f))
	}
}

// FamilyOf returns the family of a; an IPv4-mapped IPv6 address is IPv4.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// IsUnicast reports whether a can be the address of an endpoint or a ClusterSetIP: it is no loopback, link-local,
// multicast, broadcast or unspecified address and has no zone. Class E (240.0.0.0/4) is allowed.
func IsUnicast(a netip.Addr) bool {
	a = a.Unmap()
	if !a.IsValid() || a.Zone() != "" || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() {
		return false
	}
	thisNetwork := a.Is4() && a.As4()[0] == 0 // RFC 1122, section 3.2.1.3
	return !thisNetwork && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// ServiceType is the way in which clients reach an imported Service.
type ServiceType uint8

// The types of an import (KEP-1645, "ServiceImport type").
const (
	ClusterSetIP ServiceType = iota + 1 // through a VIP
	Headless                            // through the addresses of its endpoints
)

// String returns the MCS API spelling.
func (t ServiceType) String() string {
	switch t {
	case ClusterSetIP:
		return "ClusterSetIP"
	case Headless:
		return "Headless"
	default:
		return fmt.Sprintf("type(%d)", uint8(t))
	}
}

// Choice is the choice whether a Service has a ClusterSetIP. The first export decides for the lifetime of the import; later
// exports that differ are reported as a conflict.
type Choice uint8

// The choices. Headless exports, and members of an older version, have Unknown.
const (
	Unknown Choice = iota
	Enabled
	Disabled
)

// ChoiceOf returns Enabled or Disabled.
func ChoiceOf(enabled bool) Choice {
	if enabled {
		return Enabled
	}
	return Disabled
}

// String returns the value of the annotation lighthouse.submariner.io/use-clusterset-ip, "" for Unknown.
func (c Choice) String() string {
	switch c {
	case Enabled:
		return "true"
	case Disabled:
		return "false"
	default:
		return ""
	}
}

// Port is one port of a Service as clients see it. Ports are equal when all fields are.
type Port struct {
	Name        string
	Protocol    Protocol
	AppProtocol string
	Port        uint16
}

// SessionAffinity selects whether a client's connections go to one backend.
type SessionAffinity struct {
	ClientIP bool
	Timeout  time.Duration // meaningful with ClientIP; whole seconds, 0 < Timeout <= 24h
}

// Export describes one Service that a member exports. Merge needs nothing else.
type Export struct {
	Cluster               ClusterID
	Service               ServiceName
	ExportedAt            time.Time // creation of the ServiceExport; precedence (KEP-1645, "Conflict resolution")
	Type                  ServiceType
	Ports                 []Port
	Families              []Family
	SessionAffinity       SessionAffinity
	InternalTrafficPolicy string // "" means unset
	TrafficDistribution   string // "" means unset
	Labels                map[string]string
	Annotations           map[string]string
	ServiceLabels         map[string]string // of the Service itself, for its endpoints; they never conflict

	// IPs is the ClusterSetIP that the member has seen for this Service. It restores a lost aggregate with the same
	// address. Empty before the first allocation.
	IPs []netip.Addr

	// WantsIP is the choice of this export, AgreedIP the agreed choice that the member has seen, remembered like IPs.
	WantsIP, AgreedIP Choice
}

// Import is one Service of the ClusterSet, the same in every member.
type Import struct {
	Service               ServiceName
	Created               time.Time // in the importing cluster; zero if unknown
	Type                  ServiceType
	IPs                   []netip.Addr // at most one per family; empty for Headless
	UseIP                 Choice       // Disabled: it never gets an IP
	Families              []Family
	Ports                 []Port
	Clusters              []ClusterID // exporters whose endpoints are used, sorted
	SessionAffinity       SessionAffinity
	InternalTrafficPolicy string
	TrafficDistribution   string
	Labels                map[string]string
	Annotations           map[string]string
}
