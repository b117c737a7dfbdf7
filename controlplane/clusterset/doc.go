// Package clusterset is the domain of Isthmus and its published language: what a member says about
// an exported Service ([Export]), what all of them together mean ([Merge] -> [Import]), which address
// it gets ([IPPool]), and everything one node needs to know ([Snapshot]).
//
// It depends on the standard library alone. Kubernetes, DNS and BPF types are translated at its border
// (controlplane/mcs, dns, bpf/datapath); nothing in here performs I/O, reads a clock or logs.
package clusterset
