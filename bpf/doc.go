// Package bpf holds the BPF programs and maps of Isthmus, compiled from the C in this folder, and their Go types under
// exported names. It does not touch the kernel. The packages datapath and gateway/ebpf load and attach the programs.
//
// The objects are committed, so that a build only needs Go. `go generate` needs clang-19.
package bpf
