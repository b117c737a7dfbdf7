package lighthouse_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/broker/lighthouse"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

const (
	brokerNS    = "isthmus-broker"
	submariner  = "submariner-k8s-broker"
	installNS   = "isthmus-system"
	shop        = "shop"
	timeScale   = 0.05
	silence     = time.Second // four renewals of a Lease
	agent       = "lighthouse-agent.submariner.io"
	ofNamespace = "lighthouse.submariner.io/sourceNamespace"
)

var brokerServer, serverA, serverB apitest.Server

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &brokerServer, &serverA, &serverB))
}

// world is a ClusterSet of Submariner of clusters a, b and c, and a broker of Isthmus beside its broker.
type world struct {
	*testing.T
	admin client.Client // of both brokers
	info  membership.BrokerInfo
}

func newWorld(t *testing.T) *world {
	t.Helper()
	cfg := brokerServer.Config(t)
	w := &world{T: t, admin: newClient(t, cfg)}
	definition := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "clusters.submariner.io"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "submariner.io", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "clusters", Singular: "cluster", Kind: "Cluster", ListKind: "ClusterList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: new(true)}},
			}},
		},
	}
	w.create(w.admin, definition, namespace(submariner))
	t.Cleanup(func() { w.noError(w.admin.Delete(context.WithoutCancel(t.Context()), definition)) })
	for i, id := range []string{"a", "b", "c"} {
		u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
			"cluster_id": id, "cluster_cidr": []any{fmt.Sprintf("10.%d.0.0/16", i+1)}, "service_cidr": []any{serviceCIDRs[id]}, "global_cidr": []any{},
		}}}
		u.SetAPIVersion("submariner.io/v1")
		u.SetKind("Cluster")
		u.SetNamespace(submariner)
		u.SetName(id)
		w.eventually(func() error { return client.IgnoreAlreadyExists(w.admin.Create(t.Context(), u.DeepCopy())) })
	}
	d, err := membership.DeployBroker(t.Context(), w.admin, membership.Broker{
		Namespace: brokerNS, Server: cfg.Host, CA: cfg.CAData, TokenTTL: time.Hour,
		Settings: v1alpha1.Settings{Profile: "lighthouse", Endpoints: "service-vip"},
	})
	w.noError(err)
	w.info = d.Info
	return w
}

// serviceCIDRs are those of the API servers of a and b, and of c, which has none.
var serviceCIDRs = map[string]string{"a": "10.96.0.0/16", "b": "10.196.0.0/16", "c": "10.200.0.0/16"}

func init() {
	serverA.ServiceCIDRs = cidrs(serviceCIDRs["a"])
	serverB.ServiceCIDRs = cidrs(serviceCIDRs["b"])
}

func (w *world) noError(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) create(c client.Client, objs ...client.Object) {
	w.Helper()
	for _, obj := range objs {
		w.noError(c.Create(w.Context(), obj))
	}
}

func (w *world) eventually(check func() error) {
	w.Helper()
	await.NoError(w.T, "the expected state", check)
}

// bridge runs the bridge with its rights until the end of the test.
func (w *world) bridge(ids ...clusterset.ClusterID) {
	w.Helper()
	bridged, err := membership.DeployLighthouseBridge(w.Context(), w.admin, membership.LighthouseBridge{Namespace: brokerNS, Lighthouse: submariner, Clusters: ids, Silence: silence})
	w.noError(err)
	for _, b := range bridged {
		w.Log("the bridge acts for", b.Member.Name, b.Again, b.Notes)
	}
	if len(ids) > 0 {
		return
	}
	token, _, err := admin.RequestToken(w.Context(), w.admin, types.NamespacedName{Namespace: brokerNS, Name: v1alpha1.LighthouseBridge}, time.Hour, "")
	w.noError(err)
	cfg := rest.AnonymousClientConfig(brokerServer.Config(w.T))
	cfg.BearerToken = token
	b, err := lighthouse.New(lighthouse.Config{REST: cfg, Namespace: brokerNS, Lighthouse: submariner, Settings: broker.Settings{TimeScale: timeScale}, Log: slog.New(slog.DiscardHandler)})
	w.noError(err)
	w.background("bridge", b.Run)
}

// background runs something until the end of the test, or until the result is called.
func (w *world) background(what string, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.Errorf("%s: %v", what, err)
		}
	})
	w.Cleanup(stop)
	return stop
}

