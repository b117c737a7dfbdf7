package workloads_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// A Service is created with the first server that asks for it, and deleted with the last.
func TestServiceOfServers(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1"), {ID: "0", Name: "asks for nothing", Running: true}}
	w.run()
	w.await("web", "10.9.0.1:80")
	svc := w.service("web")
	if svc.Annotations[v1alpha1.MarkVirtualMachines] == "" || len(svc.Spec.Selector) > 0 || svc.Spec.Ports[0].Port != 80 {
		t.Errorf("the Service: annotations %v, spec %+v", svc.Annotations, svc.Spec)
	}
	w.cloud.set(t, func(c *cloud) {
		stopped := vm("2", "10.9.0.2", v1alpha1.MachinePortsAntrea+"=http:8080,80=8000")
		stopped.Running = false
		c.servers = append(c.servers, stopped, vm("3", ""))
	})
	w.await("web", "10.9.0.1:80", "down 10.9.0.2:8000", "down 10.9.0.2:8080")
	w.cloud.set(t, func(c *cloud) { c.servers = []workloads.Resource{vm("3", "")} })
	w.await("web")
	w.cloud.set(t, func(c *cloud) { c.servers = nil })
	w.awaitGone("web")
	conformance.Holds(t, "F11")
}

// The last list of a silent cloud stays in effect, also for a process that has never read the cloud.
func TestSilentCloudRemovesNothing(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", v1alpha1.MachinePorts+"=http:80=8080")}
	_, stop := w.run()
	w.await("web", "10.9.0.1:8080")
	_, before := w.endpoints("web")
	silent := func(c *cloud) { c.silent, c.servers = true, nil }
	w.cloud.set(t, silent)
	stop()
	v, _ := w.run()
	w.cloud.set(t, silent)
	w.create(workload("db", "10.9.1.1"))
	w.create(behind("web", workload("other", "10.9.1.2")))
	w.await("db", "10.9.1.1:5432") // which is written after everything that goes
	w.await("web", "10.9.0.1:8080", "10.9.1.2:5432")
	if _, after := w.endpoints("web"); !slices.Contains(after, before[0]) {
		t.Errorf("slices %v became %v", before, after)
	}
	if ports := w.service("web").Spec.Ports; len(ports) != 2 || ports[0].Name != "http" {
		t.Errorf("ports %v", ports)
	}
	if s := v.State(); len(s.Clouds) != 1 || s.Clouds[0].Err == nil {
		t.Errorf("state %+v", s)
	}
	w.cloud.set(t, func(c *cloud) { c.silent = false })
	w.await("web", "10.9.1.2:5432")
}

// Neither a running nor a new process writes while nothing changes.
func TestUnchangedContentIsNotWritten(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("2", "10.9.0.2"), vm("1", "10.9.0.1", v1alpha1.AnnotationGlobalServiceAntreaTanzu+"=shop")}
	w.create(workload("db", "10.9.1.1"))
	_, stop := w.run()
	w.await("web", "10.9.0.1:80", "10.9.0.2:80")
	w.await("db", "10.9.1.1:5432")
	await.True(t, "the status", func() bool { status, _ := w.offered("db"); return status == metav1.ConditionTrue })
	versions := func() []string {
		_, web := w.endpoints("web")
		_, db := w.endpoints("db")
		return append(append(web, db...), w.service("web").ResourceVersion, w.service("db").ResourceVersion)
	}
	before := versions()
	w.cloud.set(t, func(c *cloud) { slices.Reverse(c.servers) })
	stop()
	w.run()
	w.create(workload("later", "10.9.1.2"))
	w.await("later", "10.9.1.2:5432")
	if diff := cmp.Diff(before, versions()); diff != "" {
		t.Error(diff)
	}
}

// A user's Service stays unchanged; its owner gets an event, and the machines report a problem.
func TestUsersServiceIsNotChanged(t *testing.T) {
	w := newTestbed(t)
	for _, name := range []string{"web", "db"} {
		w.create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 1}}}})
	}
	version := w.service("web").ResourceVersion
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1")}
	w.create(workload("db", "10.9.1.1"))
	v, _ := w.run()
	await.True(t, "both are told", func() bool {
		status, message := w.offered("db")
		return status == metav1.ConditionFalse && strings.Contains(message, "rename one of them") && len(w.told("db")) == 1 && len(w.told("web")) == 1
	})
	if p := w.problems(v); len(p) != 2 {
		t.Errorf("problems %q", p)
	}
	if _, slices := w.endpoints("web"); len(slices) > 0 || w.service("web").ResourceVersion != version {
		t.Errorf("it has slices %v and version %s, before %s", slices, w.service("web").ResourceVersion, version)
	}
	if err := w.Delete(t.Context(), w.service("db")); err != nil {
		t.Fatal(err)
	}
	w.await("db", "10.9.1.1:5432")
}

