package client

import (
	"context"
	"errors"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// The policies of an older broker refuse regions: slices are written without them, and after a while with them again. Another
// refusal is no reason to drop the regions.
func TestBrokerRefusesRegions(t *testing.T) {
	t.Parallel()
	b := newQuotaBroker(t, quota.Defaults())
	const old, full = "metadata.annotations may have only these keys, with at most 64 characters: isthmus.dev/changed-at", "the quota is full"
	refusal, tries := "", 0
	b.client = interceptor.NewClient(b.fake, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			tries++
			_, regional := obj.GetAnnotations()[v1alpha1.AnnotationRegions]
			if refusal == full || refusal == old && regional {
				return apierrors.NewForbidden(discoveryv1.Resource("endpointslices"), obj.GetName(), errors.New(refusal))
			}
			return c.Create(ctx, obj, opts...)
		},
	})
	for i, step := range []struct {
		name, refusal string
		expired       bool // the last refusal is long ago
		regions       string
		tries         int
		fails         bool
	}{
		{name: "accepted", regions: "z=r", tries: 1},
		{name: "full", refusal: full, tries: 1, fails: true},
		{name: "accepted after the quota", regions: "z=r", tries: 1},
		{name: "an old broker", refusal: old, tries: 2},
		{name: "an old broker again", refusal: old, tries: 1},
		{name: "upgraded, but not tried yet", tries: 1},
		{name: "upgraded", expired: true, regions: "z=r", tries: 1},
	} {
		if step.expired {
			b.bareUntil.Store(time.Now().UnixNano())
		}
		es := b.slice("west", i, i, 1, 2)
		es.Endpoints[0].Zone, es.CreationTimestamp.Time = new("z"), time.Time{}
		mcs.SetRegions(es, func(zone string) string { return map[string]string{"z": "r"}[zone] })
		refusal, tries = step.refusal, 0
		_, err := b.publishSlices(t.Context(), webService(i), []*discoveryv1.EndpointSlice{es}, time.Now())
		if (err != nil) != step.fails || tries != step.tries {
			t.Errorf("%s: %v after %d tries, want %d", step.name, err, tries, step.tries)
		}
		if step.fails {
			continue
		}
		have := &discoveryv1.EndpointSlice{}
		if err := b.fake.Get(t.Context(), client.ObjectKeyFromObject(es), have); err != nil {
			t.Fatal(err)
		}
		if regions := have.Annotations[v1alpha1.AnnotationRegions]; regions != step.regions || have.Annotations[v1alpha1.AnnotationChangedAt] == "" {
			t.Errorf("%s: the broker has the annotations %v, want the regions %q", step.name, have.Annotations, step.regions)
		}
	}
}
