package engine

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// reading is a member whose API server is asked. Each request calls asked.
type reading struct {
	reconcile.Writer
	client.Reader

	asked func()
}

func (r reading) Live() client.Reader { return r }

func (r reading) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	r.asked()
	return nil
}

func (r reading) List(context.Context, client.ObjectList, ...client.ListOption) error {
	r.asked()
	return nil
}

// While an API server is asked, others may reconcile.
func TestReadsFreeTheirSlot(t *testing.T) {
	limiter, asked := make(syncLimiter, 1), 0
	limiter.acquire()
	w := limitedWriter{reading{asked: func() {
		if asked++; len(limiter) > 0 {
			t.Error("the slot is taken meanwhile")
		}
	}}, limiter}
	if err := w.Live().Get(t.Context(), client.ObjectKey{}, &corev1.Service{}); err != nil {
		t.Error(err)
	}
	if err := w.Live().List(t.Context(), &corev1.ServiceList{}); err != nil {
		t.Error(err)
	}
	if asked != 2 || len(limiter) != 1 {
		t.Errorf("%d requests, and %d slots taken afterwards", asked, len(limiter))
	}
}
