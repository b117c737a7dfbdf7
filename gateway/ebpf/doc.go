// Package ebpf balances with eBPF. A state comes in and becomes entries of a few maps, which one program reads that stands at
// the ingress of the gateway's devices (bpf/gateway.bpf.c). Program and maps are pinned and go on without this process; one
// that starts finds in them what there is, and writes only what differs.
//
// Every gateway chooses the same backend for the same client, since all have the same Maglev tables and hash alike.
// Connections that are older than a change of backends do not follow the hash: Export tells of them, and Import makes them
// known on another gateway.
package ebpf