// cluster is one cluster with Service shop/hello.
type cluster struct {
	client.Client

	w       *world
	id      string
	server  *apitest.Server // nil for c
	address string          // of the Service
	stop    func()          // the controller of Isthmus
}

// newCluster returns a cluster that runs Lighthouse, which has exported shop/hello at a time.
func (w *world) newCluster(id string, server *apitest.Server, at time.Time) *cluster {
	w.Helper()
	c := &cluster{w: w, id: id, server: server, address: strings.TrimSuffix(serviceCIDRs[id], "0.0/16") + "7.7"}
	if server != nil {
		c.Client = newClient(w.T, server.Config(w.T))
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "hello"},
			Spec:       corev1.ServiceSpec{ClusterIP: c.address, Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		}
		w.create(c, namespace(shop), svc)
		es := slice("hello-1", map[string]string{discoveryv1.LabelServiceName: "hello"}, "10."+strconv.Itoa(int(id[0]-'a')+1)+".0.1", 8080, true)
		es.Namespace = shop
		imported := &v1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: shop, Name: "hello", // as its Lighthouse has imported it
				Annotations: map[string]string{"timestamp.submariner.io/" + id: "1", v1alpha1.AnnotationUseClusterSetIP: "false"},
			},
			Spec: v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, Ports: []v1beta1.ServicePort{}},
		}
		synced := slice("hello-x7", c.labels(), c.address, 80, true)
		synced.Namespace = shop
		if id == "b" {
			imported.Annotations = nil // as before version 0.19
		}
		w.create(c, es, imported, synced)
	}
	c.lighthouseExports(at, true)
	return c
}

// lighthouseExports writes what the Lighthouse of the cluster writes to Submariner's broker for a ServiceExport of an age: first the
// aggregate, then the slice, then the ports of the aggregate.
func (c *cluster) lighthouseExports(at time.Time, ready bool) {
	w := c.w
	w.Helper()
	key := client.ObjectKey{Namespace: submariner, Name: "hello-shop"}
	w.eventually(func() error {
		si := &v1beta1.ServiceImport{}
		err := w.admin.Get(w.Context(), key, si)
		if apierrors.IsNotFound(err) {
			si = &v1beta1.ServiceImport{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: submariner, Name: key.Name,
					Annotations: map[string]string{v1beta1.LabelServiceName: "hello", ofNamespace: shop, v1alpha1.AnnotationUseClusterSetIP: "false"},
				},
				Spec: v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, Ports: []v1beta1.ServicePort{}, SessionAffinity: corev1.ServiceAffinityNone},
			}
			err = w.admin.Create(w.Context(), si)
		}
		if err != nil {
			return err
		}
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, "timestamp.submariner.io/"+c.id, strconv.FormatInt(at.UnixNano(), 10))
		si.Spec.Ports = []v1beta1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}}
		if err := w.admin.Update(w.Context(), si); err != nil {
			return err
		}
		if !slices.ContainsFunc(si.Status.Clusters, func(s v1beta1.ClusterStatus) bool { return s.Cluster == c.id }) {
			si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: c.id})
		}
		return w.admin.Status().Update(w.Context(), si)
	})
	es := slice("hello-"+c.id+"x7", c.labels(), c.address, 80, ready)
	es.Namespace = submariner
	if err := w.admin.Create(w.Context(), es); apierrors.IsAlreadyExists(err) {
		w.noError(w.admin.Update(w.Context(), es))
	} else {
		w.noError(err)
	}
}

func (c *cluster) labels() map[string]string {
	return map[string]string{
		discoveryv1.LabelManagedBy: agent, ofNamespace: shop, v1beta1.LabelServiceName: "hello", v1beta1.LabelSourceCluster: c.id,
		"lighthouse.submariner.io/is-headless": "false",
	}
}

