// Package fenced writes into a member as its leader. Each write carries the leader's epoch, and a process sends a write only
// while it certainly holds the Lease.
//
// For example, the leader of epoch 7 is suspended for a minute. Meanwhile another process becomes the leader of epoch 8 and
// changes a Service, which now carries epoch 8. When the former leader resumes and deletes the Service, the member's
// admission policy refuses the delete.
package fenced

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/apply"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// Term is one leadership of one member.
type Term struct {
	// Epoch is that of the Lease.
	Epoch int64
	// Held reports whether this process certainly holds the Lease now. Nil means that it always does.
	Held func() bool
}

// writer is a reconcile.Writer.
type writer struct {
	reconcile.Member

	term   Term
	client client.Client
	events events.EventRecorder
}

// New returns a Writer for one term, which uses a client of the member's API server.
func New(m reconcile.Member, term Term, c client.Client, recorder events.EventRecorder) reconcile.Writer {
	return &writer{Member: m, term: term, client: c, events: recorder}
}

func (w *writer) Epoch() int64 { return w.term.Epoch }

func (w *writer) Live() client.Reader { return w.client }

// check returns why no write may be sent now.
func (w *writer) check() error {
	if w.term.Held != nil && !w.term.Held() {
		return fmt.Errorf("write into member %s: %w", w.ID(), reconcile.ErrNotLeader)
	}
	return nil
}

// stamp annotates obj with the epoch, if obj may be written.
func (w *writer) stamp(obj client.Object) error {
	if err := w.check(); err != nil {
		return err
	}
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[federationv1alpha1.AnnotationEpoch] = strconv.FormatInt(w.term.Epoch, 10)
	obj.SetAnnotations(annotations)
	return nil
}

// explain adds objectcache.ErrKindMissing to the error of a write of a kind that the member does not have.
func explain(err error) error {
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w: %w", objectcache.ErrKindMissing, err)
	}
	return err
}

func (w *writer) Create(ctx context.Context, obj client.Object) error { return w.create(ctx, obj) }

func (w *writer) TryCreate(ctx context.Context, obj client.Object) error {
	return w.create(ctx, obj, client.DryRunAll)
}

func (w *writer) create(ctx context.Context, obj client.Object, options ...client.CreateOption) error {
	if err := w.stamp(obj); err != nil {
		return err
	}
	return explain(w.client.Create(ctx, obj, append(options, client.FieldOwner(v1alpha1.FieldOwner))...))
}

func (w *writer) Replace(ctx context.Context, obj client.Object) error {
	if err := w.stamp(obj); err != nil {
		return err
	}
	return explain(w.client.Update(ctx, obj, client.FieldOwner(v1alpha1.FieldOwner)))
}

func (w *writer) Apply(ctx context.Context, obj client.Object, keep ...string) error {
	if err := w.stamp(obj); err != nil {
		return err
	}
	return explain(apply.Own(ctx, w.client, obj, keep...))
}

func (w *writer) ApplyStatus(ctx context.Context, obj client.Object) error {
	return w.fenced(ctx, obj, func() error { return apply.Status(ctx, w.client, obj) })
}

func (w *writer) Delete(ctx context.Context, obj client.Object) error {
	return client.IgnoreNotFound(w.fenced(ctx, obj, func() error {
		uid, version := obj.GetUID(), obj.GetResourceVersion()
		return w.client.Delete(ctx, obj, client.Preconditions{UID: &uid, ResourceVersion: &version})
	}))
}

// fenced sends a write that cannot carry an epoch and has the resourceVersion of obj as a precondition. The member accepts
// it only if the object itself is of this epoch. The policy refuses it for an object of an earlier epoch; fenced then first
// writes the epoch to the object, if that is still the one that was read. A former leader can therefore neither delete an
// object nor update its status, however stale its reads are.
func (w *writer) fenced(ctx context.Context, obj client.Object, send func() error) error {
	if err := w.check(); err != nil {
		return err
	}
	err := send()
	if apierrors.IsForbidden(err) && strings.Contains(err.Error(), admission.FenceName) {
		now := obj.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
		if err := w.annotate(ctx, now, map[string]any{"resourceVersion": obj.GetResourceVersion()}, nil); err != nil {
			return err
		}
		obj.SetResourceVersion(now.GetResourceVersion())
		err = send()
	}
	return explain(err)
}

func (w *writer) Annotate(ctx context.Context, obj client.Object, annotations map[string]string) error {
	target := obj.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
	return client.IgnoreNotFound(w.annotate(ctx, target, map[string]any{"resourceVersion": obj.GetResourceVersion()}, annotations))
}

// annotate writes annotations and the epoch, with further metadata as preconditions. It sets obj to the stored object.
func (w *writer) annotate(ctx context.Context, obj client.Object, metadata map[string]any, annotations map[string]string) error {
	if err := w.check(); err != nil {
		return err
	}
	set := map[string]any{federationv1alpha1.AnnotationEpoch: strconv.FormatInt(w.term.Epoch, 10)}
	for k, v := range annotations {
		set[k] = v
		if v == "" {
			set[k] = nil
		}
	}
	metadata["annotations"] = set
	if uid := obj.GetUID(); uid != "" {
		metadata["uid"] = uid
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return err
	}
	return explain(w.client.Patch(ctx, obj, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.FieldOwner)))
}

func (w *writer) Event(o client.Object, eventtype, reason, note string) {
	w.events.Eventf(o, nil, eventtype, reason, reason, "%s", note)
}
