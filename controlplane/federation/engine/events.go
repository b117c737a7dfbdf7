package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"slices"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	eventsv1client "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
)

const (
	// eventTimeout limits one attempt to write an event, because later events wait for it.
	eventTimeout = 5 * time.Second
	// eventAttempts limits the attempts to write an event to an API server that does not answer.
	eventAttempts = 3
)

// EventWriter writes the events of a leader into a member, one after another. The broadcaster's own writer starts a
// goroutine for each event and keeps it for six minutes, to count repetitions; a leader reports changes only, and 10,000
// Services at once when a federation begins.
type EventWriter struct {
	events.EventBroadcaster

	sink    events.EventSink
	lasting []string
}

// NewEventWriter returns an EventWriter for an API server. Events with one of the reasons in lasting describe a state, and
// no annotation in the member records that they were sent. Their names follow from their text, so that the next leader
// does not repeat them while they can be read.
func NewEventWriter(config *rest.Config, lasting []string) (*EventWriter, error) {
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	client, err := eventsv1client.NewForConfigAndClient(config, httpClient)
	if err != nil {
		return nil, err
	}
	return newEventWriter(&events.EventSinkImpl{Interface: client}, lasting), nil
}

func newEventWriter(sink events.EventSink, lasting []string) *EventWriter {
	return &EventWriter{EventBroadcaster: events.NewBroadcaster(sink), sink: sink, lasting: lasting}
}

// Run writes the events that are recorded from now on, until ctx ends; it does not block. It drops an event that the API
// server refuses, and the newest events while a thousand wait.
func (w *EventWriter) Run(ctx context.Context, log *slog.Logger) error {
	stop, err := w.StartEventWatcher(func(o runtime.Object) {
		event, ok := o.(*eventsv1.Event)
		if !ok || ctx.Err() != nil {
			return
		}
		if err := w.write(ctx, event); err != nil && ctx.Err() == nil {
			log.Debug("an event was not written", "kind", event.Regarding.Kind, "namespace", event.Regarding.Namespace, "name", event.Regarding.Name, "reason", event.Reason, "err", err)
		}
	})
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, stop)
	return nil
}

func (w *EventWriter) write(ctx context.Context, event *eventsv1.Event) error {
	if slices.Contains(w.lasting, event.Reason) {
		sum := sha256.Sum256([]byte(string(event.Regarding.UID) + " " + event.Note))
		event = event.DeepCopy()
		event.Name = event.Regarding.Name + "." + hex.EncodeToString(sum[:8])
	}
	var last error
	err := wait.ExponentialBackoffWithContext(ctx, wait.Backoff{Duration: time.Second, Factor: 2, Steps: eventAttempts}, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, eventTimeout)
		defer cancel()
		_, last = w.sink.Create(ctx, event)
		var answer apierrors.APIStatus
		return last == nil || errors.As(last, &answer), nil
	})
	if last != nil {
		return last
	}
	return err
}
