// Package lb is the balancing of VIPs over backends as pure functions: what the maps should hold
// ([Build]), which writes lead there ([Diff]), and how a state reads ([State.Text]). It knows the shape
// of the maps and nothing of the kernel; package datapath reads and writes the real ones.
package lb
