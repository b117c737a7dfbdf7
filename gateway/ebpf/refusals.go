package ebpf

import (
	"fmt"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Refusals returns how many packets were refused or dropped since the maps were created.
func (b *Balancer) Refusals() (map[flows.Refusal]uint64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	counts := map[bpf.GatewayRefusalKey]uint64{}
	if err := dump(b.k.maps[bpf.MapRefusals], counts); err != nil {
		return nil, err
	}
	all := map[flows.Refusal]uint64{}
	for key, n := range counts {
		all[flows.Refusal{Service: b.services[key.Service].Service, Reason: fmt.Sprint(bpf.DropReason(key.Reason))}] += n
	}
	return all, nil
}
