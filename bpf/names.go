package bpf

import "github.com/cilium/ebpf"

// The keys and values of the maps of the program that answers questions of DNS, as names.h describes them. They are
// no part of the ABI: one process makes, fills and owns them.
type (
	// DNSName is the key of the map names: a name in lower case and on the wire, zero behind its end.
	DNSName = namesDnsName
	// DNSAddresses is its value: all addresses that the name has.
	DNSAddresses = namesDnsAddresses
	// DNSResolver is the key of the map resolvers: an address that questions are sent to.
	DNSResolver = namesDnsResolver
	// NamesSettings is the one value of the map names_settings. TTL is in network order.
	NamesSettings = namesNamesSettings
)

// The families of DNSAddresses (names.h).
const (
	NamesIPv4 = 1
	NamesIPv6 = 2
)

// The indices of the map names_counts: answers to questions for IPv4 and for IPv6 addresses.
const (
	NamesA    = uint32(namesNamesCountNAMES_A)
	NamesAAAA = uint32(namesNamesCountNAMES_AAAA)
)

// The maps of that program.
const (
	MapNames         = namesMapNames
	MapResolvers     = namesMapResolvers
	MapNamesSettings = namesMapNamesSettings
	MapNamesCounts   = namesMapNamesCounts
)

// ProgAnswerNames is a classifier for TCX at the ingress of a pod's host veth. It returns TC_ACT_UNSPEC for whatever
// it does not answer.
const ProgAnswerNames = namesProgAnswerNames

// LoadNamesSpec parses the embedded object for this machine's byte order. The result is the caller's.
func LoadNamesSpec() (*ebpf.CollectionSpec, error) { return loadNames() }
