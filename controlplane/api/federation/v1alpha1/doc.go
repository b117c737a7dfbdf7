// Package v1alpha1 holds the Kubernetes API of a federation: clusters without a broker, some of which, the supervisors, reach
// the API servers of all. ClusterClaims describe a cluster, and a Federation lists the clusters that it belongs to; both
// kinds are cluster-scoped. An ExternalWorkload is a machine outside of the cluster.
//
// +kubebuilder:object:generate=true
// +groupName=federation.isthmus.dev
package v1alpha1
