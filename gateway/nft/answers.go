package nft

import (
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// An answer of a backend may arrive at another gateway than its connection. Until that is known here, such an answer is handed over to the
// gateway that has it: with `snat` to the owner of its port; with `routed`, where the port is the client's, to all peers. Connection tracking
// at that gateway must also see the SYN+ACK, the FIN and the RST of a connection that is known here: it gets copies of them.
//
// What a peer sends is told by its hop limit, as the backend's address stays in it. The kernel decrements it in the packets that it
// duplicates. A port's owner hands a packet on to the one before, which hands nothing on, so that nothing goes in a circle.
const (
	copied  = 1 // a copy, which the peer's connection tracking sees before the packet is dropped
	handed  = 2 // handed over to a gateway that keeps or drops it
	toOwner = 3 // handed over to the owner of its port
	// afterwards is the hop limit of a packet that was handed over or copied, and goes on.
	afterwards = 64
)

const (
	// maxPeers bounds the peers to which such packets go.
	maxPeers = 15
	// toPeersRate bounds the packets of each rule that go to all peers, in a second, so that a backend or client that makes up packets
	// does not multiply them.
	toPeersRate, toPeersBurst = 20_000, 2_000
)

var toPeersLimit = one(&expr.Limit{Type: expr.LimitTypePkts, Rate: toPeersRate, Unit: expr.LimitTimeSecond, Burst: toPeersBurst})

// answers receives all packets, after connection tracking.
func (f family) answers() []rule {
	tcp, udp := protocolIs(unix.IPPROTO_TCP), protocolIs(unix.IPPROTO_UDP)
	isSynAck, notSyn := join(tcp, flags(synAck, synAck)), join(tcp, compareFlags(synAck, expr.CmpOpNeq, syn))
	// The destination of snat's answers is the VIP.
	ofSNAT := join(f.sender, f.in(backends), load(f.destination, 0), f.in(snat))
	ofRouted := join(f.sender, f.in(routedBackends))
	ofSeveral := join(ofRouted, f.notIn(backendFrontends))
	toPeers := f.handToPeers()
	return []rule{
		{"from a peer", join(f.hops(expr.CmpOpLte, toOwner), jumpTo("from-peers"))},
		{"a connection that a peer keeps", join(kept, jumpTo("to-keeper"))},
		{"an open TCP connection", join(tcp, flags(fin|syn|rst, 0), established, accept)},
		{"a known UDP flow", join(udp, established, accept)},
		{"the answer to a SYN that passed here", join(tcp, established, halfOpen, accept)},
		{"copy a SYN+ACK or RST to all peers", join(tcp, compareFlags(syn|rst, expr.CmpOpNeq, 0), established, ofRouted, toPeersLimit, f.setHops(copied+1), jumpTo("to-peers"))},
		{"a known connection with a port of this gateway", join(tcp, established, ofSNAT, slotOf(destinationPort, 0), f.notIn(owners), accept)},
		{"copy a FIN or RST to the owner of its port", join(tcp, flags(syn, 0), established, ofSNAT, f.duplicateTo(owners, copied), f.setHops(afterwards), accept)},
		{"a known connection", join(tcp, flags(syn, 0), established, accept)},
		{"hand over a packet whose connection the owner of its port may have", join(notSyn, ofSNAT, jumpTo("to-owner"))},
		{"hand over a datagram whose flow the owner of its port may have", join(udp, ofSNAT, jumpTo("to-owner"))},
		{"hand over a SYN+ACK whose SYN a peer may have seen", join(isSynAck, ofRouted, toPeers)},
		{"hand over a packet of a backend with several frontends, whose connection a peer may have", join(notSyn, ofSeveral, toPeers)},
		{"hand over a datagram of a backend with several frontends, whose flow a peer may have", join(udp, ofSeveral, toPeers)},
		f.questions(snat),
		f.questions(masquerade),
	}
}

// fromPeers receives packets that may be a peer's. Others pass.
func (f family) fromPeers() []rule {
	to := func(vips set) []expr.Any {
		return join(load(f.destination, 0), f.in(vips), jumpTo("question-from-peer"))
	}
	return []rule{
		{"of a backend", join(f.sender, f.in(backends), jumpTo("answer-from-peer"))},
		{"of a client, with snat", to(snat)},
		{"of a client, with masquerade", to(masquerade)},
	}
}

// answerFromPeer receives packets of backends from peers.
func (f family) answerFromPeer() []rule {
	return []rule{
		{"connection tracking has seen the copy", join(f.hops(expr.CmpOpEq, copied), count, drop)},
		{"a peer handed it over", join(established, f.setHops(afterwards), count, accept)},
		{"hand it on to the owner before", join(f.hops(expr.CmpOpEq, toOwner), slotOf(destinationPort, 0), f.notIn(owners), f.duplicateTo(previousOwners, handed), count, drop)},
		{"drop what a peer handed over in vain", join(count, drop)},
	}
}

// toOwner hands an answer over to the owner of its port, or an own one to the owner before.
func (f family) toOwner() []rule {
	return []rule{
		{"to the owner of the port", join(f.duplicateTo(owners, toOwner), count, drop)},
		{"to the owner before", join(f.duplicateTo(previousOwners, handed), count, drop)},
	}
}

// duplicateTo sends a copy to the gateway that a map has for the slot of the destination port, where it arrives with a hop limit.
func (f family) duplicateTo(s set, hops byte) []expr.Any {
	const port, to = 0, 1
	return join(slotOf(destinationPort, port), f.mappedFrom(port, s, to), f.setHops(hops+1), one(&expr.Dup{RegAddr: reg(to)}))
}

// hasPeers continues if the gateway has peers.
func (f family) hasPeers() []expr.Any {
	return join(one(&expr.Immediate{Register: reg(0), Data: []byte(peerKey(0))}), f.mapped(peers, 1))
}

// handToPeers ends a rule that hands packets over to all peers, if there are any.
func (f family) handToPeers() []expr.Any {
	return join(f.hasPeers(), toPeersLimit, f.setHops(handed+1), jumpTo("to-peers"))
}

// toPeers sends a packet to all peers.
func (f family) toPeers() (rules []rule) {
	const number, to = 0, 1
	for i := range maxPeers {
		n := one(&expr.Immediate{Register: reg(number), Data: []byte(peerKey(i))})
		rules = append(rules, rule{fmt.Sprintf("to peer %d", i), join(n, f.mappedFrom(number, peers, to), one(&expr.Dup{RegAddr: reg(to)}))})
	}
	return append(rules,
		rule{"it was copied", join(f.hops(expr.CmpOpEq, copied+1), f.setHops(afterwards), accept)},
		rule{"it was handed over", join(count, drop)})
}
