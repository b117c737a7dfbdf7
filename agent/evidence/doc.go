// Package evidence decides, on one node and for that node, whether the packets of a member get answers. It uses what the
// kernel has seen of connections to the member, and probes that are made only while the member is silent. It asks no
// API server. So a cluster that is cut off is drained even while its Lease is fresh, and a cluster whose control plane
// alone has failed keeps its traffic.
//
// [Detector] decides, without clocks and sockets; [Watcher] feeds it.
package evidence
