package engine

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
)

// names is an API server that records the names of events.
type names struct {
	events.EventSink

	mu    sync.Mutex
	known map[string]map[string]bool // by reason and uid
}

func (n *names) Create(_ context.Context, event *eventsv1.Event) (*eventsv1.Event, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	of := event.Reason + " " + string(event.Regarding.UID)
	if n.known[of] == nil {
		n.known[of] = map[string]bool{}
	}
	n.known[of][event.Name] = true
	return event, nil
}

// An event that describes a state has the same name from every leader, so an API server stores it once.
func TestLastingEventsHaveOneName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &names{known: map[string]map[string]bool{}}
		for range 2 { // processes
			ctx, cancel := context.WithCancel(t.Context())
			d := newEventWriter(server, []string{"NameTaken"})
			if err := d.Run(ctx, slog.New(slog.DiscardHandler)); err != nil {
				t.Fatal(err)
			}
			for _, uid := range []string{"one", "two"} {
				svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "shop", UID: types.UID(uid)}}
				recorder := d.NewRecorder(clientgoscheme.Scheme, "test")
				recorder.Eventf(svc, nil, corev1.EventTypeWarning, "NameTaken", "NameTaken", "it has the name")
				recorder.Eventf(svc, nil, corev1.EventTypeNormal, "Federated", "Federated", "member of web")
			}
			<-time.After(time.Minute)
			cancel()
			d.Shutdown()
			synctest.Wait()
		}
		for _, uid := range []string{"one", "two"} {
			if taken, federated := len(server.known["NameTaken "+uid]), len(server.known["Federated "+uid]); taken != 1 || federated != 2 {
				t.Errorf("of %s: the state has events under %d names, the change under %d; want 1 and 2", uid, taken, federated)
			}
		}
	})
}
