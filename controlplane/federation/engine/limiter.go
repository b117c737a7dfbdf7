package engine

import (
	"context"
	"runtime"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// syncLimiter limits how many keys are reconciled at the same time, over all members. Each call takes a processor, and
// memory for what all members have under its key, so there are as many slots as processors. A write frees its slot until
// the API server answers, so a silent member does not delay the others.
type syncLimiter chan struct{}

func newSyncLimiter() syncLimiter { return make(syncLimiter, max(2, runtime.GOMAXPROCS(0))) }

// acquire waits for a slot. Slots are never held for long.
func (l syncLimiter) acquire() { l <- struct{}{} }

func (l syncLimiter) release() { <-l }

// without runs f without the caller's slot.
func (l syncLimiter) without(f func() error) error {
	l.release()
	defer l.acquire()
	return f()
}

// limitedWriter is a Writer whose caller holds a slot, which each write frees.
type limitedWriter struct {
	reconcile.Writer

	limiter syncLimiter
}

// Live returns a reader each of whose calls frees the slot, as writes do.
func (w limitedWriter) Live() client.Reader { return limitedReader{w.Writer.Live(), w.limiter} }

type limitedReader struct {
	client.Reader

	limiter syncLimiter
}

func (r limitedReader) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	return r.limiter.without(func() error { return r.Reader.Get(ctx, key, obj, opts...) })
}

func (r limitedReader) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return r.limiter.without(func() error { return r.Reader.List(ctx, list, opts...) })
}

func (w limitedWriter) Create(ctx context.Context, obj client.Object) error {
	return w.limiter.without(func() error { return w.Writer.Create(ctx, obj) })
}

func (w limitedWriter) TryCreate(ctx context.Context, obj client.Object) error {
	return w.limiter.without(func() error { return w.Writer.TryCreate(ctx, obj) })
}

func (w limitedWriter) Apply(ctx context.Context, obj client.Object, keep ...string) error {
	return w.limiter.without(func() error { return w.Writer.Apply(ctx, obj, keep...) })
}

func (w limitedWriter) Replace(ctx context.Context, obj client.Object) error {
	return w.limiter.without(func() error { return w.Writer.Replace(ctx, obj) })
}

func (w limitedWriter) ApplyStatus(ctx context.Context, obj client.Object) error {
	return w.limiter.without(func() error { return w.Writer.ApplyStatus(ctx, obj) })
}

func (w limitedWriter) Annotate(ctx context.Context, obj client.Object, annotations map[string]string) error {
	return w.limiter.without(func() error { return w.Writer.Annotate(ctx, obj, annotations) })
}

func (w limitedWriter) Delete(ctx context.Context, obj client.Object) error {
	return w.limiter.without(func() error { return w.Writer.Delete(ctx, obj) })
}
