// Package tree holds the rules of this repository that no compiler knows: who may import what, what
// every file and package must carry, and what the chart promises. They are its tests.
package tree
