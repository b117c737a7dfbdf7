package bpf

import "github.com/cilium/ebpf"

// The keys and values of the maps of the DNS program, which names.h describes. They are not part of the ABI: one process
// creates, fills and owns the maps.
type (
	// DNSName is the key of the map names: a name in wire format and lower case, padded with zeros.
	DNSName = namesDnsName
	// DNSAddresses is its value: all addresses of the name.
	DNSAddresses = namesDnsAddresses
	// DNSResolver is the key of the map resolvers: the address of a resolver.
	DNSResolver = namesDnsResolver
	// DNSClient is the key of the map dns_clients: a prefix of source addresses, of 16 bytes.
	DNSClient = namesDnsClient
	// NamesSettings is the only value of the map names_settings. TTL is in network order.
	NamesSettings = namesNamesSettings
)

// The families of DNSAddresses (names.h).
const (
	NamesIPv4 = 1
	NamesIPv6 = 2
)

// The values of the map resolvers (names.h). A guarded resolver answers only the clients in dns_clients.
const (
	NamesAnswered = uint8(1)
	NamesGuarded  = uint8(2)
)

// The indices of the map names_counts: answers to queries for IPv4 and for IPv6 addresses.
const (
	NamesA    = uint32(namesNamesCountNAMES_A)
	NamesAAAA = uint32(namesNamesCountNAMES_AAAA)
)

// The maps of the DNS program.
const (
	MapNames         = namesMapNames
	MapResolvers     = namesMapResolvers
	MapDNSClients    = namesMapDnsClients
	MapNamesSettings = namesMapNamesSettings
	MapNamesCounts   = namesMapNamesCounts
)

// ProgAnswerNames is a classifier for TCX at the ingress of a pod's host veth. It returns TC_ACT_UNSPEC for packets that
// it does not answer.
const ProgAnswerNames = namesProgAnswerNames

// LoadNamesSpec parses the embedded object for the machine's byte order. The caller owns the result.
func LoadNamesSpec() (*ebpf.CollectionSpec, error) { return loadNames() }
