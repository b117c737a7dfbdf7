// Package evidence decides, on one node and for that node, whether the packets of a member die: from what the
// kernel has seen of connections to it, and from probes that are made only in silence. It asks no API server,
// so a cluster that is cut off is drained even while its Lease is fresh, and one whose control plane alone died
// keeps its traffic.
//
// [Judge] is the decision, without clocks and sockets; [Watcher] feeds it.
package evidence
