// Package fenced writes into a member as its leader: each write carries the epoch, and none is sent when the Lease is
// not surely held.
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
)

// Term is one leadership of one member.
type Term struct {
	// Epoch is that of the Lease.
	Epoch int64
	// Held reports whether the Lease is surely held now. nil is for ever.
	Held func() bool
}

// leader is a reconcile.Leader.
type leader struct {
	reconcile.Member

	term   Term
	client client.Client
	events events.EventRecorder
}

// New returns who leads a member for a term, by a client of the member's API server.
func New(m reconcile.Member, term Term, c client.Client, recorder events.EventRecorder) reconcile.Leader {
	return &leader{Member: m, term: term, client: c, events: recorder}
}

func (l *leader) Epoch() int64 { return l.term.Epoch }

// check reports why nothing may be written now.
func (l *leader) check() error {
	if l.term.Held != nil && !l.term.Held() {
		return fmt.Errorf("write into member %s: %w", l.ID(), reconcile.ErrNotLeader)
	}
	return nil
}

// stamp puts the epoch on obj, once it is known that obj may be written.
func (l *leader) stamp(obj client.Object) error {
	if err := l.check(); err != nil {
		return err
	}
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[federationv1alpha1.AnnotationEpoch] = strconv.FormatInt(l.term.Epoch, 10)
	obj.SetAnnotations(annotations)
	return nil
}

// explain adds reconcile.ErrKindMissing to the error of a kind that the member does not have.
func explain(err error) error {
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w: %w", reconcile.ErrKindMissing, err)
	}
	return err
}

func (l *leader) Create(ctx context.Context, obj client.Object) error {
	if err := l.stamp(obj); err != nil {
		return err
	}
	return explain(l.client.Create(ctx, obj, client.FieldOwner(v1alpha1.FieldOwner)))
}

func (l *leader) Replace(ctx context.Context, obj client.Object) error {
	if err := l.stamp(obj); err != nil {
		return err
	}
	return explain(l.client.Update(ctx, obj, client.FieldOwner(v1alpha1.FieldOwner)))
}

func (l *leader) Own(ctx context.Context, obj client.Object, keep ...string) error {
	if err := l.stamp(obj); err != nil {
		return err
	}
	return explain(apply.Own(ctx, l.client, obj, keep...))
}

func (l *leader) OwnStatus(ctx context.Context, obj client.Object) error {
	return l.fenced(ctx, obj, func() error { return apply.ApplyStatus(ctx, l.client, obj) })
}

func (l *leader) Delete(ctx context.Context, obj client.Object) error {
	return client.IgnoreNotFound(l.fenced(ctx, obj, func() error {
		uid, version := obj.GetUID(), obj.GetResourceVersion()
		return l.client.Delete(ctx, obj, client.Preconditions{UID: &uid, ResourceVersion: &version})
	}))
}

// fenced sends a write that cannot carry an epoch, and has the resourceVersion of obj as a precondition. The member
// takes it if the object itself is of this epoch; one that is older, the fence says, is first made to be, if it still
// is what was read. So whatever a leader that was has read, it can neither delete nor describe.
func (l *leader) fenced(ctx context.Context, obj client.Object, send func() error) error {
	if err := l.check(); err != nil {
		return err
	}
	err := send()
	if apierrors.IsForbidden(err) && strings.Contains(err.Error(), admission.FenceName) {
		now := obj.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
		if err := l.annotate(ctx, now, map[string]any{"resourceVersion": obj.GetResourceVersion()}, nil); err != nil {
			return err
		}
		obj.SetResourceVersion(now.GetResourceVersion())
		err = send()
	}
	return explain(err)
}

func (l *leader) Annotate(ctx context.Context, obj client.Object, annotations map[string]string) error {
	target := obj.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
	return client.IgnoreNotFound(l.annotate(ctx, target, map[string]any{}, annotations))
}

// annotate writes annotations and the epoch, with more metadata as preconditions. obj becomes what stands there then.
func (l *leader) annotate(ctx context.Context, obj client.Object, metadata map[string]any, annotations map[string]string) error {
	if err := l.check(); err != nil {
		return err
	}
	set := map[string]any{federationv1alpha1.AnnotationEpoch: strconv.FormatInt(l.term.Epoch, 10)}
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
	return explain(l.client.Patch(ctx, obj, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.FieldOwner)))
}

func (l *leader) Event(o client.Object, eventtype, reason, note string) {
	l.events.Eventf(o, nil, eventtype, reason, reason, "%s", note)
}
