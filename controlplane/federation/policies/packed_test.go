package policies

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// A federated Service takes little memory, and is unpacked as it was trimmed.
func TestPackedService(t *testing.T) {
	t.Parallel()
	o := partial("Service")
	o.ObjectMeta = metav1.ObjectMeta{
		Namespace: "shop", Name: "web", UID: "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", ResourceVersion: "1234",
		Labels: map[string]string{"app": "web"}, Annotations: map[string]string{federationv1alpha1.MarkFederatedService: "true", "example.org/note": "x"},
	}
	trimmed, err := trimFederatedService(o)
	if err != nil {
		t.Fatal(err)
	}
	packed := packFederatedService(trimmed.(client.Object))
	if named, ok := packed.(interface{ Name() string }); !ok || named.Name() != "web" {
		t.Fatalf("packed as %T, which does not share its name", packed)
	}
	if diff := cmp.Diff(trimmed, any(packed.Unpack())); diff != "" {
		t.Errorf("(-trimmed +unpacked)\n%s", diff)
	}
	if !isFederatedService(packed.Unpack()) {
		t.Error("the unpacked object is no federated Service")
	}
	o.UID = "of-no-api-server"
	if packed := packFederatedService(o); packed != objectcache.Packed(nil) {
		t.Errorf("packed with an odd uid: %v", packed)
	}
}
