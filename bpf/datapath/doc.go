// Package datapath is the adapter between package lb and the kernel: it loads the programs of package
// bpf, attaches them to the node's cgroup, and reads and writes their maps.
//
// The packet path, if enabled, runs on network devices: as TCX links, which are pinned too, or as clsact filters on
// kernels without TCX, which are found again by their names.
//
// Everything is pinned, so it outlives the process:
//
//	<bpffs>/isthmus/maps-v<ABI>/<map>   the maps, under the names bpftool shows
//	<bpffs>/isthmus/progs/<hook>        the program each link runs, to compare and to go back to
//	<bpffs>/isthmus/links/<hook>        the attachments
//
// Builds of one ABI share the maps, and a new build replaces the programs of the old one at once. A build of another
// ABI, in an upgrade as in a rollback, creates its own maps, and the running programs keep using theirs until the new
// maps are filled. Then the programs are swapped, and only then are the old maps removed. A process that is killed between
// any two steps leaves a node that still serves and that either build can take over.
//
// A change of ABI costs this: getpeername of an open socket returns the backend's address instead of the VIP, and an
// unconnected UDP socket may get one reply from that address. Builds of one ABI keep even that.
//
// The capabilities BPF, NET_ADMIN and PERFMON are enough: nothing is looked up by its kernel id, which would take
// SYS_ADMIN. That is why the programs are pinned beside the links.
package datapath
