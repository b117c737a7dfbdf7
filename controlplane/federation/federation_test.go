package federation_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/nova"
	"github.com/isthmus-net/isthmus/controlplane/workloads/nova/novatest"
	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia"
	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia/octaviatest"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// A federation of two supervisors and a child goes through leader changes, silence and new credentials.
func TestFederationLifecycle(t *testing.T) {
	w := newTestbed(t)
	_, stopA := w.supervise("a", "one")
	await.True(t, "a leads all members", func() bool {
		return !slices.ContainsFunc(ids, func(id clusterset.ClusterID) bool { return w.status("a", id).Leader != "a/one" })
	})
	b, _ := w.supervise("b", "two")
	w.offer("c", "web", "10.3.0.1", "10.3.0.2")
	w.awaitEverywhere("web", "10.3.0.1", "10.3.0.2")
	await.True(t, "b reports that too", func() bool {
		m := w.status("b", "c")
		return m.Reachable && m.Leader == "a/one" && m.Services == 1 && m.ClusterUID != ""
	})

	before := map[clusterset.ClusterID][]string{}
	for _, id := range ids {
		_, before[id] = w.federated(id, "web")
	}
	unchanged := func(since string) {
		t.Helper()
		for _, id := range ids {
			if _, after := w.federated(id, "web"); !slices.Equal(before[id], after) {
				t.Errorf("%s, in %s: %v became %v", since, id, before[id], after)
			}
		}
	}

	property := &about.ClusterProperty{}
	await.True(t, "the property has the value of the claim", func() bool {
		return w.admin["a"].Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, property) == nil && property.Spec.Value == "a"
	})
	property.Spec.Value = "x"
	if err := w.admin["a"].Update(t.Context(), property); err != nil {
		t.Fatal(err)
	}
	await.True(t, "a property that was created from a claim follows it", func() bool {
		return w.admin["a"].Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, property) == nil && property.Spec.Value == "a"
	})
	property.Labels, property.Spec.Value = nil, "x" // now it is a user's
	if err := w.admin["a"].Update(t.Context(), property); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the claim reports that the property differs", func() bool {
		id := claim(federationv1alpha1.ClaimID, "")
		return w.admin["a"].Get(t.Context(), client.ObjectKeyFromObject(id), id) == nil &&
			meta.IsStatusConditionFalse(id.Status.Conditions, federationv1alpha1.ConditionInStep) && id.Spec.Value == "a"
	})

	epoch := w.status("b", "c").Epoch
	stopA()
	await.True(t, "b leads all members in a later epoch", func() bool {
		for _, m := range b.State().Members {
			if !m.Leading || m.Epoch <= epoch {
				return false
			}
		}
		return true
	})
	w.offer("c", "late", "10.3.1.1")
	w.awaitEverywhere("late", "10.3.1.1") // so b works
	unchanged("a new leader")

	w.gates["b c"].Shut()
	await.True(t, "b notices that c is silent", func() bool { return !w.status("b", "c").Reachable })
	unchanged("c went silent")
	w.gates["b c"].Open()
	await.True(t, "c is back", func() bool { return w.status("b", "c").Reachable })

	writes, led := w.audit(), w.epochs()
	good := w.secret("b", "c")
	bad := good.DeepCopy()
	bad.Data[federationv1alpha1.SecretToken] = []byte("expired")
	w.update("b", bad)
	await.True(t, "b reports a refused token", func() bool {
		m := w.status("b", "c")
		return !m.Reachable && strings.Contains(m.Message, "token")
	})
	if err := w.admin["b"].Delete(t.Context(), bad); err != nil {
		t.Fatal(err)
	}
	await.True(t, "b reports the missing Secret", func() bool { return strings.Contains(w.status("b", "c").Message, "does not exist") })
	writes.take("without credentials", led)
	w.create("b", good)
	await.True(t, "b reaches c with the new token", func() bool { return w.status("b", "c").Reachable })
	w.awaitLeader("b/two", "c")
	writes.take("with the new token", led)
	unchanged("credentials came back")
}

// One cluster offers IPv4 addresses of a federated Service and another one IPv6 addresses. The Service leads to both in all
// clusters.
func TestDualStackService(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.offer("a", "web", "10.1.0.1")
	w.awaitEverywhere("web", "10.1.0.1")
	writes, before := w.audit(), w.epochs()
	w.offer("b", "web", "fd00:2::1")
	w.awaitEverywhere("web", "10.1.0.1", "fd00:2::1")
	want := []string{"a TOLD Service web", "a EVENT Federated of Service web", "b TOLD Service web", "b EVENT Federated of Service web"}
	for _, id := range ids {
		want = append(want, fmt.Sprintf("%s ADDED EndpointSlice web of b", id), fmt.Sprintf("%s MODIFIED Service web", id))
		svc := &corev1.Service{}
		await.True(t, "the Service has both families in "+string(id), func() bool {
			err := w.admin[id].Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "web"}, svc)
			return err == nil && slices.Equal(svc.Spec.IPFamilies, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}) && len(svc.Spec.ClusterIPs) == 2
		})
		var all discoveryv1.EndpointSliceList
		if err := w.admin[id].List(t.Context(), &all, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelServiceName: "web"}); err != nil {
			t.Fatal(err)
		}
		types := map[string]discoveryv1.AddressType{}
		for _, es := range all.Items {
			types[es.Labels[federationv1alpha1.MarkCluster]] = es.AddressType
		}
		if len(all.Items) != 2 || types["a"] != discoveryv1.AddressTypeIPv4 || types["b"] != discoveryv1.AddressTypeIPv6 {
			t.Errorf("%s has %d slices, of %v", id, len(all.Items), types)
		}
	}
	writes.take("for the second family", before, want...)
}

