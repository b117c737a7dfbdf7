package quotacontroller_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/quotacontroller"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

var server apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

// testbed is a broker with members a and b, its policies, and the account of the quota controller.
type testbed struct {
	*testing.T
	namespace string
	admin     client.Client
}

var brokers atomic.Int32

func newTestbed(t *testing.T, quotas v1alpha1.Quotas) *testbed {
	t.Helper()
	w := &testbed{T: t, namespace: fmt.Sprintf("broker-%d", brokers.Add(1)), admin: newClient(t, server.Config(t))}
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
	config := &v1alpha1.ClusterSetConfig{ObjectMeta: w.meta(v1alpha1.ClusterSetConfigName), Spec: v1alpha1.ClusterSetConfigSpec{ClusterSetID: "test", Quotas: &quotas}}
	for _, id := range []string{"a", "b"} {
		config.Spec.Members = append(config.Spec.Members, v1alpha1.MemberBlocks{ClusterID: id})
		w.account(v1alpha1.MemberAccount(id), access.MemberBrokerRules())
	}
	w.create(config)
	w.account(v1alpha1.QuotaController, access.QuotaControllerRules())
	policies, err := access.Policies(w.namespace)
	w.noError(err)
	for _, p := range policies {
		w.create(p)
		t.Cleanup(func() { w.noError(w.admin.Delete(context.WithoutCancel(t.Context()), p)) })
	}
	w.eventually("the policies", func() error {
		if err := w.as("a").Create(t.Context(), w.record("b", "probe"), client.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Errorf("a writes for b: %w", err)
		}
		return w.as("a").Create(t.Context(), w.record("a", "probe"), client.DryRunAll)
	})
	return w
}

// account creates a ServiceAccount with rules in the broker's namespace.
func (w *testbed) account(name string, rules []rbacv1.PolicyRule) {
	w.create(&corev1.ServiceAccount{ObjectMeta: w.meta(name)})
	w.create(&rbacv1.Role{ObjectMeta: w.meta(name), Rules: rules})
	w.create(&rbacv1.RoleBinding{
		ObjectMeta: w.meta(name), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: name, Namespace: w.namespace}},
	})
}

// token returns the configuration of a ServiceAccount.
func (w *testbed) token(account string) *rest.Config {
	w.Helper()
	var token string
	// A server denies requests at first whose policies have a parameter of a kind that it has just learned.
	w.eventually("a token", func() (err error) {
		token, _, err = admin.RequestToken(w.Context(), w.admin, types.NamespacedName{Namespace: w.namespace, Name: account}, time.Hour, "")
		return err
	})
	c := rest.AnonymousClientConfig(server.Config(w.T))
	c.BearerToken = token
	return c
}

// as returns a client of a member.
func (w *testbed) as(id string) client.Client {
	w.Helper()
	return newClient(w.T, w.token(v1alpha1.MemberAccount(id)))
}

// run runs a controller until the returned function is called.
func (w *testbed) run(grace time.Duration) (stop func()) {
	w.Helper()
	c, err := quotacontroller.New(quotacontroller.Config{
		REST: w.token(v1alpha1.QuotaController), Namespace: w.namespace, Grace: grace, Log: slog.New(slog.DiscardHandler),
	})
	w.noError(err)
	ctx, cancel := context.WithCancel(w.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			w.Errorf("the controller ended: %v", err)
		}
	})
	w.Cleanup(stop)
	w.eventually("the controller acts", func() error {
		if s := c.State(); !s.Leader || s.Waiting != "" {
			return fmt.Errorf("state: %+v", s)
		}
		return nil
	})
	return stop
}

func newClient(t testing.TB, c *rest.Config) client.Client {
	t.Helper()
	s := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(s), v1alpha1.AddToScheme(s), v1beta1.Install(s)); err != nil {
		t.Fatal(err)
	}
	c.QPS = -1
	made, err := client.New(c, client.Options{Scheme: s})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func (w *testbed) noError(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *testbed) create(obj client.Object) {
	w.Helper()
	w.noError(w.admin.Create(w.Context(), obj))
}

func (w *testbed) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: w.namespace, Name: name}
}

func (w *testbed) eventually(what string, check func() error) {
	w.Helper()
	await.NoError(w, what, check)
}

