// Package offers computes a federated Service from its members: the offers of all clusters go in; its ports, and the
// EndpointSlices by which each cluster reaches it, come out. All functions are pure.
//
// [Name] returns the federated Service that a Service is a member of, [New] its offer to other clusters and [Offer.Local] to
// its own. [Merge] joins all offers, and [Federated.Slices] returns the EndpointSlices of one of them.
package offers
