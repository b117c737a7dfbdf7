// Package datapath is the adapter between package lb and the kernel: it loads the programs of package
// bpf, attaches them to the node's cgroup, and reads and writes their maps.
//
// The packet path, if there is one, is on network devices besides: links of TCX, pinned too, or filters of clsact
// where the kernel has no TCX, under names by which they are found again.
//
// Everything is pinned, so it outlives the process:
//
//	<bpffs>/isthmus/maps-v<ABI>/<map>   the maps, under the names bpftool shows
//	<bpffs>/isthmus/progs/<hook>        the program each link runs, to compare and to go back to
//	<bpffs>/isthmus/links/<hook>        the attachments
//
// Builds of one ABI share the maps, and a new build's programs take the place of the old ones at once. A build
// of another ABI, in an upgrade as in a rollback, makes maps of its own, and the programs that run go on with
// theirs until those are filled. Then it swaps the programs, and only then what is old goes. Killed between
// any two steps it leaves a node that serves and that either build takes over. What sockets had been told is
// kept in maps too: a socket that lived through a change of ABI has its backend's name as its peer, an
// unconnected UDP socket may get one reply under that name, and the packet path knows its connections no more
// and resets them. Between builds of one ABI nothing of that happens.
//
// The capabilities BPF, NET_ADMIN and PERFMON are enough: nothing is ever looked up by its kernel id,
// which would take SYS_ADMIN. That is why the programs are pinned beside the links.
package datapath
