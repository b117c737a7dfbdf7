package federation

import (
	"context"
	"runtime"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// looks has a place for each key that is looked at, in whatever member. A look takes a processor, and memory for all that
// members offer under its key, so there are no more of them at a time than processors. A write gives its place away while
// the API server answers: one that is silent holds nobody up.
type looks chan struct{}

func newLooks() looks { return make(looks, max(2, runtime.GOMAXPROCS(0))) }

// begin waits for a place, which end gives away. None is held for long.
func (l looks) begin() { l <- struct{}{} }

func (l looks) end() { <-l }

// pause gives the place away while f runs.
func (l looks) pause(f func() error) error {
	l.end()
	defer l.begin()
	return f()
}

// pausing is a Leader for a look that has a place.
type pausing struct {
	reconcile.Leader

	looks looks
}

func (p pausing) Create(ctx context.Context, obj client.Object) error {
	return p.looks.pause(func() error { return p.Leader.Create(ctx, obj) })
}

func (p pausing) Own(ctx context.Context, obj client.Object, keep ...string) error {
	return p.looks.pause(func() error { return p.Leader.Own(ctx, obj, keep...) })
}

func (p pausing) Replace(ctx context.Context, obj client.Object) error {
	return p.looks.pause(func() error { return p.Leader.Replace(ctx, obj) })
}

func (p pausing) OwnStatus(ctx context.Context, obj client.Object) error {
	return p.looks.pause(func() error { return p.Leader.OwnStatus(ctx, obj) })
}

func (p pausing) Annotate(ctx context.Context, obj client.Object, annotations map[string]string) error {
	return p.looks.pause(func() error { return p.Leader.Annotate(ctx, obj, annotations) })
}

func (p pausing) Delete(ctx context.Context, obj client.Object) error {
	return p.looks.pause(func() error { return p.Leader.Delete(ctx, obj) })
}