// laterThan waits until new objects are younger than obj: creation times count in seconds.
func (w *testbed) laterThan(obj client.Object) {
	w.Helper()
	w.noError(w.admin.Get(w.Context(), client.ObjectKeyFromObject(obj), obj))
	w.eventually("the next second", func() error {
		probe := w.record("b", "probe")
		w.noError(w.admin.Create(w.Context(), probe, client.DryRunAll))
		if t := obj.GetCreationTimestamp(); !t.Before(&probe.CreationTimestamp) {
			return fmt.Errorf("it is still %s", t)
		}
		return nil
	})
}

func (w *testbed) record(id, service string) *v1alpha1.ExportRecord {
	r := mcs.ExportRecord(clusterset.Export{
		Cluster: clusterset.ClusterID(id), Service: clusterset.ServiceName{Namespace: "demo", Name: service},
		ExportedAt: time.Now(), Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4},
		Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	})
	r.Namespace = w.namespace
	return r
}

func (w *testbed) slice(id, service, source string) *discoveryv1.EndpointSlice {
	es := mcs.BrokerSlice(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "demo", Name: source, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
		Ports: []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}, clusterset.ClusterID(id))
	es.Namespace = w.namespace
	return es
}

// aggregate returns an aggregate by a member; by an older one without an id.
func (w *testbed) aggregate(by, service string) *v1beta1.ServiceImport {
	si := mcs.Aggregate(clusterset.Aggregate{Service: clusterset.ServiceName{Namespace: "demo", Name: service}, Type: clusterset.ClusterSetIP})
	si.Namespace = w.namespace
	if by != "" {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationCreatedBy, by)
	}
	return si
}

// listed returns the quotas that a member exceeds according to the ClusterSetConfig, as "KIND USED/LIMIT".
func (w *testbed) listed(id string) []string {
	w.Helper()
	config := &v1alpha1.ClusterSetConfig{}
	w.noError(w.admin.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: v1alpha1.ClusterSetConfigName}, config))
	var all []string
	for _, o := range config.Status.OverQuota {
		if o.Member == id {
			all = append(all, fmt.Sprintf("%s %d/%d", o.Kind, o.Used, o.Limit))
		}
	}
	return all
}

// names returns the names of all objects of a kind, sorted by age and name.
func (w *testbed) names(list client.ObjectList) []string {
	w.Helper()
	w.noError(w.admin.List(w.Context(), list, client.InNamespace(w.namespace)))
	var all []client.Object
	w.noError(meta.EachListItem(list, func(o runtime.Object) error {
		all = append(all, o.(client.Object))
		return nil
	}))
	slices.SortStableFunc(all, func(a, b client.Object) int {
		return a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time)
	})
	var names []string
	for _, o := range all {
		names = append(names, o.GetName())
	}
	return names
}

