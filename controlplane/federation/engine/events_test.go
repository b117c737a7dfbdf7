package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
)

// writer is an API server that takes ten milliseconds to write an event.
type writer struct {
	events.EventSink

	answers []error // to the first attempts; then none is an error

	mu                      sync.Mutex
	attempts, written, busy int
	together                int // most attempts at a time
}

func (w *writer) Create(ctx context.Context, event *eventsv1.Event) (*eventsv1.Event, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var err error
	if w.attempts < len(w.answers) {
		err = w.answers[w.attempts]
	}
	w.attempts++
	w.busy++
	w.together = max(w.together, w.busy)
	w.mu.Unlock()
	select {
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(10 * time.Millisecond):
	}
	w.mu.Lock()
	w.busy--
	if err == nil {
		w.written++
	}
	return event, err
}

// Events are written one at a time, however many there are and however the member's API server answers.
func TestEventWriter(t *testing.T) {
	silent := errors.New("connection refused")
	refuses := apierrors.NewForbidden(eventsv1.Resource("events"), "", errors.New("by a webhook"))
	for name, tc := range map[string]struct {
		events            int
		answers           []error
		attempts, written int
	}{
		"many at once":           {events: 500, attempts: 500, written: 500},
		"the API server starts":  {events: 2, answers: []error{silent, silent}, attempts: 4, written: 2},
		"it is silent":           {events: 2, answers: []error{silent, silent, silent}, attempts: 4, written: 1},
		"it refuses one of them": {events: 2, answers: []error{refuses}, attempts: 2, written: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &writer{answers: tc.answers}
				d := newEventWriter(w, nil)
				ctx, cancel := context.WithCancel(t.Context())
				if err := d.Run(ctx, slog.New(slog.DiscardHandler)); err != nil {
					t.Fatal(err)
				}
				recorder := d.NewRecorder(clientgoscheme.Scheme, "test")
				record := func(i int) {
					svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: fmt.Sprint("web-", i)}}
					recorder.Eventf(svc, nil, corev1.EventTypeNormal, "Federated", "Federated", "member of %s", "web")
				}
				for i := range tc.events {
					record(i)
				}
				<-time.After(time.Minute)
				cancel()
				synctest.Wait()
				record(tc.events) // this process no longer leads
				<-time.After(time.Minute)
				if w.attempts != tc.attempts || w.written != tc.written || w.together != 1 {
					t.Errorf("%d attempts, %d at a time, wrote %d of %d; want %d, 1 and %d", w.attempts, w.together, w.written, tc.events, tc.attempts, tc.written)
				}
				d.Shutdown()
			})
		})
	}
}
