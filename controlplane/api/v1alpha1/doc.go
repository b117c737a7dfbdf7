// Package v1alpha1 is the Kubernetes API of Isthmus itself: the kinds of a broker besides those of the MCS API, and of a
// cluster's membership. All kinds are namespaced: on a broker they are in the broker's namespace, in a member in the
// installation namespace.
//
// +kubebuilder:object:generate=true
// +groupName=isthmus.dev
package v1alpha1
