// Package tree holds the rules of this repository that no compiler knows, as tests: the imports that each layer may have,
// the language of code and documents, the length of functions, links, and the promises of the chart.
package tree
