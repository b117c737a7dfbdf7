// Package v1alpha1 holds the Kubernetes API of the gateways: which there are, and how they are doing.
//
// +kubebuilder:object:generate=true
// +groupName=gateway.isthmus.dev
package v1alpha1
