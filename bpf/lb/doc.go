// Package lb balances VIPs over backends, without side effects. A [Planner] turns snapshots into the writes that
// bring a node's BPF maps there, at a cost that follows what has changed; [State.Text] prints what the maps hold.
// The package knows the shape of the maps and nothing of the kernel; package datapath reads and writes the real ones.
//
// Each BPF map is one [Table]. [Steps] is the order in which a [Plan] writes them.
package lb
