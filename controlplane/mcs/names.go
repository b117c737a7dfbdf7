package mcs

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Names of objects on the broker consist of ids (at most 63 characters), Service names and namespaces (at most 63 characters
// without a dot), so the longest one has 202 characters. The dot between the parts distinguishes Service a-b in namespace
// c from Service a in namespace b-c.

// AggregateName returns the name of a Service's aggregate on the broker.
func AggregateName(name clusterset.ServiceName) string { return name.Name + "." + name.Namespace }

// RecordName returns the name of member c's record about a Service.
func RecordName(c clusterset.ClusterID, name clusterset.ServiceName) string {
	return string(c) + "." + AggregateName(name)
}

// BrokerSliceName returns the name on the broker of member c's EndpointSlice source. It includes the address type, which is
// immutable on an object.
func BrokerSliceName(c clusterset.ClusterID, name clusterset.ServiceName, source string, addresses discoveryv1.AddressType) string {
	return RecordName(c, name) + "-" + shortHash(string(addresses)+" "+source)
}

// ImportedSliceName returns the name of the imported form of a broker's slice. It differs from all names that Kubernetes
// generates, whose suffix is shorter.
func ImportedSliceName(c clusterset.ClusterID, service, brokerSlice string) string {
	return service + "-" + string(c) + "-" + shortHash(brokerSlice)
}

// shortHash returns 10 characters of base32 of SHA-256: 50 bits, enough against collisions among the slices of one Service
// and member.
func shortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:10]
}

// ownerLabels returns the labels of an object of member c about a Service on the broker.
func ownerLabels(c clusterset.ClusterID, name clusterset.ServiceName) map[string]string {
	labels := serviceLabels(name)
	labels[v1alpha1.LabelCluster] = string(c)
	return labels
}

func serviceLabels(name clusterset.ServiceName) map[string]string {
	return map[string]string{
		v1alpha1.LabelServiceName:      name.Name,
		v1alpha1.LabelServiceNamespace: name.Namespace,
	}
}

// ServiceOf returns the Service of an object of the broker, by its labels, and whether they name one.
func ServiceOf(obj metav1.Object) (clusterset.ServiceName, bool) {
	l := obj.GetLabels()
	name := clusterset.ServiceName{Namespace: l[v1alpha1.LabelServiceNamespace], Name: l[v1alpha1.LabelServiceName]}
	return name, name.Namespace != "" && name.Name != ""
}

// OwnerOf returns the member that owns an object of the broker, by its label; "" for an aggregate.
func OwnerOf(obj metav1.Object) clusterset.ClusterID {
	return clusterset.ClusterID(obj.GetLabels()[v1alpha1.LabelCluster])
}