// A Service's name may begin with a digit.
func TestNameWithADigitFirst(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", v1alpha1.MachineServiceAntrea+"=9web")}
	w.create(workload("9db", "10.9.1.1"))
	w.run()
	w.await("9web", "10.9.0.1:80")
	w.await("9db", "10.9.1.1:5432")
}

// A cluster before Kubernetes 1.36 refuses a name that begins with a digit. The machines of that name report it, and the
// Services of others are not affected.
func TestRefusedNameIsReported(t *testing.T) {
	w := newTestbed(t)
	w.older = true
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", v1alpha1.MachineServiceAntrea+"=9web"), vm("2", "10.9.0.2")}
	w.create(workload("9db", "10.9.1.1"))
	w.create(workload("db", "10.9.1.2"))
	v, _ := w.run()
	w.await("web", "10.9.0.2:80")
	w.await("db", "10.9.1.2:5432")
	await.True(t, "the ExternalWorkload reports the refusal", func() bool {
		status, message := w.offered("9db")
		return status == metav1.ConditionFalse && strings.Contains(message, "this cluster refuses service "+w.namespace+"/9db") && strings.Contains(message, "metadata.name")
	})
	await.True(t, "so does the state, for both machines", func() bool {
		p := w.problems(v)
		return len(p) == 2 && strings.Contains(p[0], "9db") && strings.Contains(p[1], "server name-1 (1) of cloud east: this cluster refuses service "+w.namespace+"/9web")
	})
	await.True(t, "the others are offered", func() bool { status, _ := w.offered("db"); return status == metav1.ConditionTrue })
}

// Annotations for membership of a federated Service come from the machines and go with them. Annotations of users stay.
func TestAnnotationsOfAService(t *testing.T) {
	w := newTestbed(t)
	db := workload("db", "10.9.1.1")
	db.Annotations = map[string]string{v1alpha1.AnnotationGlobalService: "database", v1alpha1.AnnotationAskHostname: "true", "example.org/colour": "blue"}
	w.create(db)
	w.run()
	w.await("db", "10.9.1.1:5432")
	carried := func() map[string]string {
		all := map[string]string{}
		for _, key := range []string{v1alpha1.AnnotationGlobalService, v1alpha1.AnnotationAskHostname, v1alpha1.AnnotationServiceAntrea, "example.org/colour"} {
			if value, ok := w.service("db").Annotations[key]; ok {
				all[key] = value
			}
		}
		return all
	}
	if diff := cmp.Diff(map[string]string{v1alpha1.AnnotationGlobalService: "database", v1alpha1.AnnotationAskHostname: "true"}, carried()); diff != "" {
		t.Error(diff)
	}
	if err := w.Patch(t.Context(), w.service("db"), client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"svc.federated.antreaplus.vmware.com":"mine"}}}`))); err != nil {
		t.Fatal(err)
	}
	if err := w.Patch(t.Context(), db, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":null}}`))); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{v1alpha1.AnnotationServiceAntrea: "mine"}
	await.True(t, "they go", func() bool { return cmp.Equal(want, carried()) })
}

// A server whose metadata became invalid keeps the Service that it had.
func TestInvalidMetadataRemovesNothing(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1")}
	v, _ := w.run()
	w.await("web", "10.9.0.1:80")
	w.cloud.set(t, func(c *cloud) {
		c.servers = []workloads.Resource{vm("1", "10.9.0.7", v1alpha1.MachinePortsAntrea+"=many")}
	})
	w.await("web", "10.9.0.7:80")
	if p := w.problems(v); len(p) != 1 || !strings.Contains(p[0], `"many"`) {
		t.Errorf("problems %q", p)
	}
}

// workload returns an ExternalWorkload that serves 5432.
func workload(name string, addresses ...string) *v1alpha1.ExternalWorkload {
	return &v1alpha1.ExternalWorkload{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v1alpha1.ExternalWorkloadSpec{Addresses: addresses, Ports: []v1alpha1.ExternalPort{{Port: 5432}}},
	}
}

// behind makes a machine serve another Service.
func behind(service string, w *v1alpha1.ExternalWorkload) *v1alpha1.ExternalWorkload {
	w.Spec.Service = service
	return w
}
