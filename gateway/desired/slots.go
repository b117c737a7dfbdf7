package desired

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
)

// Slots divides the ports of VIPs among a gateway and its peers, given their names, as the gateway's state has it: none
// without peers.
//
// Gateways are ranked for each slot by a hash of both (rendezvous hashing). The first owns it, and the second owned it before the
// first joined. So the gateways alone decide, and a controller that restarts needs to remember nothing: a gateway that joins takes
// slots from their previous owners, one that is removed leaves its slots to theirs, and no other slot moves.
func Slots(gateway string, peers []string) []Slot {
	if len(peers) == 0 {
		return nil
	}
	gateways := slices.Concat([]string{gateway}, peers)
	all := make([]Slot, SlotCount)
	for i := range all {
		ranked := make([]int, len(gateways))
		hashes := make([]uint64, len(gateways))
		for g, name := range gateways {
			sum := sha256.Sum256(fmt.Appendf(nil, "%d %s", i, name))
			ranked[g], hashes[g] = g, binary.BigEndian.Uint64(sum[:])
		}
		slices.SortFunc(ranked, func(a, b int) int { return cmp.Compare(hashes[b], hashes[a]) })
		all[i] = Slot{Owner: ranked[0], Previous: ranked[1]}
	}
	return all
}
