package federation

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

	"github.com/isthmus-net/isthmus/controlplane/federation/services"
)

const (
	// eventTimeout bounds one attempt to write an event: those that come later wait for it.
	eventTimeout = 5 * time.Second
	// eventAttempts is how often an event is written to an API server that does not answer.
	eventAttempts = 3
)

// diary has what a leader tells as events, until they are written into the member: one after another. The broadcaster's own
// way to write them starts a goroutine for each, and keeps each for six minutes to count those that repeat; a leader tells
// of changes alone, and of 10,000 Services at once where a federation begins.
type diary struct {
	events.EventBroadcaster

	sink events.EventSink
}

func newDiary(config *rest.Config) (*diary, error) {
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	client, err := eventsv1client.NewForConfigAndClient(config, httpClient)
	if err != nil {
		return nil, err
	}
	return diaryIn(&events.EventSinkImpl{Interface: client}), nil
}

func diaryIn(sink events.EventSink) *diary { return &diary{events.NewBroadcaster(sink), sink} }

// write writes what is told from now on, until ctx ends. What an API server refuses is left out, and so is the newest while
// a thousand wait.
func (d *diary) write(ctx context.Context, log *slog.Logger) error {
	stop, err := d.StartEventWatcher(func(o runtime.Object) {
		event, ok := o.(*eventsv1.Event)
		if !ok || ctx.Err() != nil {
			return
		}
		if err := d.add(ctx, event); err != nil && ctx.Err() == nil {
			log.Debug("an event is not written", "kind", event.Regarding.Kind, "namespace", event.Regarding.Namespace, "name", event.Regarding.Name, "reason", event.Reason, "err", err)
		}
	})
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, stop)
	return nil
}

// standing are the reasons of events that tell of what is so, and not of a change: nothing that stands in the member says
// that it was told. They are named by what they say, so that whoever leads next does not tell it again while it can be read.
var standing = []string{services.ReasonTaken}

func (d *diary) add(ctx context.Context, event *eventsv1.Event) error {
	if slices.Contains(standing, event.Reason) {
		sum := sha256.Sum256([]byte(string(event.Regarding.UID) + " " + event.Note))
		event = event.DeepCopy()
		event.Name = event.Regarding.Name + "." + hex.EncodeToString(sum[:8])
	}
	var last error
	err := wait.ExponentialBackoffWithContext(ctx, wait.Backoff{Duration: time.Second, Factor: 2, Steps: eventAttempts}, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, eventTimeout)
		defer cancel()
		_, last = d.sink.Create(ctx, event)
		var answer apierrors.APIStatus
		return last == nil || errors.As(last, &answer), nil
	})
	if last != nil {
		return last
	}
	return err
}
