package workloads_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

var server apitest.Server

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

// cloud is an in-memory list of a cloud's servers, or of its load balancers.
type cloud struct {
	mu      sync.Mutex
	silent  bool
	servers []workloads.Resource
	asked   int // how often it was
}

func (c *cloud) List(context.Context) ([]workloads.Resource, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
	if c.silent {
		return nil, errors.New("the cloud does not respond")
	}
	return slices.Clone(c.servers), nil
}

// set changes the cloud and waits until it was listed twice: the writes of the first list have begun by then.
func (c *cloud) set(t *testing.T, change func(*cloud)) {
	t.Helper()
	c.mu.Lock()
	change(c)
	asked := c.asked
	c.mu.Unlock()
	await.True(t, "the cloud is asked", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.asked >= asked+2
	})
}

// vm returns a running server of the Service web.
func vm(id string, addr string, labels ...string) workloads.Resource {
	s := workloads.Resource{ID: id, Name: "name-" + id, Running: true, Created: time.Unix(1, 0), Labels: map[string]string{v1alpha1.MachineServiceAntrea: "web"}}
	if addr != "" {
		s.Addrs = []netip.Addr{netip.MustParseAddr(addr)}
	}
	for _, l := range labels {
		key, value, _ := strings.Cut(l, "=")
		s.Labels[key] = value
	}
	return s
}

// testbed is a namespace and a cloud whose servers have their Services in it.
type testbed struct {
	client.Client

	t         *testing.T
	namespace string
	cloud     *cloud
	balancers *cloud // nil: the settings do not ask for load balancers
	enforcer  workloads.Enforcer
	groups    string // securityGroups of the settings
	nodes     bool   // externalNodes of the settings
	older     bool   // the controller's API server is one before Kubernetes 1.36
}

// before136 refuses Services whose names do not begin with a letter, as an older API server does.
type before136 struct{ http.RoundTripper }

func (s before136) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/services") {
		return s.RoundTripper.RoundTrip(r)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	name := digitName.FindString(string(body))
	if name == "" {
		return s.RoundTripper.RoundTrip(r)
	}
	refusal := apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), name, field.ErrorList{
		field.Invalid(field.NewPath("metadata", "name"), name, "a DNS-1035 label must start with an alphabetic character"),
	})
	refusal.ErrStatus.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	text, err := json.Marshal(refusal.ErrStatus)
	if err != nil {
		return nil, err
	}
	return &http.Response{
		StatusCode: http.StatusUnprocessableEntity, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(text)), Request: r,
	}, nil
}

// digitName matches the names of the tests that an older API server refuses, in the request's encoding.
var digitName = regexp.MustCompile(`9web|9db`)

func newTestbed(t *testing.T) *testbed {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(server.Config(t), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	fence(t, c)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "vms-"}}
	if err := c.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	return &testbed{Client: c, t: t, namespace: ns.Name, cloud: &cloud{}}
}

// account is the account of the controller.
const account = "system:serviceaccount:isthmus-system:isthmus-controller"

