package ebpf

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// The capacity in connections that a Config may have, and the largest default. There is room for as many half-open connections, and
// for half as many flows of UDP. A full map evicts the one that was idle for longest. Memory is allocated up front.
const (
	MinFlows        = 1024
	MaxFlows        = 4194304
	maxDefaultFlows = 1048576
)

const (
	// entriesPerFlow is the maximum number of map entries of a connection (bpf/gateway.bpf.c).
	entriesPerFlow = 4
	// flowBytes is the memory for each connection of the capacity, in bytes: 168 for each entry.
	flowBytes = 168 * (entriesPerFlow + entriesPerFlow + entriesPerFlow/2)
)

// DefaultFlows returns the capacity in connections for which the machine has memory: they take a sixteenth of it.
func DefaultFlows() (int, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("read the size of the memory: %w", err)
	}
	return flowsIn(info.Totalram * uint64(info.Unit)), nil
}

// flowsIn returns the default capacity of a machine with so many bytes of memory.
func flowsIn(memory uint64) int { return int(min(max(memory/16/flowBytes, MinFlows), maxDefaultFlows)) }

// size sets the capacity of the maps in a spec.
func size(spec *ebpf.CollectionSpec, flows int) {
	spec.Maps[bpf.MapFlows].MaxEntries = uint32(flows * entriesPerFlow)
	spec.Maps[bpf.MapHandshakes].MaxEntries = uint32(flows * entriesPerFlow)
	spec.Maps[bpf.MapUDPFlows].MaxEntries = uint32(flows * entriesPerFlow / 2)
}

// flows returns the capacity in connections. An earlier process may have created the map.
func (k *kernel) flows() int { return int(k.maps[bpf.MapFlows].MaxEntries()) / entriesPerFlow }

// limitHalfOpen sets the number of half-open entries that a CPU begins, so that all CPUs together replace a quarter of the map at
// most (bpf/gateway_maps.h). The program's own value is the upper limit.
func (k *kernel) limitHalfOpen(spec *ebpf.CollectionSpec) error {
	const online = "/sys/devices/system/cpu/online"
	text, err := os.ReadFile(online)
	if err != nil {
		return fmt.Errorf("count CPUs: %w", err)
	}
	cpus, err := countCPUs(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("count CPUs in %s: %w", online, err)
	}
	limit, most := spec.Variables[bpf.VarHalfOpenMax], uint32(0)
	if err := limit.Get(&most); err != nil {
		return fmt.Errorf("read the limit of half-open flows: %w", err)
	}
	return limit.Set(min(most, halfOpenMax(k.maps[bpf.MapHandshakes].MaxEntries(), cpus)))
}

// halfOpenMax returns the share of each CPU.
func halfOpenMax(entries, cpus uint32) uint32 { return max(entries/4/cpus, 2*entriesPerFlow) }

// countCPUs returns the number of CPUs in a list such as 0-3,6.
func countCPUs(list string) (n uint32, err error) {
	for item := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(item, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 16)
		if err != nil {
			return 0, err
		}
		to, err := strconv.ParseUint(last, 10, 16)
		if err != nil {
			return 0, err
		}
		if to < from {
			return 0, fmt.Errorf("%q is no list of CPUs", list)
		}
		n += uint32(to - from + 1)
	}
	return n, nil
}
