package federation_test

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
)

// audited are all kinds that leaders write: what is the federation's, annotations on what is people's, and events.
var audited = []schema.GroupVersionKind{
	{Version: "v1", Kind: "Service"},
	{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"},
	{Group: "multicluster.x-k8s.io", Version: "v1beta1", Kind: "ServiceImport"},
	{Group: "networking.k8s.io", Version: "v1", Kind: "NetworkPolicy"},
	{Group: "crd.antrea.io", Version: "v1beta1", Kind: "ClusterNetworkPolicy"},
	{Version: "v1", Kind: "ConfigMap"},
	{Group: "events.k8s.io", Version: "v1", Kind: "Event"},
}

// What may be done to an object, beside ADDED, MODIFIED and DELETED, which are of the federation's own and of all that
// they say.
const (
	stamped = "STAMPED" // nothing but the epoch is new
	status  = "STATUS"  // nothing but the status is
	told    = "TOLD"    // an annotation says to people what became of their object
	event   = "EVENT"
)

// audit is everything that leaders write into members, each write once, as the members' API servers tell it.
type audit struct {
	world   *testbed
	members []clusterset.ClusterID

	mu     sync.Mutex
	stands map[clusterset.ClusterID]map[types.UID]*unstructured.Unstructured // as it was told last
	writes []write
}

// write is one of them.
type write struct {
	to          clusterset.ClusterID
	verb, what  string // "KIND NAME"; of a slice and an event more
	uid         types.UID
	before, has string // epochs
}

func (w write) String() string { return fmt.Sprintf("%s %s %s", w.to, w.verb, w.what) }

// audit begins one when all that was to be written before is written, of all members if none is named.
func (w *testbed) audit(of ...clusterset.ClusterID) *audit {
	w.t.Helper()
	w.awaitRest()
	if len(of) == 0 {
		of = ids
	}
	a := &audit{world: w, members: of, stands: map[clusterset.ClusterID]map[types.UID]*unstructured.Unstructured{}}
	for _, id := range of {
		a.stands[id] = map[types.UID]*unstructured.Unstructured{}
		for _, kind := range audited {
			list := w.list(id, kind)
			for i := range list.Items {
				a.stands[id][list.Items[i].GetUID()] = &list.Items[i]
			}
			since := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}}
			watcher, err := w.admin[id].Watch(w.t.Context(), list, since)
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

// list returns what a member has of a kind.
func (w *testbed) list(id clusterset.ClusterID, kind schema.GroupVersionKind) *unstructured.UnstructuredList {
	w.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := w.admin[id].List(w.t.Context(), list); err != nil {
		w.t.Fatal(err)
	}
	return list
}

// note takes what one watch tells.
func (a *audit) note(id clusterset.ClusterID, e watch.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now, ok := e.Object.(*unstructured.Unstructured)
	if !ok {
		a.writes = append(a.writes, write{to: id, verb: string(e.Type), what: "the audit has a gap"})
		return
	}
	was := a.stands[id][now.GetUID()]
	a.stands[id][now.GetUID()] = now
	if e.Type == watch.Deleted {
		delete(a.stands[id], now.GetUID())
	}
	if verb := verbOf(e.Type, was, now); verb != "" {
		a.writes = append(a.writes, write{to: id, verb: verb, what: describe(now), uid: now.GetUID(), before: epochOf(was), has: epochOf(now)})
	}
}

// verbOf returns what a leader did, "" if it was no leader.
func verbOf(e watch.EventType, was, now *unstructured.Unstructured) string {
	if now.GetKind() == "Event" {
		if by, _, _ := unstructured.NestedString(now.Object, "reportingController"); by != "isthmus-federation" || e == watch.Deleted {
			return ""
		}
		return event
	}
	if !isOurs(now) && (was == nil || !isOurs(was)) {
		switch {
		case was == nil || e != watch.Modified:
			return ""
		case was.GetAnnotations()[federationv1alpha1.AnnotationServiceStatus] != now.GetAnnotations()[federationv1alpha1.AnnotationServiceStatus],
			was.GetAnnotations()[policies.AnnotationStatus] != now.GetAnnotations()[policies.AnnotationStatus]:
			return told
		case epochOf(was) != epochOf(now):
			return stamped
		default:
			return ""
		}
	}
	if e != watch.Modified || was == nil {
		return string(e)
	}
	before, after := content(was), content(now)
	if reflect.DeepEqual(before, after) {
		return stamped
	}
	delete(before, "status")
	delete(after, "status")
	if reflect.DeepEqual(before, after) {
		return status
	}
	return string(e)
}

func isOurs(o *unstructured.Unstructured) bool {
	return o.GetLabels()[v1alpha1.LabelManagedBy] == federationv1alpha1.ManagedBy || o.GetLabels()[discoveryv1.LabelManagedBy] == federationv1alpha1.ManagedBy
}

func epochOf(o *unstructured.Unstructured) string {
	if o == nil {
		return ""
	}
	return o.GetAnnotations()[federationv1alpha1.AnnotationEpoch]
}

// content returns what o says, but for its epoch and for what the API server counts of it.
func content(o *unstructured.Unstructured) map[string]any {
	o = o.DeepCopy()
	for _, field := range [][]string{{"resourceVersion"}, {"managedFields"}, {"generation"}, {"annotations", federationv1alpha1.AnnotationEpoch}} {
		unstructured.RemoveNestedField(o.Object, append([]string{"metadata"}, field...)...)
	}
	return o.Object
}

// describe names an object in an audit.
func describe(o *unstructured.Unstructured) string {
	text := o.GetKind() + " " + o.GetName()
	switch o.GetKind() {
	case "EndpointSlice":
		return fmt.Sprintf("EndpointSlice %s of %s", o.GetLabels()[discoveryv1.LabelServiceName], o.GetLabels()[federationv1alpha1.MarkCluster])
	case "ConfigMap":
		name, _, _ := unstructured.NestedString(o.Object, "data", "name") // of the policy that is refused
		return "ConfigMap of " + name
	case "Event":
		var parts []string
		for _, field := range [][]string{{"reason"}, {"regarding", "kind"}, {"regarding", "name"}} {
			part, _, _ := unstructured.NestedString(o.Object, field...)
			parts = append(parts, part)
		}
		text = fmt.Sprintf("%s of %s %s", parts[0], parts[1], parts[2])
	}
	return text
}

// take waits until the audit has as many writes as are wanted and nobody asks members to change anything any more, and
// fails when the writes are others, or of an epoch before those of since or after that of the Lease. It returns how many
// objects were made to be of the epoch of a leader that came after the one that wrote them, and then, by this leader,
// removed or given a status: that is the one thing which is written because a leader changed. What becomes of a policy
// is told as it becomes known, and does not count where copies of it are written too. Where the leader changed meanwhile, as it may on a machine that is busy,
// events may be missing, as those go with a leader that it has not written.
func (a *audit) take(about string, since map[clusterset.ClusterID]int64, want ...string) int {
	a.world.t.Helper()
	isEvent := func(line string) bool { return strings.Contains(line, " "+event+" ") }
	mayMiss := func(line string) bool {
		return isEvent(line) || strings.Contains(line, " "+told+" ") && strings.Contains(line, "Policy ")
	}
	eventually(a.world.t, about+": the writes "+strings.Join(want, ", "), func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		n := 0
		for _, w := range a.writes {
			if w.verb != stamped && !mayMiss(w.String()) {
				n++
			}
		}
		return n >= len(slices.DeleteFunc(slices.Clone(want), mayMiss))
	})
	a.world.awaitRest()
	eventually(a.world.t, "the audit has been told everything", a.current)
	a.mu.Lock()
	writes := a.writes
	a.writes = nil
	a.mu.Unlock()

	now := a.world.epochs()
	var have, wrong []string
	restamped := 0
	for i, w := range writes {
		line := w.String()
		if epoch, err := strconv.ParseInt(w.has, 10, 64); w.verb != event && (err != nil || epoch < since[w.to] || epoch > now[w.to]) {
			wrong = append(wrong, fmt.Sprintf("%s in epoch %q, and the Lease is of %d to %d", line, w.has, since[w.to], now[w.to]))
		}
		switch {
		case w.verb == stamped && w.before != w.has && slices.ContainsFunc(writes[i+1:], func(next write) bool {
			return next.to == w.to && next.uid == w.uid && (next.verb == string(watch.Deleted) || next.verb == status)
		}):
			restamped++
			continue
		case w.verb == told && strings.Contains(w.what, "Policy ") && slices.ContainsFunc(writes, func(copied write) bool {
			return copied.what == w.what && copied.verb != told
		}):
			continue
		}
		have = append(have, line)
	}
	for _, line := range want {
		if to, _, _ := strings.Cut(line, " "); isEvent(line) && !slices.Contains(have, line) && now[clusterset.ClusterID(to)] != since[clusterset.ClusterID(to)] {
			have = append(have, line)
		}
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) || len(wrong) > 0 {
		a.world.t.Errorf("%s was written:\n%s\nwant:\n%s\nin wrong epochs:\n%s", about, strings.Join(have, "\n"), strings.Join(want, "\n"), strings.Join(wrong, "\n"))
	}
	return restamped
}

// current reports whether watches have told of everything that stands in members, and of everything that is gone.
func (a *audit) current() bool {
	for _, id := range a.members {
		versions := map[types.UID]string{}
		for _, kind := range audited {
			for _, o := range a.world.list(id, kind).Items {
				versions[o.GetUID()] = o.GetResourceVersion()
			}
		}
		a.mu.Lock()
		told := map[types.UID]string{}
		for uid, o := range a.stands[id] {
			told[uid] = o.GetResourceVersion()
		}
		a.mu.Unlock()
		if !maps.Equal(versions, told) {
			return false
		}
	}
	return true
}

// written is what leaders do to the objects of a federated Service that one cluster offers, in members.
func (w *testbed) written(verb watch.EventType, name string, from clusterset.ClusterID, to ...clusterset.ClusterID) []string {
	var want []string
	for _, id := range to {
		want = append(want, fmt.Sprintf("%s %s Service %s", id, verb, name), fmt.Sprintf("%s %s EndpointSlice %s of %s", id, verb, name, from))
		if w.vips {
			want = append(want, fmt.Sprintf("%s %s ServiceImport %s", id, verb, name))
		}
		if w.vips && verb == watch.Added {
			want = append(want, fmt.Sprintf("%s %s ServiceImport %s", id, status, name))
		}
	}
	return want
}

// came is what is written in members when one federated Service comes that a cluster offers.
func (w *testbed) came(name string, from clusterset.ClusterID, to ...clusterset.ClusterID) []string {
	return append(w.written(watch.Added, name, from, to...),
		fmt.Sprintf("%s %s Service %s", from, told, name), fmt.Sprintf("%s %s Federated of Service %s", from, event, name))
}

// epochs are those of the members' Leases, as their API servers say.
func (w *testbed) epochs() map[clusterset.ClusterID]int64 {
	w.t.Helper()
	epochs := map[clusterset.ClusterID]int64{}
	for _, id := range ids {
		_, epochs[id] = w.lease(id)
	}
	return epochs
}

// asked is a line of the metrics of an API server that counts requests that change something.
var asked = regexp.MustCompile(`^apiserver_request_total\{.*code="(\d+)".*resource="(\w+)".*verb="(POST|PUT|PATCH|APPLY|DELETE|DELETECOLLECTION)".*\} (\S+)$`)

// requests returns how often all members were asked to change something, Leases apart, whoever asked and whatever the
// answer was; but where something is refused in this world, what is refused.
func (w *testbed) requests() map[string]string {
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
			if m := asked.FindStringSubmatch(strings.TrimSpace(line)); m != nil && m[2] != "leases" && (m[1] != "403" || !w.refuses) {
				counts[string(id)+" "+line[:strings.LastIndexByte(line, ' ')]] = m[4]
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