// fence gives the controller's account every right, and restricts it as every member cluster does.
func fence(t *testing.T, c client.Client) {
	t.Helper()
	wanted, err := fences.Policies("isthmus-system")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range append(wanted, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "controller"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: account}},
	}) {
		if err := c.Create(t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
}

// run runs a Controller until the returned function is called or the test ends.
func (w *testbed) run() (*workloads.Controller, func()) {
	w.t.Helper()
	of := workloads.Cloud{Servers: w.cloud, Enforcer: w.enforcer}
	if w.balancers != nil {
		of.LoadBalancers = w.balancers
	}
	settings := workloads.Settings{ExternalNodes: w.nodes, Clouds: []workloads.CloudSettings{{
		Name: "east", LoadBalancers: w.balancers != nil, Namespace: w.namespace, SecurityGroups: w.groups, Interval: metav1.Duration{Duration: time.Second},
	}}}
	if err := settings.Complete(); err != nil {
		w.t.Fatal(err)
	}
	settings.Clouds[0].Interval.Duration = 20 * time.Millisecond
	local := server.Config(w.t)
	local.Impersonate.UserName = account
	if w.older {
		local.Wrap(func(rt http.RoundTripper) http.RoundTripper { return before136{rt} })
	}
	v, err := workloads.New(workloads.Config{Local: local, Settings: settings, Clouds: map[string]workloads.Cloud{"east": of}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := v.Run(ctx); err != nil {
			w.t.Error(err)
		}
	})
	stop := func() { cancel(); running.Wait() }
	w.t.Cleanup(stop)
	return v, stop
}

// service returns a Service, nil if it does not exist.
func (w *testbed) service(name string) *corev1.Service {
	w.t.Helper()
	svc := &corev1.Service{}
	err := w.Get(w.t.Context(), client.ObjectKey{Namespace: w.namespace, Name: name}, svc)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return svc
}

// endpoints returns the endpoints of a Service, sorted: ADDRESS:PORT, with "down" before it if it is not ready. versions
// are the resource versions of its slices.
func (w *testbed) endpoints(name string) (all, versions []string) {
	w.t.Helper()
	var list discoveryv1.EndpointSliceList
	if err := w.List(w.t.Context(), &list, client.InNamespace(w.namespace), client.MatchingLabels{discoveryv1.LabelServiceName: name}); err != nil {
		w.t.Fatal(err)
	}
	for _, es := range list.Items {
		versions = append(versions, es.Name+" "+es.ResourceVersion)
		for _, e := range es.Endpoints {
			for _, p := range es.Ports {
				a := netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String()
				if !*e.Conditions.Ready {
					a = "down " + a
				}
				all = append(all, a)
			}
		}
	}
	slices.Sort(all)
	return all, versions
}

// await waits until a Service exists and leads to endpoints, or to none.
func (w *testbed) await(name string, endpoints ...string) {
	w.t.Helper()
	await.True(w.t, name+" leads to "+strings.Join(endpoints, ", "), func() bool {
		have, _ := w.endpoints(name)
		return slices.Equal(have, endpoints) && w.service(name) != nil
	})
}

// awaitGone waits until no object of a Service is left.
func (w *testbed) awaitGone(name string) {
	w.t.Helper()
	await.True(w.t, name+" is gone", func() bool {
		_, versions := w.endpoints(name)
		return len(versions) == 0 && w.service(name) == nil
	})
}

// create creates an object in the namespace.
func (w *testbed) create(o client.Object) {
	w.t.Helper()
	o.SetNamespace(w.namespace)
	if err := w.Create(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

// told returns the notes of our events on a Service. A slow API server writes events of its own.
func (w *testbed) told(name string) (notes []string) {
	w.t.Helper()
	var list eventsv1.EventList
	if err := w.List(w.t.Context(), &list, client.InNamespace(w.namespace)); err != nil {
		w.t.Fatal(err)
	}
	for _, e := range list.Items {
		if e.Regarding.Name == name && e.ReportingController == v1alpha1.ManagedByMachines {
			notes = append(notes, e.Reason)
		}
	}
	return notes
}

// offered returns the condition of an ExternalWorkload: its status and message.
func (w *testbed) offered(name string) (status metav1.ConditionStatus, message string) {
	w.t.Helper()
	o := &v1alpha1.ExternalWorkload{}
	if err := w.Get(w.t.Context(), client.ObjectKey{Namespace: w.namespace, Name: name}, o); err != nil {
		w.t.Fatal(err)
	}
	for _, c := range o.Status.Conditions {
		status, message = c.Status, c.Message
	}
	return status, message
}

// problems returns the problems of the machines of this testbed. Other testbeds share the API server.
func (w *testbed) problems(v *workloads.Controller) []string {
	return slices.DeleteFunc(v.State().Problems, func(p string) bool {
		return strings.HasPrefix(p, "externalworkload ") && !strings.HasPrefix(p, "externalworkload "+w.namespace+"/")
	})
}
