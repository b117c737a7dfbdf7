// Package offers says what a federated Service is: in goes what every member offers of it, out come its ports and
// the endpoints by which each cluster reaches it. Nothing is asked of anybody: all functions are pure.
//
// [Name] reads which federated Service a Service is a member of, [Of] what it offers to other clusters and [Offer.Local]
// what to its own, [Merge] what all offers come to together, and [Federated.Slices] the EndpointSlices of one of them.
package offers
