package policies

import (
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// corePolicies are the only kind whose rules add up, so that leaders may add some for its peers. networkPolicy is the Kind of their keys.
var corePolicies = federationv1alpha1.PolicyKind{Group: "networking.k8s.io", Version: "v1", Kind: "NetworkPolicy"}

const networkPolicy = "NetworkPolicy.v1.networking.k8s.io"

// defaults are the kinds that are replicated if the Federation lists none.
var defaults = []federationv1alpha1.PolicyKind{
	{Group: "crd.antrea.io", Version: "v1beta1", Kind: "ClusterNetworkPolicy"},
	{Group: "crd.antrea.io", Version: "v1beta1", Kind: "NetworkPolicy"},
	corePolicies,
	{Group: "policy.networking.k8s.io", Version: "v1alpha1", Kind: "AdminNetworkPolicy"},
	{Group: "policy.networking.k8s.io", Version: "v1alpha2", Kind: "ClusterNetworkPolicy"},
}

// Kinds returns the kinds that a Federation with spec replicates.
func Kinds(spec federationv1alpha1.PoliciesSpec) []federationv1alpha1.PolicyKind {
	if len(spec.Kinds) == 0 {
		return defaults
	}
	return spec.Kinds
}

// keyOf returns the key of an object. Its Kind is KIND.VERSION.GROUP.
func keyOf(kind federationv1alpha1.PolicyKind, namespace, name string) reconcile.Key {
	return reconcile.Key{Kind: kind.Kind + "." + kind.Version + "." + kind.Group, Namespace: namespace, Name: name}
}

// empty returns an empty object of the kind of a key.
func empty(key reconcile.Key) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	if gvk, _ := schema.ParseKindArg(key.Kind); gvk != nil {
		o.SetGroupVersionKind(*gvk)
	}
	return o
}

// object returns an empty object of a kind.
func object(kind federationv1alpha1.PolicyKind) *unstructured.Unstructured {
	return empty(keyOf(kind, "", ""))
}
