// Package agent makes one node serve the VIPs of the ClusterSet: it turns a [clusterset.Snapshot] into the content of
// the BPF maps, with the fewest safe writes.
//
// It fails open. If the agent is closed, crashes or loses its source of snapshots, the programs stay attached and the
// maps stay as they are, so every VIP remains reachable; only [Cleanup] removes them. The package does not depend on
// Kubernetes: any source of snapshots can drive it.
package agent
