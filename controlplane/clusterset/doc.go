// Package clusterset is the domain of Isthmus: a member's [Export] of a Service, the [Import] that [Merge] makes of all
// exports of one name, the [IPPool] that allocates its address, the [MemberRegistry] of the ClusterSet, and the [Snapshot]
// that a node's dataplane receives.
//
// It depends on the standard library alone, and performs no I/O, reads no clock and does not log. Adapters translate
// foreign types: controlplane/mcs those of Kubernetes, dns those of DNS, bpf/datapath those of BPF.
package clusterset