// Member a creates records, slices, tombstones and aggregates as fast as it can. The broker refuses it within seconds, and keeps
// at most twice the quota of each; the objects that readers admit stay, and a updates them. All the while b creates, updates and
// deletes. When a has cleaned up it creates again.
func TestFlood(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{Services: 10, Slices: 20})
	w.run(time.Hour)
	a, b := w.as("a"), w.as("b")
	for n := range 10 {
		w.noError(a.Create(t.Context(), w.record("a", fmt.Sprintf("admitted-%d", n))))
		w.noError(a.Create(t.Context(), w.slice("a", fmt.Sprintf("admitted-%d", n), "x")))
	}
	w.laterThan(w.record("a", "admitted-9"))
	flooding, stop := context.WithCancel(t.Context())
	defer stop()
	var group sync.WaitGroup
	var created, refused [4]atomic.Int32
	for kind, object := range []func(int) client.Object{
		func(n int) client.Object { return w.record("a", fmt.Sprintf("flood-%d", n)) },
		func(n int) client.Object {
			return w.slice("a", "admitted-0", fmt.Sprint("flood-", n))
		},
		func(n int) client.Object {
			r := w.record("a", fmt.Sprintf("buried-%d", n))
			r.Spec.WithdrawnAt = new(metav1.Now())
			return r
		},
		func(n int) client.Object { return w.aggregate("a", fmt.Sprintf("flood-%d-only", n)) },
	} {
		group.Go(func() {
			for n := 0; flooding.Err() == nil; n++ {
				switch err := a.Create(flooding, object(n)); {
				case err == nil:
					created[kind].Add(1)
				case strings.Contains(err.Error(), "QuotaExceeded: member a has"):
					refused[kind].Add(1)
				case flooding.Err() == nil:
					t.Errorf("kind %d: %v", kind, err)
				}
			}
		})
	}
	changes := 0
	for until := time.Now().Add(8 * time.Second); time.Now().Before(until); changes++ {
		r := w.record("b", fmt.Sprint("fine-", changes%10))
		w.noError(b.Create(t.Context(), r))
		r.Spec.IPs = []string{"243.0.0.1"}
		w.noError(b.Update(t.Context(), r))
		w.noError(b.Delete(t.Context(), r))
	}
	for kind := range created {
		t.Logf("kind %d: %d created, %d refused", kind, created[kind].Load(), refused[kind].Load())
		if refused[kind].Load() == 0 {
			t.Errorf("kind %d: nothing was refused", kind)
		}
	}
	t.Logf("b made %d changes of three writes each", changes)
	count := func() (records, tombstones, slices, aggregates int) {
		for _, name := range w.names(&v1alpha1.ExportRecordList{}) {
			if strings.HasPrefix(name, "a.buried") {
				tombstones++
			} else if strings.HasPrefix(name, "a.") {
				records++
			}
		}
		return records, tombstones, len(w.names(&discoveryv1.EndpointSliceList{})), len(w.names(&v1beta1.ServiceImportList{}))
	}
	w.eventually("at most twice the quota", func() error {
		if r, to, s, ag := count(); r > 20 || to > 20 || s > 40 || ag > 20 {
			return fmt.Errorf("%d records, %d tombstones, %d slices, %d aggregates", r, to, s, ag)
		}
		return nil
	})
	stop()
	group.Wait()
	for n := range 10 {
		w.noError(a.Get(t.Context(), client.ObjectKeyFromObject(w.slice("a", fmt.Sprintf("admitted-%d", n), "x")), &discoveryv1.EndpointSlice{}))
		r := w.record("a", fmt.Sprintf("admitted-%d", n))
		w.noError(a.Get(t.Context(), client.ObjectKeyFromObject(r), r))
		r.Spec.IPs = []string{"243.0.0.1"}
		w.noError(a.Update(t.Context(), r))
	}
	w.eventually("an event", func() error { return w.event("QuotaExceeded", "member a has") })
	for _, name := range w.names(&v1alpha1.ExportRecordList{}) {
		if strings.HasPrefix(name, "a.flood") || strings.HasPrefix(name, "a.buried") {
			w.noError(a.Delete(t.Context(), &v1alpha1.ExportRecord{ObjectMeta: w.meta(name)}))
		}
	}
	w.eventually("a creates again", func() error {
		return a.Create(t.Context(), w.record("a", "again"), client.DryRunAll)
	})
}

// event returns nil if the ClusterSetConfig has an event with a reason whose note has a text.
func (w *testbed) event(reason, text string) error {
	var list eventsv1.EventList
	w.noError(w.admin.List(w.Context(), &list, client.InNamespace(w.namespace)))
	var notes []string
	for _, e := range list.Items {
		if e.Reason == reason && e.Regarding.Name == v1alpha1.ClusterSetConfigName && strings.Contains(e.Note, text) {
			return nil
		}
		notes = append(notes, e.Reason+": "+e.Note)
	}
	return fmt.Errorf("events: %v", notes)
}

// A member beyond its quota is listed within two seconds and no longer listed within two seconds after it is within it again. A
// raised limit does the same. Numbers alone follow later.
func TestListing(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{Services: 3, Ports: 100})
	w.run(time.Hour)
	within := func(want ...string) {
		t.Helper()
		began := time.Now()
		w.eventually(fmt.Sprint("listed ", want), func() error {
			if have := w.listed("a"); !slices.Equal(have, want) {
				return fmt.Errorf("listed %v", have)
			}
			return nil
		})
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%v after %s", want, took)
		} else {
			t.Logf("%v after %s", want, took)
		}
	}
	for n := range 4 {
		w.create(w.record("a", fmt.Sprint("s-", n)))
	}
	within("services 4/3")
	w.noError(w.admin.Delete(t.Context(), w.record("a", "s-0")))
	within()
	w.create(w.record("a", "s-4"))
	within("services 4/3")
	since := w.since("a")
	<-time.After(time.Second) // the unit of the status
	w.quotas(v1alpha1.Quotas{Services: 2, Ports: 100})
	within("services 4/2")
	if now := w.since("a"); !now.Equal(&since) {
		t.Errorf("a is beyond its quota since %s, and was since %s", now, since)
	}
	w.quotas(v1alpha1.Quotas{Services: 4, Ports: 2})
	within("ports 4/2")
	w.quotas(v1alpha1.Quotas{Services: 4})
	within()
	if have := w.listed("b"); have != nil {
		t.Errorf("b is listed: %v", have)
	}
}

