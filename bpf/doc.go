// Package bpf is the kernel side of Isthmus and the only Go view of it: the programs and maps compiled
// from the C beside it, the types of abi.h under Go names, and nothing that touches the kernel. Package
// datapath loads and attaches what stands here.
//
// The objects are committed, so a build needs Go alone; `go generate` needs clang-19.
package bpf
