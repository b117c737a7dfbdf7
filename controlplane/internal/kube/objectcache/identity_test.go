package objectcache_test

import (
	"testing"
	"unsafe"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

func TestIdentity(t *testing.T) {
	t.Parallel()
	const uid = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
	for name, tc := range map[string]struct {
		uid     types.UID
		version string
		ok      bool
	}{
		"as API servers write it": {uid, "1234", true},
		"no uid":                  {"", "1234", false},
		"upper case":              {"0A1B2C3D-4e5f-6071-8293-a4b5c6d7e8f9", "1234", false},
		"a short uid":             {"0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8", "1234", false},
		"other dashes":            {"0a1b2c3d4-e5f-6071-8293-a4b5c6d7e8f9", "1234", false},
		"no version":              {uid, "", false},
		"a leading zero":          {uid, "01234", false},
		"a version that is text":  {uid, "x", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: tc.uid, ResourceVersion: tc.version}}
			i, ok := objectcache.Identify(o)
			if ok != tc.ok {
				t.Fatalf("identified: %v, want %v", ok, tc.ok)
			}
			if !ok {
				return
			}
			if diff := cmp.Diff(o.ObjectMeta, i.Meta("shop")); diff != "" {
				t.Errorf("metadata (-want +have):\n%s", diff)
			}
		})
	}
	if size := unsafe.Sizeof(objectcache.Identity{}); size != 32 {
		t.Errorf("an identity takes %d bytes, want 32", size)
	}
}