// join makes the cluster a member of Isthmus, and runs its controller.
func (c *cluster) join() {
	w := c.w
	w.Helper()
	invitation, err := membership.Invite(w.Context(), w.admin, membership.Invitation{Namespace: brokerNS, ClusterID: clusterset.ClusterID(c.id), TTL: time.Hour, Server: w.info.Server, CA: w.info.CA})
	w.noError(err)
	_, err = membership.Join(w.Context(), newClient(w.T, invitation.RESTConfig()), c.Client, membership.Request{
		Broker: invitation, Namespace: installNS,
		Addresses: membership.Addresses{Pods: cidrs("10." + strconv.Itoa(int(c.id[0]-'a')+1) + ".0.0/16"), Services: cidrs(serviceCIDRs[c.id])},
	})
	w.noError(err)
	w.create(c, &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "hello"}})
	secret := &corev1.Secret{}
	w.noError(c.Get(w.Context(), client.ObjectKey{Namespace: installNS, Name: v1alpha1.BrokerSecret}, secret))
	remote := rest.AnonymousClientConfig(brokerServer.Config(w.T))
	remote.BearerToken = string(secret.Data[v1alpha1.BrokerSecretToken])
	controller, err := broker.New(w.Context(), broker.Config{
		Local: c.server.Config(w.T), Namespace: installNS, Broker: remote, BrokerNamespace: brokerNS, Settings: broker.Settings{TimeScale: timeScale}, Log: slog.New(slog.DiscardHandler),
	})
	w.noError(err)
	c.stop = w.background("controller of "+c.id, controller.Run)
	adopted, err := membership.AdoptImports(w.Context(), c)
	w.noError(err)
	if len(adopted) != 1 || adopted[0].String() != shop+"/hello" {
		w.Errorf("%s takes over %v", c.id, adopted)
	}
}

// imports returns the ready addresses of shop/hello that the cluster has imported by Isthmus.
func (c *cluster) imports(ctx context.Context) (string, error) {
	return ready(ctx, c, shop, client.MatchingLabels{v1beta1.LabelServiceName: "hello", discoveryv1.LabelManagedBy: v1alpha1.ManagedBy})
}

// conflict returns the status of the condition Conflict of the cluster's export, whose Service is the same everywhere.
func (c *cluster) conflict(ctx context.Context) (string, error) {
	export := &v1beta1.ServiceExport{}
	err := c.Get(ctx, client.ObjectKey{Namespace: shop, Name: "hello"}, export)
	if condition := meta.FindStatusCondition(export.Status.Conditions, string(v1beta1.ServiceExportConditionConflict)); condition != nil {
		return string(condition.Status), err
	}
	return "", err
}

// lighthouseAnswers returns the addresses with which the name servers of Lighthouse answer for shop/hello: the first one of each cluster
// whose slice is ready, if there is an aggregate.
func (w *world) lighthouseAnswers(ctx context.Context) (string, error) {
	if err := w.admin.Get(ctx, client.ObjectKey{Namespace: submariner, Name: "hello-shop"}, &v1beta1.ServiceImport{}); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	return ready(ctx, w.admin, submariner, client.MatchingLabels{v1beta1.LabelServiceName: "hello", ofNamespace: shop, discoveryv1.LabelManagedBy: agent})
}

func ready(ctx context.Context, c client.Reader, namespace string, labels client.MatchingLabels) (string, error) {
	var list discoveryv1.EndpointSliceList
	if err := c.List(ctx, &list, client.InNamespace(namespace), labels); err != nil {
		return "", err
	}
	var all []string
	for _, es := range list.Items {
		for _, e := range es.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				all = append(all, e.Addresses[0])
			}
		}
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), " "), nil
}

// ask asks ten times a second until the result is called, and reports each answer that is none of right.
func (w *world) ask(who string, question func(context.Context) (string, error), right string) (stop func()) {
	asked := 0
	end := w.background("questions of "+who, func(ctx context.Context) error {
		for tick := time.NewTicker(100 * time.Millisecond); ; asked++ {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			if answer, err := question(ctx); ctx.Err() == nil && (err != nil || answer != right) {
				return fmt.Errorf("question %d is answered with %q, %v; want %q", asked, answer, err, right) //nolint:errorlint // it may be nil
			}
		}
	})
	return func() {
		end()
		w.Logf("%s: %d questions", who, asked)
	}
}

func (w *world) becomes(question func(context.Context) (string, error), want string) {
	w.Helper()
	w.eventually(func() error {
		have, err := question(w.Context())
		if have != want {
			return fmt.Errorf("the answer is %q, %v; want %q", have, err, want) //nolint:errorlint // it may be nil
		}
		return err
	})
}

