package services

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// Unpack returns the packed object. A change of the result does not change the packed form.
func TestPackRoundTrip(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "demo", Name: "web-1", UID: "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", ResourceVersion: "1234"}
	own := &discoveryv1.EndpointSlice{ObjectMeta: meta}
	own.GenerateName, own.Labels = "ff00ff", map[string]string{
		discoveryv1.LabelManagedBy: v1alpha1.ManagedBy, discoveryv1.LabelServiceName: "web", v1alpha1.MarkCluster: "a",
	}
	own.Annotations = map[string]string{"federation.isthmus.dev/source": "demo/web"}
	imported := own.DeepCopy()
	imported.Labels[v1beta1.LabelServiceName], imported.Labels[v1beta1.LabelSourceCluster] = "web", "a"
	balancer := own.DeepCopy()
	balancer.Annotations["federation.isthmus.dev/host"] = "lb.example.org"
	labeled := own.DeepCopy()
	labeled.Labels["example.org/foreign"] = "yes"
	odd := own.DeepCopy()
	odd.UID, odd.AddressType = "of-no-api-server", discoveryv1.AddressTypeIPv6
	theirs := &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4}
	theirs.Labels = map[string]string{discoveryv1.LabelServiceName: "web"}
	theirs.Ports = []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(80)), Protocol: new(corev1.ProtocolTCP)}}
	theirs.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}, Zone: new("z")}}
	svc := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080}}}}
	svc.Labels = map[string]string{labelMemberOf: "web.isthmus-system"}
	for name, tc := range map[string]struct {
		pack func(client.Object) objectcache.Packed
		o    client.Object
	}{
		"own slice": {packSlice, own}, "own slice of an import": {packSlice, imported}, "own slice of a host name": {packSlice, balancer}, "own slice with one more label": {packSlice, labeled},
		"own slice with an odd uid": {packSlice, odd}, "slice": {packSlice, theirs}, "service": {pack[corev1.Service], svc},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			packed := tc.pack(tc.o)
			packed.Unpack().GetLabels()["changed"] = "yes"
			if diff := cmp.Diff(tc.o, packed.Unpack()); diff != "" {
				t.Errorf("(-packed +unpacked)\n%s", diff)
			}
		})
	}
	for _, es := range []*discoveryv1.EndpointSlice{own, imported, balancer} {
		if _, small := packSlice(es).(*ownSlice); !small {
			t.Errorf("a slice of ours with labels %v does not take the least memory", es.Labels)
		}
	}
}
