package member

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/klog/v2"

	"github.com/isthmus-net/isthmus/tools/apitest"
)

var server apitest.Server

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

// TestMapper finds kinds with where they are, those of a group and version that the API server has not as well as not.
func TestMapper(t *testing.T) {
	t.Parallel()
	asked, err := discovery.NewDiscoveryClientForConfig(server.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	m := newMapper(asked)
	for _, tc := range []struct {
		gvk      schema.GroupVersionKind
		resource string // "" is none
		scope    meta.RESTScope
	}{
		{schema.GroupVersionKind{Version: "v1", Kind: "Service"}, "services", meta.RESTScopeNamespace},
		{schema.GroupVersionKind{Version: "v1", Kind: "Node"}, "nodes", meta.RESTScopeRoot},
		{schema.GroupVersionKind{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"}, "endpointslices", meta.RESTScopeNamespace},
		{schema.GroupVersionKind{Group: "discovery.k8s.io", Version: "v1", Kind: "Nothing"}, "", nil},
		{schema.GroupVersionKind{Group: "nobody.example", Version: "v1", Kind: "Service"}, "", nil},
		{schema.GroupVersionKind{Version: "v1", Kind: "Service"}, "services", meta.RESTScopeNamespace}, // as it is known
	} {
		found, err := m.RESTMapping(tc.gvk.GroupKind(), tc.gvk.Version)
		switch {
		case tc.resource == "":
			if !meta.IsNoMatchError(err) {
				t.Errorf("%v: %v, want that there is none", tc.gvk, err)
			}
		case err != nil:
			t.Errorf("%v: %v", tc.gvk, err)
		case found.Resource != tc.gvk.GroupVersion().WithResource(tc.resource) || found.GroupVersionKind != tc.gvk || found.Scope != tc.scope:
			t.Errorf("%v: %+v, want %s, %s", tc.gvk, found, tc.resource, tc.scope.Name())
		}
	}
	if len(m.known) != 3 {
		t.Errorf("%d kinds are kept, want the 3 that are there", len(m.known))
	}
}

// TestMapperOfNobody says why, and not that the kind is missing.
func TestMapperOfNobody(t *testing.T) {
	t.Parallel()
	config := server.Config(t)
	config.Host = "https://127.0.0.1:1"
	asked, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if found, err := newMapper(asked).RESTMapping(schema.GroupKind{Kind: "Service"}, "v1"); err == nil || meta.IsNoMatchError(err) {
		t.Errorf("an API server that does not answer says %v, %v", found, err)
	}
}