// A ClusterSet of Submariner moves over. Cluster a joins, then b, and a goes back; c runs Lighthouse throughout. Each cluster always
// gets the addresses of all three.
func TestMoveAndBack(t *testing.T) {
	w := newWorld(t)
	long := time.Now().Add(-time.Hour)
	a, b, c := w.newCluster("a", &serverA, long), w.newCluster("b", &serverB, long.Add(time.Minute)), w.newCluster("c", nil, long.Add(2*time.Minute))
	all := sorted(a, b, c)
	stopOld := w.ask("c", w.lighthouseAnswers, all)

	w.bridge()
	a.join()
	w.becomes(a.imports, all)
	w.becomes(a.conflict, string(metav1.ConditionFalse))
	stopNew := w.ask("a", a.imports, all)
	b.join()
	w.becomes(b.imports, all)
	stopB := w.ask("b", b.imports, all)
	w.settle()
	stopOld()
	stopNew()
	stopB()

	// The others see changes in a cluster of either kind.
	c.lighthouseExports(long.Add(2*time.Minute), false)
	for _, question := range []func(context.Context) (string, error){a.imports, b.imports, w.lighthouseAnswers} {
		w.becomes(question, sorted(a, b))
	}
	c.lighthouseExports(long.Add(2*time.Minute), true)
	a.setReady(false)
	for _, question := range []func(context.Context) (string, error){a.imports, b.imports, w.lighthouseAnswers} {
		w.becomes(question, sorted(b, c))
	}
	a.setReady(true)
	for _, question := range []func(context.Context) (string, error){a.imports, b.imports, w.lighthouseAnswers} {
		w.becomes(question, all)
	}

	w.headless(a)
	stopOld, stopB = w.ask("c", w.lighthouseAnswers, all), w.ask("b", b.imports, all)
	_, err := membership.DeployLighthouseBridge(t.Context(), w.admin, membership.LighthouseBridge{Namespace: brokerNS, Lighthouse: submariner, Clusters: []clusterset.ClusterID{"a"}, Silence: silence})
	if err == nil || !strings.Contains(err.Error(), "cluster a: its isthmus-controller still runs") {
		t.Errorf("while the controller of a runs: %v", err)
	}
	a.stop()
	w.bridge("a")
	w.settle()
	a.lighthouseExports(long, true) // a's Lighthouse runs again
	w.settle()
	stopOld()
	stopB()
	a.lighthouseExports(long, false)
	for _, question := range []func(context.Context) (string, error){b.imports, w.lighthouseAnswers} {
		w.becomes(question, sorted(b, c))
	}
	if err := membership.RemoveLighthouseBridge(t.Context(), w.admin, brokerNS, submariner); err == nil || !strings.Contains(err.Error(), "clusters a, c still run Lighthouse") {
		t.Errorf("the bridge of a and c is removed: %v", err)
	}
	conformance.Holds(t, "L76")
}

