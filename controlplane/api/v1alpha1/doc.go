// Package v1alpha1 holds the Kubernetes API of Isthmus itself: what a broker keeps beside the MCS API
// kinds, and how a cluster knows of its membership. All kinds are namespaced; on a broker they live in
// the broker's namespace, in a member in the namespace Isthmus is installed in.
//
// +kubebuilder:object:generate=true
// +groupName=isthmus.dev
package v1alpha1
