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

// The mapper finds kinds with their scope, and reports missing kinds and missing groups.
func TestMapper(t *testing.T) {
	t.Parallel()
	lookup, err := discovery.NewDiscoveryClientForConfig(server.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	m := newMapper(lookup)
	for _, tc := range []struct {
		gvk      schema.GroupVersionKind
		resource string // "" is none
		scope    meta.RESTScope
	}{
		{schema.GroupVersionKind{Version: "v1", Kind: "Service"}, "services", meta.RESTScopeNamespace},
		{schema.GroupVersionKind{Version: "v1", Kind: "Node"}, "nodes", meta.RESTScopeRoot},
		{schema.GroupVersionKind{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"}, "endpointslices", meta.RESTScopeNamespace},
		{schema.GroupVersionKind{Group: "discovery.k8s.io", Version: "v1", Kind: "Nothing"}, "", nil},
		{schema.GroupVersionKind{Group: "unknown.example", Version: "v1", Kind: "Service"}, "", nil},
		{schema.GroupVersionKind{Version: "v1", Kind: "Service"}, "services", meta.RESTScopeNamespace}, // from the earlier lookup
	} {
		found, err := m.RESTMapping(tc.gvk.GroupKind(), tc.gvk.Version)
		switch {
		case tc.resource == "":
			if !meta.IsNoMatchError(err) {
				t.Errorf("%v: %v, want a missing kind", tc.gvk, err)
			}
		case err != nil:
			t.Errorf("%v: %v", tc.gvk, err)
		case found.Resource != tc.gvk.GroupVersion().WithResource(tc.resource) || found.GroupVersionKind != tc.gvk || found.Scope != tc.scope:
			t.Errorf("%v: %+v, want %s, %s", tc.gvk, found, tc.resource, tc.scope.Name())
		}
	}
	if len(m.known) != 3 {
		t.Errorf("%d kinds are kept, want the 3 that exist", len(m.known))
	}
}

// A silent API server is an error, not a missing kind.
func TestMapperOfSilentServer(t *testing.T) {
	t.Parallel()
	config := server.Config(t)
	config.Host = "https://127.0.0.1:1"
	lookup, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if found, err := newMapper(lookup).RESTMapping(schema.GroupKind{Kind: "Service"}, "v1"); err == nil || meta.IsNoMatchError(err) {
		t.Errorf("a silent API server returns %v, %v", found, err)
	}
}