// since returns from when on a member is beyond its first quota that is listed.
func (w *testbed) since(id string) metav1.Time {
	w.Helper()
	config := &v1alpha1.ClusterSetConfig{}
	w.noError(w.admin.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: v1alpha1.ClusterSetConfigName}, config))
	for _, o := range config.Status.OverQuota {
		if o.Member == id {
			return o.Since
		}
	}
	w.Errorf("%s is not listed", id)
	return metav1.Time{}
}

func (w *testbed) quotas(q v1alpha1.Quotas) {
	w.Helper()
	config := &v1alpha1.ClusterSetConfig{}
	w.eventually("new quotas", func() error {
		w.noError(w.admin.Get(w.Context(), client.ObjectKey{Namespace: w.namespace, Name: v1alpha1.ClusterSetConfigName}, config))
		config.Spec.Quotas = &q
		return w.admin.Update(w.Context(), config)
	})
}

// Large objects exceed the bytes of a member although there are few of them.
func TestStorageBytes(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{StorageBytes: 65536, MetadataBytes: 10_000})
	w.run(time.Hour)
	for n := range 8 {
		r := w.record("a", fmt.Sprint("s-", n))
		r.Spec.ExportedAnnotations = map[string]string{"note": strings.Repeat("x", 40_000)}
		w.create(r)
	}
	w.create(w.record("b", "fine"))
	w.eventually("the listing", func() error {
		have := strings.Join(w.listed("a"), " ")
		if !strings.Contains(have, "storageBytes") || !strings.Contains(have, "metadataBytes") {
			return fmt.Errorf("listed: %v", have)
		}
		return nil
	})
	w.eventually("the deletion", func() error {
		// One record of 40 kB is more than twice the metadataBytes, and so are all behind it.
		if have := w.names(&v1alpha1.ExportRecordList{}); !slices.Equal(have, []string{"b.fine.demo"}) {
			return fmt.Errorf("left: %v", have)
		}
		return nil
	})
}

// An aggregate without a record of any member vanishes after the grace, with any author, and a record of any member keeps it.
func TestOrphans(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{})
	w.create(w.aggregate("a", "alone"))
	w.create(w.aggregate("", "alone-and-old"))
	for _, beside := range []string{"a", "b"} {
		w.create(w.aggregate("a", "beside-"+beside))
		w.create(w.record(beside, "beside-"+beside))
	}
	w.create(w.aggregate("b", "soon-alone"))
	w.create(w.record("a", "soon-alone"))
	w.create(w.aggregate("b", "late"))
	began := time.Now()
	const grace = 4 * time.Second
	w.run(grace)
	w.noError(w.admin.Delete(t.Context(), w.record("a", "soon-alone")))
	<-time.After(2 * time.Second)
	w.create(w.record("b", "late")) // within the grace
	w.eventually("the end of orphans", func() error {
		have := w.names(&v1beta1.ServiceImportList{})
		if time.Since(began) < grace && !slices.Contains(have, "alone.demo") {
			t.Fatalf("an aggregate vanished within the grace; left: %v", have)
		}
		slices.Sort(have)
		if want := []string{"beside-a.demo", "beside-b.demo", "late.demo"}; !slices.Equal(have, want) {
			return fmt.Errorf("left: %v", have)
		}
		return nil
	})
	w.quiet(func() []string { return w.names(&v1beta1.ServiceImportList{}) })
}

// quiet fails the test if the result of get changes within three seconds.
func (w *testbed) quiet(get func() []string) {
	w.Helper()
	before := get()
	<-time.After(3 * time.Second)
	if after := get(); !slices.Equal(before, after) {
		w.Errorf("%v became %v", before, after)
	}
}

