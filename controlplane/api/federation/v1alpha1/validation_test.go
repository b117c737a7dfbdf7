package v1alpha1_test

import (
	"context"
	"os"
	"testing"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

var server apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

func newClient(t *testing.T) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(server.Config(t), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func claim(object, name, value string) *v1alpha1.ClusterClaim {
	return &v1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: object}, Spec: v1alpha1.ClusterClaimSpec{Name: name, Value: value}}
}

func federation(change func(*v1alpha1.FederationSpec)) *v1alpha1.Federation {
	f := &v1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.FederationName}, Spec: v1alpha1.FederationSpec{ClusterSet: "green"}}
	change(&f.Spec)
	return f
}

func member(id string) v1alpha1.MemberCluster {
	return v1alpha1.MemberCluster{ClusterID: id, Server: "https://192.0.2.11:6443", Secret: "member-" + id}
}

func TestValidation(t *testing.T) {
	c := newClient(t)
	for name, tc := range map[string]struct {
		obj     client.Object
		refused bool
	}{
		"an id":                          {obj: claim("id.k8s.io", v1alpha1.ClaimID, "east")},
		"an id of two labels":            {obj: claim("id.k8s.io", v1alpha1.ClaimID, "east.example")},
		"an id of three labels":          {obj: claim("id.k8s.io", v1alpha1.ClaimID, "a.b.c"), refused: true},
		"an id in upper case":            {obj: claim("id.k8s.io", v1alpha1.ClaimID, "East"), refused: true},
		"a ClusterSet":                   {obj: claim("clusterset.k8s.io", v1alpha1.ClaimClusterSet, "green")},
		"a ClusterSet by another object": {obj: claim("green", v1alpha1.ClaimClusterSet, "green"), refused: true},
		"a supervisor":                   {obj: claim(v1alpha1.ClaimSupervisor, v1alpha1.ClaimSupervisor, "true")},
		"perhaps a supervisor":           {obj: claim(v1alpha1.ClaimSupervisor, v1alpha1.ClaimSupervisor, "perhaps"), refused: true},
		"a claim with an unknown name":   {obj: claim("colour.example.org", "colour.example.org", "Blue, mostly")},
		"an empty value":                 {obj: claim("colour.example.org", "colour.example.org", ""), refused: true},
		"a child's Federation":           {obj: federation(func(*v1alpha1.FederationSpec) {})},
		"a Federation of another name": {obj: func() client.Object {
			f := federation(func(*v1alpha1.FederationSpec) {})
			f.Name = "another"
			return f
		}(), refused: true},
		"two members": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.Members = []v1alpha1.MemberCluster{member("a"), member("b.example")}
		})},
		"one id twice": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.Members = []v1alpha1.MemberCluster{member("a"), member("a")}
		}), refused: true},
		"a server without TLS": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.Members = []v1alpha1.MemberCluster{member("a")}
			s.Members[0].Server = "http://192.0.2.11:6443"
		}), refused: true},
		"ranges of both families": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.ClusterSetIP = v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"243.0.0.0/16", "fd00:243::/112"}}
		})},
		"a range with host bits": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.ClusterSetIP = v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"243.0.0.1/16"}}
		}), refused: true},
		"two ranges of a family": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.ClusterSetIP = v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"243.0.0.0/16", "243.1.0.0/16"}}
		}), refused: true},
		"ClusterSetIPs out of nothing": {obj: federation(func(s *v1alpha1.FederationSpec) {
			s.ClusterSetIP.Enabled = true
		}), refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.Create(t.Context(), tc.obj, client.DryRunAll)
			if tc.refused != apierrors.IsInvalid(err) || !tc.refused && err != nil {
				t.Errorf("refused: %v, want %v (%v)", err != nil, tc.refused, err)
			}
		})
	}
	conformance.Holds(t, "F3")
}

func TestClaimNameCannotChange(t *testing.T) {
	c := newClient(t)
	obj := claim("clusterset.k8s.io", v1alpha1.ClaimClusterSet, "green")
	if err := c.Create(t.Context(), obj); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Delete(context.Background(), obj); err != nil {
			t.Error(err)
		}
	})
	obj.Spec.Name = "clusterset.k8s.io" // lower case, so that it still is the object's
	if err := c.Update(t.Context(), obj); !apierrors.IsInvalid(err) {
		t.Errorf("another name: %v, want it refused", err)
	}
}
