package controller

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// slots divides the ports of VIPs among a gateway and its peers, as the gateway's state has it: none without peers.
//
// Gateways are ranked for each slot by a hash of both (rendezvous hashing). The first owns it, and the second owned it before the
// first joined. So the gateways alone decide, and a controller that restarts needs to remember nothing: a gateway that joins takes
// slots from their previous owners, one that is removed leaves its slots to theirs, and no other slot moves.
func slots(n *v1alpha1.GatewayNode, peers []*v1alpha1.GatewayNode) []desired.Slot {
	if len(peers) == 0 {
		return nil
	}
	gateways := slices.Concat([]*v1alpha1.GatewayNode{n}, peers)
	all := make([]desired.Slot, desired.SlotCount)
	for i := range all {
		ranked := make([]int, len(gateways))
		hashes := make([]uint64, len(gateways))
		for g, node := range gateways {
			sum := sha256.Sum256(fmt.Appendf(nil, "%d %s", i, node.Name))
			ranked[g], hashes[g] = g, binary.BigEndian.Uint64(sum[:])
		}
		slices.SortFunc(ranked, func(a, b int) int { return cmp.Compare(hashes[b], hashes[a]) })
		all[i] = desired.Slot{Owner: ranked[0], Previous: ranked[1]}
	}
	return all
}