// Aggregates count for their author only while no member's record stands beside them.
func TestAggregatesCountForTheirAuthor(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{Services: 2})
	w.run(time.Hour)
	for n := range 3 {
		w.create(w.aggregate("a", fmt.Sprint("s-", n)))
	}
	want := func(want ...string) {
		t.Helper()
		w.eventually(fmt.Sprint("listed ", want), func() error {
			if have := w.listed("a"); !slices.Equal(have, want) {
				return fmt.Errorf("listed %v", have)
			}
			return nil
		})
	}
	want("aggregates 3/2")
	w.create(w.record("b", "s-0"))
	want()
	w.noError(w.admin.Delete(t.Context(), w.record("b", "s-0")))
	want("aggregates 3/2")
}

// Two controllers, one after the other, keep the same objects, and the second changes nothing more.
func TestRestart(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{Services: 3})
	for n := range 20 { // the names of the younger half sort first
		if n < 10 {
			w.create(w.record("a", fmt.Sprintf("t-%02d", n)))
			continue
		}
		if n == 10 {
			w.laterThan(w.record("a", "t-09"))
		}
		w.create(w.record("a", fmt.Sprintf("s-%02d", n)))
	}
	stop := w.run(time.Hour)
	want := []string{"a.t-00.demo", "a.t-01.demo", "a.t-02.demo", "a.t-03.demo", "a.t-04.demo", "a.t-05.demo"}
	left := func() []string { return w.names(&v1alpha1.ExportRecordList{}) }
	w.eventually("twice the quota", func() error {
		if have := left(); !slices.Equal(have, want) {
			return fmt.Errorf("left: %v", have)
		}
		return nil
	})
	listed := w.listed("a")
	stop()
	w.run(time.Hour)
	w.quiet(left)
	if have := w.listed("a"); !slices.Equal(have, listed) && !slices.Equal(have, []string{"services 6/3"}) {
		t.Errorf("listed %v, before %v", have, listed)
	}
}

// The account of the quota controller deletes what members write and writes the status of the ClusterSetConfig. It has no other
// right.
func TestRightsOfTheQuotaController(t *testing.T) {
	w := newTestbed(t, v1alpha1.Quotas{})
	c := newClient(t, w.token(v1alpha1.QuotaController))
	record, slice, aggregate := w.record("a", "web"), w.slice("a", "web", "x"), w.aggregate("a", "web")
	for _, obj := range []client.Object{record, slice, aggregate} {
		w.create(obj)
	}
	config := &v1alpha1.ClusterSetConfig{}
	w.noError(c.Get(t.Context(), client.ObjectKey{Namespace: w.namespace, Name: v1alpha1.ClusterSetConfigName}, config))
	for what, err := range map[string]error{
		"create a record":        c.Create(t.Context(), w.record("a", "new")),
		"create a slice":         c.Create(t.Context(), w.slice("a", "new", "x")),
		"create an aggregate":    c.Create(t.Context(), w.aggregate("a", "new")),
		"change a record":        c.Update(t.Context(), record),
		"change a slice":         c.Update(t.Context(), slice),
		"change an aggregate":    c.Update(t.Context(), aggregate),
		"change the settings":    c.Update(t.Context(), config),
		"read Secrets":           c.List(t.Context(), &corev1.SecretList{}, client.InNamespace(w.namespace)),
		"read registrations":     c.List(t.Context(), &v1alpha1.MemberList{}, client.InNamespace(w.namespace)),
		"renew another's Lease":  c.Get(t.Context(), client.ObjectKey{Namespace: w.namespace, Name: v1alpha1.MemberLease("a")}, &coordinationv1.Lease{}),
		"read another namespace": c.List(t.Context(), &v1alpha1.ExportRecordList{}, client.InNamespace("default")),
		"delete a collection":    c.DeleteAllOf(t.Context(), &v1alpha1.ExportRecord{}, client.InNamespace(w.namespace)),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("it may %s: %v", what, err)
		}
	}
	config.Status.OverQuota = []v1alpha1.OverQuota{{Member: "a", Kind: "slices", Used: 2, Limit: 1, Since: metav1.Now()}}
	w.noError(c.Status().Update(t.Context(), config))
	for _, obj := range []client.Object{record, slice, aggregate} {
		w.noError(c.Delete(t.Context(), obj))
	}
}
