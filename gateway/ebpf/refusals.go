package ebpf

import (
	"fmt"

	"github.com/isthmus-net/isthmus/bpf"
)

// Refusal is a Service and a reason for which packets were refused or dropped.
type Refusal struct {
	// Service is namespace/name, "" if the packet had none or it was removed.
	Service string
	// Reason is the name of a bpf.DropReason.
	Reason string
}

// Refusals returns how many packets were refused or dropped since the maps were created.
func (b *Balancer) Refusals() (map[Refusal]uint64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	counts := map[bpf.GatewayRefusalKey]uint64{}
	if err := dump(b.k.maps[bpf.MapRefusals], counts); err != nil {
		return nil, err
	}
	all := map[Refusal]uint64{}
	for key, n := range counts {
		all[Refusal{b.services[key.Service], fmt.Sprint(bpf.DropReason(key.Reason))}] += n
	}
	return all, nil
}
