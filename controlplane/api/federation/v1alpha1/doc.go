// Package v1alpha1 holds the Kubernetes API of a federation: clusters without a broker, of which some, the
// supervisors, reach the API servers of all. A cluster says of itself what it is by ClusterClaims, and by a
// Federation to which others it belongs; both kinds are cluster-scoped. An ExternalWorkload is a machine outside of it.
//
// +kubebuilder:object:generate=true
// +groupName=federation.isthmus.dev
package v1alpha1
