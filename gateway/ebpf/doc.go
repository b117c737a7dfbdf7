// Package ebpf balances with eBPF. It translates a state into entries of a few maps. A program at the ingress of the
// gateway's devices reads them (bpf/gateway.bpf.c). Program and maps are pinned and continue without this process. A
// new process reads them and only writes what differs.
//
// Every gateway chooses the same backend for a client, since all have the same Maglev tables and the same hash.
// Connections that are older than a change of backends do not follow the hash: Export sends them to other gateways,
// and Import stores them there.
package ebpf
