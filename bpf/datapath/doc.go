// Package datapath is the adapter between package lb and the kernel: it loads the programs of package
// bpf, attaches them to the node's cgroup, and reads and writes their maps.
//
// Everything is pinned, so it outlives the process:
//
//	<bpffs>/isthmus/maps/<map>     the maps, under the names bpftool shows
//	<bpffs>/isthmus/progs/<hook>   the program each link runs, to compare and to go back to
//	<bpffs>/isthmus/links/<hook>   the attachments
//
// The capabilities BPF, NET_ADMIN and PERFMON are enough: nothing is ever looked up by its kernel id,
// which would take SYS_ADMIN. That is why the programs are pinned beside the links.
package datapath
