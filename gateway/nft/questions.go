package nft

import (
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// A client's packet may come to another gateway than its connection's, when the router chooses anew. With `routed` it needs nobody's help:
// its backend follows from the hash, and knows the client by the client's own port. Otherwise it is handed over:
//
//   - A connection that a peer masquerades stays with that peer, the keeper. Once the keeper has announced it, connection tracking here has
//     an entry that leads to the keeper in place of a backend.
//   - A TCP connection that is not known yet may be announced in a moment. Until then all peers get copies of its packets. One that is still
//     unknown afterwards goes on by the hash. A RST is not handed over: it may answer a packet that a peer has sent to the former client of
//     a port, and would end the connection that has the port now.
const (
	// announcing is how long a connection may be announced after its first packet here. Agents of busy machines take more than 100 ms.
	announcing = 300 * time.Millisecond
	// unknownLifetime is how long a connection is remembered as one that nobody has announced.
	unknownLifetime = 10 * time.Second
	// maxUnknown bounds the remembered connections. Further ones go on by the hash.
	maxUnknown = 1 << 16
)

// question loads client and VIP with their ports from register 0 on.
func (f family) question() []expr.Any {
	return join(f.client(0), load(sourcePort, f.addr), load(f.destination, f.addr+1), load(destinationPort, 2*f.addr+1))
}

// toKeeper hands a client's packet over to the peer that masquerades its connection. If the peer is not one any more, the packet goes on.
func (f family) toKeeper() []rule {
	const reply = 1 << 24 // 1 in the only byte of four that the kernel reads
	keeper := one(&expr.Ct{Key: expr.CtKeySRC, Register: reg(0), Direction: reply})
	return []rule{{"to the peer that keeps the connection", join(keeper, f.in(peerAddrs), f.setHops(handed+1), one(&expr.Dup{RegAddr: reg(0)}), count, drop)}}
}

// questions receives clients' packets of no known connection, which no peer has handed over.
func (f family) questions(vips set) rule {
	return rule{
		"hand over a client's packet whose connection a peer may have: " + setNames[vips],
		join(protocolIs(unix.IPPROTO_TCP), flags(syn|rst, 0), load(f.destination, 0), f.in(vips), f.sender, f.notIn(backends), f.hasPeers(), jumpTo("unknown")),
	}
}

// unknown hands packets over to all peers until the connection should have been announced.
func (f family) unknown() []rule {
	remember := func(in set, lives time.Duration) []expr.Any {
		return one(&expr.Dynset{SrcRegKey: reg(0), SetName: familySet{in, f.v4}.name(), Operation: unix.NFT_DYNSET_OP_ADD, Timeout: lives})
	}
	return []rule{
		{"its first packet", join(f.question(), f.notIn(unknown), remember(unknown, unknownLifetime), remember(awaited, announcing))},
		{"a peer may announce it any moment", join(f.question(), f.in(awaited), f.handToPeers())},
		{"too many such packets", join(f.question(), f.in(awaited), count, drop)},
	}
}

// questionFromPeer receives packets of clients from peers.
func (f family) questionFromPeer() []rule {
	return []rule{
		{"another peer keeps the connection", join(kept, count, drop)},
		{"a peer handed it over", join(known, f.setHops(afterwards), count, accept)},
		{"a client connects again by a port that it had before", join(protocolIs(unix.IPPROTO_TCP), flags(synAck, syn), f.setHops(afterwards), count, accept)},
		{"drop a client's packet that a peer handed over in vain", join(count, drop)},
	}
}
