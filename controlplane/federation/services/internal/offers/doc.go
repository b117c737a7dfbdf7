// Package offers says what a federated Service is: in goes what every member offers of it, out come its ports and
// the endpoints by which each cluster reaches it. Nothing is asked of anybody: all functions are pure.
//
// [Names] reads which federated Services a Service belongs to, [Of] what it offers to other clusters and [Local]
// what to its own, [Merge] what all offers come to together, and [Federated.Slices] the EndpointSlices of one of them.
package offers
