package federation_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// audit is everything that leaders write of federated Services, each write once, as the members' API servers tell it.
type audit struct {
	world *world

	mu     sync.Mutex
	writes []write
}

// write is one of them.
type write struct {
	to    clusterset.ClusterID
	what  string // "EVENT KIND NAME", and for a slice " of CLUSTER"
	epoch string
}

// audit begins one, of all members.
func (w *world) audit() *audit {
	w.t.Helper()
	a := &audit{world: w}
	for _, id := range ids {
		for label, list := range map[string]client.ObjectList{v1alpha1.LabelManagedBy: &corev1.ServiceList{}, discoveryv1.LabelManagedBy: &discoveryv1.EndpointSliceList{}} {
			ours := &client.ListOptions{}
			client.MatchingLabels{label: federationv1alpha1.ManagedBy}.ApplyToList(ours)
			if err := w.admin[id].List(w.t.Context(), list, ours); err != nil {
				w.t.Fatal(err)
			}
			ours.Raw = &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}
			watcher, err := w.admin[id].Watch(w.t.Context(), list, ours)
			if err != nil {
				w.t.Fatal(err)
			}
			var following sync.WaitGroup
			following.Go(func() {
				for event := range watcher.ResultChan() {
					a.note(id, event)
				}
			})
			w.t.Cleanup(func() { watcher.Stop(); following.Wait() })
		}
	}
	return a
}

func (a *audit) note(id clusterset.ClusterID, event watch.Event) {
	w := write{to: id}
	switch o := event.Object.(type) {
	case *corev1.Service:
		w.what, w.epoch = fmt.Sprintf("%s Service %s", event.Type, o.Name), o.Annotations[federationv1alpha1.AnnotationEpoch]
	case *discoveryv1.EndpointSlice:
		w.what = fmt.Sprintf("%s EndpointSlice %s of %s", event.Type, o.Labels[discoveryv1.LabelServiceName], o.Labels[federationv1alpha1.MarkCluster])
		w.epoch = o.Annotations[federationv1alpha1.AnnotationEpoch]
	default:
		w.what = fmt.Sprintf("%s: the audit has a gap", event.Type)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.writes = append(a.writes, w)
}

// take waits until the audit has as many writes as are wanted, "MEMBER WHAT" each, and fails when they are others, or of
// an epoch before those of since or after that of the Lease. Watches tell of a kind in order, so whatever was written
// before the last one of each kind is among them. Where the leader changed meanwhile, as it may on a machine that is
// busy, changes do not count: a leader writes its epoch on what it is about to delete.
func (a *audit) take(about string, since map[clusterset.ClusterID]int64, want ...string) {
	a.world.t.Helper()
	var have []string
	eventually(a.world.t, about+": the writes "+strings.Join(want, ", "), func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		now := a.world.epochs()
		have = nil
		for _, w := range a.writes {
			if now[w.to] != since[w.to] && strings.HasPrefix(w.what, "MODIFIED") {
				continue
			}
			have = append(have, fmt.Sprintf("%s %s", w.to, w.what))
			if epoch, err := strconv.ParseInt(w.epoch, 10, 64); err != nil || epoch < since[w.to] || epoch > now[w.to] {
				have = append(have, fmt.Sprintf("%s %s in epoch %s, and the Lease is of %d to %d", w.to, w.what, w.epoch, since[w.to], now[w.to]))
			}
		}
		return len(have) >= len(want)
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	a.writes = nil
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		a.world.t.Errorf("%s was written:\n%s\nwant:\n%s", about, strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}

// added is what is written in members when one federated Service comes that a cluster offers.
func added(name string, from clusterset.ClusterID, to ...clusterset.ClusterID) []string {
	var want []string
	for _, id := range to {
		want = append(want, fmt.Sprintf("%s ADDED Service %s", id, name), fmt.Sprintf("%s ADDED EndpointSlice %s of %s", id, name, from))
	}
	return want
}

// epochs are those of the members' Leases, as their API servers say.
func (w *world) epochs() map[clusterset.ClusterID]int64 {
	w.t.Helper()
	epochs := map[clusterset.ClusterID]int64{}
	for _, id := range ids {
		_, epochs[id] = w.lease(id)
	}
	return epochs
}

// written is a line of the metrics of an API server that counts requests that change something.
var written = regexp.MustCompile(`^apiserver_request_total\{.*resource="(\w+)".*verb="(POST|PUT|PATCH|APPLY|DELETE|DELETECOLLECTION)".*\} (\S+)$`)

// requests returns how often all members were asked to change something, Leases apart, whoever asked and whatever the
// answer was.
func (w *world) requests() map[string]string {
	w.t.Helper()
	counts := map[string]string{}
	for _, id := range ids {
		c, err := discovery.NewDiscoveryClientForConfig(servers[id].Config(w.t))
		if err != nil {
			w.t.Fatal(err)
		}
		page, err := c.RESTClient().Get().AbsPath("/metrics").DoRaw(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		for line := range strings.Lines(string(page)) {
			if m := written.FindStringSubmatch(strings.TrimSpace(line)); m != nil && m[1] != "leases" {
				counts[string(id)+" "+line[:strings.LastIndexByte(line, ' ')]] = m[3]
			}
		}
	}
	return counts
}

// difference returns the requests that came since.
func difference(before, after map[string]string) []string {
	var came []string
	for _, request := range slices.Sorted(maps.Keys(after)) {
		if before[request] != after[request] {
			came = append(came, fmt.Sprintf("%s: %s, then %s", request, before[request], after[request]))
		}
	}
	return came
}
