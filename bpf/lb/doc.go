// Package lb is the balancing of VIPs over backends without side effects: what the maps should hold
// ([Build]), which writes lead there ([Diff]), both at the price of what has changed ([Planner]), and how a
// state reads ([State.Text]). It knows the shape
// of the maps and nothing of the kernel; package datapath reads and writes the real ones.
package lb