// A Nova server asks for a Service of its cluster and for a federated one by its metadata. The federated Service leads to
// it in all clusters: its endpoint comes with the server, is not ready while the server is stopped, and goes with it.
func TestFederatedCloudServer(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	cloud := novatest.NewFake(t)
	w.runWithCloud(workloads.Cloud{Servers: nova.New(nova.Config{Cloud: "mine", File: cloud.CloudsYAML(t)})})
	writes, before := w.audit(), w.epochs()
	server := cloud.Add(novatest.Object{
		"metadata":  map[string]string{federationv1alpha1.MachineServiceAntrea: "web", federationv1alpha1.AnnotationGlobalServiceAntreaTanzu: "shop"},
		"addresses": novatest.Object{"net": []novatest.Object{{"addr": "10.9.0.7", "OS-EXT-IPS:type": "fixed"}}},
	})
	w.awaitEverywhere("shop", "10.9.0.7")
	svc := &corev1.Service{}
	if err := w.admin["c"].Get(t.Context(), client.ObjectKey{Namespace: demo, Name: "web"}, svc); err != nil || svc.Annotations[federationv1alpha1.MarkVirtualMachines] == "" {
		t.Errorf("the Service of the server: %v, %v", svc.Annotations, err)
	}
	writes.take("for a server", before, append(w.written(watch.Added, "shop", "c", ids...), "c TOLD Service web", "c EVENT Federated of Service web")...)

	cloud.Set(server, "status", "SHUTOFF")
	ready := func(id clusterset.ClusterID) bool {
		var all discoveryv1.EndpointSliceList
		if err := w.admin[id].List(t.Context(), &all, client.InNamespace(namespace), client.MatchingLabels{discoveryv1.LabelServiceName: "shop"}); err != nil {
			t.Fatal(err)
		}
		return len(all.Items) != 1 || len(all.Items[0].Endpoints) != 1 || *all.Items[0].Endpoints[0].Conditions.Ready
	}
	await.True(t, "a stopped server is not ready", func() bool { return !slices.ContainsFunc(ids, ready) })
	writes.take("for a server that is stopped", before, "a MODIFIED EndpointSlice shop of c", "b MODIFIED EndpointSlice shop of c", "c MODIFIED EndpointSlice shop of c")

	cloud.Remove(server)
	w.awaitEverywhere("shop")
	writes.take("for a server that is gone", before, w.written(watch.Deleted, "shop", "c", ids...)...)
	conformance.Holds(t, "F22")
}

// A load balancer of Octavia asks by its tags, too. The federated Service leads to its floating IP, or to its VIP without one, at
// the port of its listener, in all clusters.
func TestFederatedLoadBalancer(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	cloud := octaviatest.NewFake(t)
	w.runWithCloud(workloads.Cloud{
		Servers:       nova.New(nova.Config{Cloud: "mine", File: novatest.NewFake(t).CloudsYAML(t)}),
		LoadBalancers: octavia.New(octavia.Config{Cloud: "mine", File: cloud.CloudsYAML(t)}),
	})
	writes, before := w.audit(), w.epochs()
	id := cloud.Add(octaviatest.Object{
		"vip_address": "10.9.0.8", "operating_status": "DEGRADED",
		"tags": []string{federationv1alpha1.MachineServiceAntrea + "=web", federationv1alpha1.AnnotationGlobalServiceAntreaTanzu + "=shop"},
	})
	cloud.Listen(id, octaviatest.Object{"name": "https", "protocol": "TERMINATED_HTTPS", "protocol_port": 443})
	w.awaitEverywhere("shop", "10.9.0.8")
	writes.take("for a load balancer", before, append(w.written(watch.Added, "shop", "c", ids...), "c TOLD Service web", "c EVENT Federated of Service web")...)
	svc := &corev1.Service{}
	err := w.admin["b"].Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "shop"}, svc)
	if err != nil || len(svc.Spec.Ports) != 1 || svc.Spec.Ports[0].Name != "https" || svc.Spec.Ports[0].Port != 443 {
		t.Errorf("ports %v, %v", svc.Spec.Ports, err)
	}

	cloud.Float(id, "203.0.113.8")
	w.awaitEverywhere("shop", "203.0.113.8")
	cloud.Remove(id)
	w.awaitEverywhere("shop")
	conformance.Holds(t, "F23")
}

// runWithCloud runs the controller of child c, which keeps Services of a cloud in namespace demo.
func (w *testbed) runWithCloud(cloud workloads.Cloud) {
	w.t.Helper()
	settings := workloads.Settings{Clouds: []workloads.CloudSettings{{
		Name: "mine", LoadBalancers: cloud.LoadBalancers != nil, Namespace: demo, Interval: metav1.Duration{Duration: time.Second},
	}}}
	if err := settings.Complete(); err != nil {
		w.t.Fatal(err)
	}
	machines, err := workloads.New(workloads.Config{Local: servers["c"].Config(w.t), Settings: settings, Log: w.log("c"), Clouds: map[string]workloads.Cloud{"mine": cloud}})
	if err != nil {
		w.t.Fatal(err)
	}
	cfg := configOf(servers["c"].Config(w.t), "vms", w.log("c"))
	cfg.Machines = machines.Run
	child, err := federation.New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.run(child)
}

// update writes a supervisor's Secret.
func (w *testbed) update(id clusterset.ClusterID, secret *corev1.Secret) {
	w.t.Helper()
	if err := w.admin[id].Update(w.t.Context(), secret); err != nil {
		w.t.Fatal(err)
	}
}
