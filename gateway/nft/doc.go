// Package nft balances with nftables. A state becomes elements of a few sets and maps of the tables ip and ip6 isthmus-gateway.
// The rules do not depend on the state, and are as many for a thousand VIPs as for one; only each timeout of session
// affinity adds a chain.
//
// All gateways of a group have the same Maglev tables and hash alike, so every gateway chooses the same backend for a
// client, and a connection that began elsewhere continues here. A connection that is older than a change of the backends
// does not follow the hash. With desired.Routed, the first packet from its backend identifies it. An answer that arrives at another gateway
// than its question is handed over, see answers.go.
package nft