// Headless Services have their pods' addresses and names on both sides, and vanish when they are unexported.
func (w *world) headless(a *cluster) {
	w.Helper()
	labels := map[string]string{
		discoveryv1.LabelManagedBy: agent, ofNamespace: shop, v1beta1.LabelServiceName: "db", v1beta1.LabelSourceCluster: "c",
		"lighthouse.submariner.io/is-headless": "true", "lighthouse.submariner.io/source-name": "db-1",
	}
	db := slice("db-c8", labels, "10.3.0.9", 5432, true)
	db.Namespace, db.Endpoints[0].Hostname = submariner, new("db-0")
	aggregate := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: submariner, Name: "db-shop",
			Annotations: map[string]string{v1beta1.LabelServiceName: "db", ofNamespace: shop, "timestamp.submariner.io/c": "1700000000000000000"},
		},
		Spec: v1beta1.ServiceImportSpec{Type: v1beta1.Headless, Ports: []v1beta1.ServicePort{}},
	}
	w.create(w.admin, aggregate)
	aggregate.Status.Clusters = []v1beta1.ClusterStatus{{Cluster: "c"}}
	w.noError(w.admin.Status().Update(w.Context(), aggregate))
	w.create(w.admin, db)
	imported := func() ([]discoveryv1.EndpointSlice, error) {
		var list discoveryv1.EndpointSliceList
		err := a.List(w.Context(), &list, client.InNamespace(shop), client.MatchingLabels{v1beta1.LabelServiceName: "db"})
		return list.Items, err
	}
	w.eventually(func() error {
		all, err := imported()
		if err != nil || len(all) != 1 || len(all[0].Endpoints) != 1 || all[0].Endpoints[0].Addresses[0] != "10.3.0.9" || *all[0].Endpoints[0].Hostname != "db-0" {
			return fmt.Errorf("imported db as %+v, %w", all, err)
		}
		return nil
	})
	// An older Lighthouse deletes aggregates by mistake; what is exported has slices.
	w.noError(w.admin.Delete(w.Context(), aggregate))
	w.settle()
	if all, err := imported(); err != nil || len(all) != 1 {
		w.Errorf("imported db as %+v without an aggregate, %v", all, err)
	}
	w.noError(w.admin.Delete(w.Context(), db))
	w.eventually(func() error {
		if all, err := imported(); err != nil || len(all) > 0 {
			return fmt.Errorf("imported db as %+v, %w", all, err)
		}
		return nil
	})

	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "queue"}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Name: "amqp", Port: 5672}}}}
	pods := slice("queue-1", map[string]string{discoveryv1.LabelServiceName: "queue", corev1.IsHeadlessService: ""}, "10.1.0.8", 5672, true)
	pods.Namespace, pods.Endpoints[0].Hostname = shop, new("queue-0")
	export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "queue"}}
	w.create(a, svc, pods, export)
	w.eventually(func() error {
		si, all, err := w.ofSubmariner("queue")
		if err != nil || si.Spec.Type != v1beta1.Headless || len(si.Status.Clusters) != 1 || si.Status.Clusters[0].Cluster != "a" ||
			len(all) != 1 || all[0].Labels["lighthouse.submariner.io/is-headless"] != "true" || all[0].Labels[v1beta1.LabelSourceCluster] != "a" ||
			len(all[0].Endpoints) != 1 || all[0].Endpoints[0].Addresses[0] != "10.1.0.8" || *all[0].Endpoints[0].Hostname != "queue-0" {
			return fmt.Errorf("Lighthouse sees queue as %+v, %+v, %w", si, all, err)
		}
		return nil
	})
	w.noError(a.Delete(w.Context(), export))
	w.eventually(func() error {
		if si, all, err := w.ofSubmariner("queue"); err != nil || si.Name != "" || len(all) > 0 {
			return fmt.Errorf("Lighthouse sees queue as %+v, %+v, %w", si, all, err)
		}
		return nil
	})
}

// ofSubmariner returns the objects of a Service on Submariner's broker; an empty aggregate without one.
func (w *world) ofSubmariner(service string) (*v1beta1.ServiceImport, []discoveryv1.EndpointSlice, error) {
	si := &v1beta1.ServiceImport{}
	err := client.IgnoreNotFound(w.admin.Get(w.Context(), client.ObjectKey{Namespace: submariner, Name: service + "-" + shop}, si))
	var list discoveryv1.EndpointSliceList
	listed := w.admin.List(w.Context(), &list, client.InNamespace(submariner), client.MatchingLabels{v1beta1.LabelServiceName: service, ofNamespace: shop})
	return si, list.Items, errors.Join(err, listed)
}

// sorted returns the addresses of clusters as the questions do.
func sorted(clusters ...*cluster) string {
	var all []string
	for _, c := range clusters {
		all = append(all, c.address)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// settle waits for what the controllers may still do.
func (w *world) settle() { <-time.After(2 * time.Second) }

// setReady makes the only pod of the Service ready or not.
func (c *cluster) setReady(ready bool) {
	c.w.Helper()
	es := &discoveryv1.EndpointSlice{}
	c.w.noError(c.Get(c.w.Context(), client.ObjectKey{Namespace: shop, Name: "hello-1"}, es))
	es.Endpoints[0].Conditions.Ready = &ready
	c.w.noError(c.Update(c.w.Context(), es))
}

func slice(name string, labels map[string]string, address string, port int32, ready bool) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		Ports:     []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: &port}},
	}
}

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func cidrs(texts ...string) []netip.Prefix {
	all := make([]netip.Prefix, len(texts))
	for i, text := range texts {
		all[i] = netip.MustParsePrefix(text)
	}
	return all
}

func newClient(t testing.TB, cfg *rest.Config) client.Client {
	t.Helper()
	scheme, err := membership.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
