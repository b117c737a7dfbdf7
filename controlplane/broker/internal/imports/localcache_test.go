package imports

import (
	"context"
	"errors"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// A write is known by its response and by the watch, in either order, and another client may write in between. The later
// version wins.
func TestPendingWriteAndWatchEvent(t *testing.T) {
	name := clusterset.ServiceName{Namespace: "demo", Name: "hello"}
	at := func(version string) *localImport { return &localImport{service: name, version: version} }
	tests := map[string]struct {
		run  func(t *testing.T, c *localCache)
		want string // the version in the end
	}{
		"the response comes first": {
			run: func(t *testing.T, c *localCache) {
				t.Helper()
				c.wroteImport(at("7"))
				expectEcho(t, c, at("7"), false, true)
			},
			want: "5",
		},
		"another client wrote later": {
			run: func(t *testing.T, c *localCache) {
				t.Helper()
				c.wroteImport(at("7"))
				expectEcho(t, c, at("8"), false, false)
			},
			want: "5",
		},
		"an older version arrives first": {
			run: func(t *testing.T, c *localCache) {
				t.Helper()
				c.wroteImport(at("7"))
				expectEcho(t, c, at("6"), false, false)
			},
			want: "7",
		},
		"the object was deleted": {
			run: func(t *testing.T, c *localCache) {
				t.Helper()
				c.wroteImport(at("7"))
				expectEcho(t, c, at("7"), true, false)
			},
			want: "5",
		},
		"the watch event arrives before the response": {
			run:  func(_ *testing.T, c *localCache) { c.wroteImport(at("5")) },
			want: "5",
		},
		"the watch delivered a later version": {
			run:  func(_ *testing.T, c *localCache) { c.wroteImport(at("4")) },
			want: "5",
		},
	}
	for test, tc := range tests {
		t.Run(test, func(t *testing.T) {
			c := newCacheAt(t, name, "5")
			tc.run(t, c)
			if have := c.of(name).imp; have == nil || have.version != tc.want {
				t.Errorf("the import is %+v, want version %s", have, tc.want)
			}
		})
	}
}

func expectEcho(t *testing.T, c *localCache, i *localImport, gone, want bool) {
	t.Helper()
	if echo := c.isEcho(i.service, i, nil, gone); echo != want {
		t.Errorf("version %s is an echo: %t, want %t", i.version, echo, want)
	}
}

// newCacheAt returns a localCache that has seen an import at a version, and nothing later.
func newCacheAt(t *testing.T, name clusterset.ServiceName, version string) *localCache {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(v1beta1.Install(scheme), discoveryv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	si := &v1beta1.ServiceImport{}
	si.Namespace, si.Name, si.ResourceVersion = name.Namespace, name.Name, version
	c := &localCache{}
	err := c.init(fake.NewClientBuilder().WithScheme(scheme).WithObjects(si).WithInterceptorFuncs(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			err := c.List(ctx, list, opts...)
			list.SetResourceVersion(version)
			return err
		},
		Watch: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) (watch.Interface, error) {
			o := &client.ListOptions{}
			if o.ApplyOptions(opts); o.Raw != nil && o.Raw.SendInitialEvents != nil { // the fake cannot
				return nil, apierrors.NewInvalid(schema.GroupKind{}, "", nil)
			}
			return c.Watch(ctx, list, opts...)
		},
	}).Build())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.run(ctx) }()
	err = c.imports.WaitForSync(ctx)
	cancel()
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	if have := c.of(name).imp; have == nil || have.version != version || c.imports.Latest() != version {
		t.Fatalf("the import is %+v, and the latest version %q", have, c.imports.Latest())
	}
	return c
}
