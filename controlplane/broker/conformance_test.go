package broker_test

// Helpers of the scenarios of docs/conformance. Each test marks its lines by conformance.Holds.

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// both are the members of a testbed.
func (w *testbed) both() []*member { return []*member{w.a, w.b} }

// onBoth is the import of a Service of harness defaults as both members export it.
var onBoth = expect{
	typ: v1beta1.ClusterSetIP, ips: 1, clusters: []string{"a", "b"},
	ports: []string{"http/80"}, endpoints: []string{"10.97.0.1:8080", "10.98.0.1:8080"},
}

// edit changes an object of c as its user would, again when somebody else was first.
func edit[T client.Object](w *testbed, c client.Client, obj T, change func(T)) {
	w.t.Helper()
	w.eventually(func() error {
		w.noError(c.Get(w.t.Context(), client.ObjectKeyFromObject(obj), obj))
		change(obj)
		err := c.Update(w.t.Context(), obj)
		if err != nil && !apierrors.IsConflict(err) {
			w.t.Fatal(err)
		}
		return err
	})
}

// statusOf is c with its updates going to the status of objects.
func statusOf(c client.Client) client.Client { return statusClient{c} }

type statusClient struct{ client.Client }

func (c statusClient) Update(ctx context.Context, obj client.Object, _ ...client.UpdateOption) error {
	return c.Status().Update(ctx, obj)
}

// read returns a Service.
func (m *member) read(name string) *corev1.Service {
	m.testbed.t.Helper()
	svc := &corev1.Service{}
	m.testbed.noError(m.Get(m.testbed.t.Context(), client.ObjectKey{Namespace: m.testbed.ns, Name: name}, svc))
	return svc
}

func (m *member) editService(name string, change func(*corev1.Service)) {
	m.testbed.t.Helper()
	edit(m.testbed, m.Client, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}, change)
}

func (m *member) editExport(name string, change func(*v1beta1.ServiceExport)) {
	m.testbed.t.Helper()
	edit(m.testbed, m.Client, &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}, change)
}

// deleteService deletes a Service and its EndpointSlices, as a cluster's own controllers would.
func (m *member) deleteService(name string) {
	t := m.testbed.t
	t.Helper()
	m.testbed.noError(m.Delete(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}))
	m.testbed.noError(m.DeleteAllOf(t.Context(), &discoveryv1.EndpointSlice{}, client.InNamespace(m.testbed.ns),
		client.MatchingLabels{discoveryv1.LabelServiceName: name}))
}

// address is that of the endpoint that member.slice writes, without its port.
func (m *member) address(host int) string { return fmt.Sprintf("10.%d.0.%d", m.id[0], host) }

// admin returns a configuration of m's API server that no test tampers with.
func (m *member) admin() *rest.Config {
	m.testbed.t.Helper()
	if m.id[0] == 'a' {
		return m.testbed.serverSet.a.Config(m.testbed.t)
	}
	return m.testbed.serverSet.b.Config(m.testbed.t)
}

// keeps watches m's import of a Service until the caller calls the returned function, which fails the test if one of
// addresses ever was in no imported slice.
func (m *member) keeps(name string, addresses ...string) (enough func()) {
	w := m.testbed
	w.t.Helper()
	c, err := client.NewWithWatch(m.admin(), client.Options{Scheme: scheme})
	w.noError(err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	options := []client.ListOption{client.InNamespace(w.ns), client.MatchingLabels{v1beta1.LabelServiceName: name}}
	var list discoveryv1.EndpointSliceList
	w.noError(c.List(ctx, &list, options...))
	held := map[string][]string{} // addresses by slice
	for i := range list.Items {
		held[list.Items[i].Name] = addressesOf(&list.Items[i])
	}
	changes, err := c.Watch(ctx, &list, append(options, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})...)
	w.noError(err)
	lost := make(chan string, 1)
	go func() {
		defer close(lost)
		first := lostOf(addresses, held, "at first")
		for e := range changes.ResultChan() {
			es, ok := e.Object.(*discoveryv1.EndpointSlice)
			if !ok || first != "" {
				continue
			}
			held[es.Name] = addressesOf(es)
			if e.Type == watch.Deleted {
				delete(held, es.Name)
			}
			first = lostOf(addresses, held, fmt.Sprintf("after %s of %s", strings.ToLower(string(e.Type)), es.Name))
		}
		lost <- first
	}()
	enough = sync.OnceFunc(func() {
		w.t.Helper()
		changes.Stop()
		cancel()
		if said := <-lost; said != "" {
			w.t.Errorf("import of %s in %s: %s", name, m.id, said)
		}
	})
	w.t.Cleanup(enough)
	return enough
}

// lostOf returns the address of addresses that no slice has; "" if there is none.
func lostOf(addresses []string, held map[string][]string, when string) string {
	all := slices.Concat(slices.Collect(maps.Values(held))...)
	for _, a := range addresses {
		if !slices.Contains(all, a) {
			return fmt.Sprintf("%s is gone %s", a, when)
		}
	}
	return ""
}

func addressesOf(es *discoveryv1.EndpointSlice) []string {
	var all []string
	for _, e := range es.Endpoints {
		all = append(all, e.Addresses...)
	}
	return all
}

// eventsOn returns the reasons of the events about m's export of a Service, oldest first.
func (m *member) eventsOn(name string) []string {
	m.testbed.t.Helper()
	return m.eventsAbout(v1beta1.ServiceExportKindName, name)
}

// eventsAbout returns the reasons of the events on an object of m, oldest first.
func (m *member) eventsAbout(kind, name string) []string {
	m.testbed.t.Helper()
	var list corev1.EventList
	m.testbed.noError(m.List(m.testbed.t.Context(), &list, client.InNamespace(m.testbed.ns)))
	slices.SortStableFunc(list.Items, func(x, y corev1.Event) int { return x.CreationTimestamp.Compare(y.CreationTimestamp.Time) })
	var reasons []string
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name {
			reasons = append(reasons, e.Reason)
		}
	}
	return reasons
}

// twoAddresses gives each member a block with two addresses to give.
func twoAddresses(m *v1alpha1.MemberSpec) {
	m.ClusterSetIPCIDR = []string{map[string]string{"a": "243.10.3.0/30", "b": "243.20.3.0/30"}[m.ClusterID]}
}

// importReady waits until the condition Ready of m's import has a status and reason, and returns its message.
func (m *member) importReady(name string, status metav1.ConditionStatus, reason string) string {
	m.testbed.t.Helper()
	var message string
	m.testbed.eventually(func() error {
		si, _ := m.imported(name)
		if si == nil {
			return fmt.Errorf("%s has no import %s", m.id, name)
		}
		c := meta.FindStatusCondition(si.Status.Conditions, string(v1beta1.ServiceImportConditionReady))
		if c == nil || c.Status != status || c.Reason != reason {
			return fmt.Errorf("import %s in %s: condition Ready is %+v, want %s %s", name, m.id, c, status, reason)
		}
		message = c.Message
		return nil
	})
	return message
}
