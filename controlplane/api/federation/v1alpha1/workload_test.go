package v1alpha1_test

import (
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// workload returns a valid ExternalWorkload, changed.
func workload(change func(*v1alpha1.ExternalWorkload)) *v1alpha1.ExternalWorkload {
	w := &v1alpha1.ExternalWorkload{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "db-1"},
		Spec:       v1alpha1.ExternalWorkloadSpec{Addresses: []string{"192.0.2.7", "2001:db8::7"}, Ports: []v1alpha1.ExternalPort{{Port: 5432}}},
	}
	change(w)
	return w
}

func TestExternalWorkloadValidation(t *testing.T) {
	c := newClient(t)
	spec := func(change func(*v1alpha1.ExternalWorkloadSpec)) *v1alpha1.ExternalWorkload {
		return workload(func(w *v1alpha1.ExternalWorkload) { change(&w.Spec) })
	}
	addresses := func(all ...string) *v1alpha1.ExternalWorkload {
		return spec(func(s *v1alpha1.ExternalWorkloadSpec) { s.Addresses = all })
	}
	ports := func(all ...v1alpha1.ExternalPort) *v1alpha1.ExternalWorkload {
		return spec(func(s *v1alpha1.ExternalWorkloadSpec) { s.Ports = all })
	}
	for name, tc := range map[string]struct {
		obj     *v1alpha1.ExternalWorkload
		refused bool
	}{
		"a machine":               {obj: workload(func(*v1alpha1.ExternalWorkload) {})},
		"one address":             {obj: addresses("192.0.2.7")},
		"no address":              {obj: addresses(), refused: true},
		"a host name":             {obj: addresses("db.example.org"), refused: true},
		"two of one family":       {obj: addresses("192.0.2.7", "192.0.2.8"), refused: true},
		"loopback":                {obj: addresses("127.0.0.1"), refused: true},
		"an address written long": {obj: addresses("2001:DB8:0::7"), refused: true},
		"no port":                 {obj: ports(), refused: true},
		"a port of each protocol": {obj: ports(v1alpha1.ExternalPort{Port: 53, Protocol: "UDP"}, v1alpha1.ExternalPort{Port: 53})},
		"a port twice":            {obj: ports(v1alpha1.ExternalPort{Port: 53}, v1alpha1.ExternalPort{Port: 53}), refused: true},
		"a name twice":            {obj: ports(v1alpha1.ExternalPort{Name: "x", Port: 53}, v1alpha1.ExternalPort{Name: "x", Port: 54}), refused: true},
		"a port of no protocol":   {obj: ports(v1alpha1.ExternalPort{Port: 1, Protocol: "ICMP"}), refused: true},
		"a name of a Service":     {obj: spec(func(s *v1alpha1.ExternalWorkloadSpec) { s.Service = "db" })},
		"a digit first":           {obj: spec(func(s *v1alpha1.ExternalWorkloadSpec) { s.Service = "9db" })},
		"no name of a Service":    {obj: spec(func(s *v1alpha1.ExternalWorkloadSpec) { s.Service = "db.9" }), refused: true},
		"a hyphen first":          {obj: spec(func(s *v1alpha1.ExternalWorkloadSpec) { s.Service = "-db" }), refused: true},
		"its name cannot name a Service": {
			obj: workload(func(w *v1alpha1.ExternalWorkload) { w.Name = "db.1" }), refused: true,
		},
		"its name begins with a digit": {obj: workload(func(w *v1alpha1.ExternalWorkload) { w.Name = "9-db" })},
		"its name need not":            {obj: workload(func(w *v1alpha1.ExternalWorkload) { w.Name, w.Spec.Service = "db.1", "db" })},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.Create(t.Context(), tc.obj, client.DryRunAll)
			if tc.refused != apierrors.IsInvalid(err) || !tc.refused && err != nil {
				t.Errorf("refused: %v, want %v (%v)", err != nil, tc.refused, err)
			}
			if !tc.refused && (tc.obj.Spec.Ready == nil || !*tc.obj.Spec.Ready || tc.obj.Spec.Ports[0].Protocol == "") {
				t.Errorf("defaults: %+v", tc.obj.Spec)
			}
		})
	}
}
