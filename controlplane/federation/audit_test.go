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
	"github.com/isthmus-net/isthmus/tools/await"
)

// audited are all kinds that leaders write: objects of the federation, annotations of users' objects, and events.
var audited = []schema.GroupVersionKind{
	{Version: "v1", Kind: "Service"},
	{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"},
	{Group: "multicluster.x-k8s.io", Version: "v1beta1", Kind: "ServiceImport"},
	{Group: "networking.k8s.io", Version: "v1", Kind: "NetworkPolicy"},
	{Group: "crd.antrea.io", Version: "v1beta1", Kind: "ClusterNetworkPolicy"},
	{Version: "v1", Kind: "ConfigMap"},
	{Group: "events.k8s.io", Version: "v1", Kind: "Event"},
}

// Verbs of writes beside ADDED, MODIFIED and DELETED, which change the content of an object of the federation.
const (
	stamped = "STAMPED" // only the epoch changed
	status  = "STATUS"  // only the status changed
	told    = "TOLD"    // an annotation reports the state of a user's object
	event   = "EVENT"
)

// audit collects all writes of leaders into members, each once, as the members' API servers report them.
type audit struct {
	testbed *testbed
	members []clusterset.ClusterID

	mu     sync.Mutex
	stored map[clusterset.ClusterID]map[types.UID]*unstructured.Unstructured // as last reported
	writes []write
}

// write is one write of an audit.
type write struct {
	to          clusterset.ClusterID
	verb, what  string // "KIND NAME", with details for a slice and an event
	uid         types.UID
	before, has string // epochs
	note        string // of an event
}

func (w write) String() string { return fmt.Sprintf("%s %s %s", w.to, w.verb, w.what) }

// audit starts an audit of members, of all if none is named, when no client writes into members any more.
func (w *testbed) audit(of ...clusterset.ClusterID) *audit {
	w.t.Helper()
	w.awaitRest()
	if len(of) == 0 {
		of = ids
	}
	a := &audit{testbed: w, members: of, stored: map[clusterset.ClusterID]map[types.UID]*unstructured.Unstructured{}}
	for _, id := range of {
		a.stored[id] = map[types.UID]*unstructured.Unstructured{}
		for _, kind := range audited {
			list := w.list(id, kind)
			for i := range list.Items {
				a.stored[id][list.Items[i].GetUID()] = &list.Items[i]
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

// list returns the objects of a kind in a member.
func (w *testbed) list(id clusterset.ClusterID, kind schema.GroupVersionKind) *unstructured.UnstructuredList {
	w.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := w.admin[id].List(w.t.Context(), list); err != nil {
		w.t.Fatal(err)
	}
	return list
}

// note records one watch event.
func (a *audit) note(id clusterset.ClusterID, e watch.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now, ok := e.Object.(*unstructured.Unstructured)
	if !ok {
		a.writes = append(a.writes, write{to: id, verb: string(e.Type), what: "the audit has a gap"})
		return
	}
	was := a.stored[id][now.GetUID()]
	a.stored[id][now.GetUID()] = now
	if e.Type == watch.Deleted {
		delete(a.stored[id], now.GetUID())
	}
	if verb := verbOf(e.Type, was, now); verb != "" {
		note, _, _ := unstructured.NestedString(now.Object, "note")
		a.writes = append(a.writes, write{to: id, verb: verb, what: describe(now), uid: now.GetUID(), before: epochOf(was), has: epochOf(now), note: note})
	}
}

// verbOf returns the verb of a leader's write, "" for the write of another client.
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

// content returns the content of o, without its epoch and the fields that the API server maintains.
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

// take waits until the audit has the wanted writes and no client writes into members any more. It fails if there are other
// writes, or writes of an epoch before since or after the epoch of the Lease.
// It returns how many objects a later leader first moved to its own epoch, to delete them or to write their status. That is
// the only write because of a new leader. Reports on a policy are written as its state becomes known, and do not count
// while its copies are written. If the leader changed meanwhile, as on a busy machine, events may be missing: a leader
// loses the events that it has not written.
func (a *audit) take(about string, since map[clusterset.ClusterID]int64, want ...string) int {
	a.testbed.t.Helper()
	isEvent := func(line string) bool { return strings.Contains(line, " "+event+" ") }
	mayMiss := func(line string) bool {
		return isEvent(line) || strings.Contains(line, " "+told+" ") && strings.Contains(line, "Policy ")
	}
	await.True(a.testbed.t, about+": the writes "+strings.Join(want, ", "), func() bool {
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
	a.testbed.awaitRest()
	await.True(a.testbed.t, "the audit is complete", a.current)
	a.mu.Lock()
	writes := a.writes
	a.writes = nil
	a.mu.Unlock()

	now := a.testbed.epochs()
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
		// On a busy machine a member may refuse for another reason at first, such as a timeout.
		case w.verb == event && slices.ContainsFunc(writes[:i], func(earlier write) bool { return earlier.String() == line && earlier.note != w.note }):
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
		a.testbed.t.Errorf("%s was written:\n%s\nwant:\n%s\nin wrong epochs:\n%s", about, strings.Join(have, "\n"), strings.Join(want, "\n"), strings.Join(wrong, "\n"))
	}
	return restamped
}

// current reports whether the watches have reported all existing and all deleted objects.
func (a *audit) current() bool {
	for _, id := range a.members {
		versions := map[types.UID]string{}
		for _, kind := range audited {
			for _, o := range a.testbed.list(id, kind).Items {
				versions[o.GetUID()] = o.GetResourceVersion()
			}
		}
		a.mu.Lock()
		told := map[types.UID]string{}
		for uid, o := range a.stored[id] {
			told[uid] = o.GetResourceVersion()
		}
		a.mu.Unlock()
		if !maps.Equal(versions, told) {
			return false
		}
	}
	return true
}

// written returns the audit lines of leaders that write a federated Service, with endpoints in cluster from, to each cluster of to.
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

// came returns the writes when a federated Service of one cluster is new.
func (w *testbed) came(name string, from clusterset.ClusterID, to ...clusterset.ClusterID) []string {
	return append(w.written(watch.Added, name, from, to...),
		fmt.Sprintf("%s %s Service %s", from, told, name), fmt.Sprintf("%s %s Federated of Service %s", from, event, name))
}

// epochs returns the epochs of the members' Leases.
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

// requests returns the number of write requests to all members, Leases and dry runs excluded, from any client and with any
// response. In a testbed where a member refuses writes, refused requests are left out.
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
			if m := asked.FindStringSubmatch(strings.TrimSpace(line)); m != nil && m[2] != "leases" && !strings.Contains(line, `dry_run="All"`) && (m[1] != "403" || !w.refuses) {
				counts[string(id)+" "+line[:strings.LastIndexByte(line, ' ')]] = m[4]
			}
		}
	}
	return counts
}

// difference returns the requests since before.
func difference(before, after map[string]string) []string {
	var came []string
	for _, request := range slices.Sorted(maps.Keys(after)) {
		if before[request] != after[request] {
			came = append(came, fmt.Sprintf("%s: %s, then %s", request, before[request], after[request]))
		}
	}
	return came
}
