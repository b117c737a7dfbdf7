// Package agent makes one node serve the VIPs of the ClusterSet: it turns a [clusterset.Snapshot] into
// the content of the BPF maps, with the smallest safe writes.
//
// It fails towards traffic. Closing it, crashing it or losing its source of snapshots leaves the programs
// attached and the maps as they were, so what was reachable stays reachable; [Cleanup] alone takes them
// away. It knows nothing of Kubernetes: whoever has a snapshot may drive it.
package agent
