package workloads_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// balancer returns a load balancer of the Service front, which serves.
func balancer(id, addr string, listeners ...workloads.Listener) workloads.Resource {
	b := vm(id, addr, v1alpha1.MachineServiceAntrea+"=front", v1alpha1.AnnotationGlobalServiceAntreaTanzu+"=shop")
	b.Listeners = listeners
	return b
}

var (
	httpPort = workloads.Listener{Name: "http", Port: 80, Protocol: "TCP"}
	dnsPort  = workloads.Listener{Port: 53, Protocol: "UDP"}
	sctpPort = workloads.Listener{Name: "calls", Port: 5060, Protocol: "SCTP"}
)

// A Service has the listeners of its load balancers as ports. It stays without endpoints while they have no listeners, and is
// deleted with the last of them.
func TestServiceOfLoadBalancers(t *testing.T) {
	w := newTestbed(t)
	w.balancers = &cloud{servers: []workloads.Resource{balancer("1", "203.0.113.1")}}
	v, _ := w.run()
	await.True(t, "a load balancer without listeners is reported", func() bool {
		p := w.problems(v)
		return len(p) == 1 && strings.HasPrefix(p[0], "load balancer name-1 (1) of cloud east: no listener")
	})
	if w.service("front") != nil {
		t.Error("there is a Service without ports")
	}
	w.balancers.set(t, func(c *cloud) { c.servers[0] = balancer("1", "203.0.113.1", httpPort, sctpPort) })
	w.await("front", "203.0.113.1:80")
	if svc := w.service("front"); svc.Spec.Ports[0].Name != "http" || svc.Annotations[v1alpha1.AnnotationGlobalServiceAntreaTanzu] != "shop" {
		t.Errorf("ports %v, annotations %v", svc.Spec.Ports, svc.Annotations)
	}
	if p := w.problems(v); len(p) != 1 || !strings.Contains(p[0], `listener "calls" is left out: its protocol is SCTP`) {
		t.Errorf("problems %q", p)
	}
	w.balancers.set(t, func(c *cloud) {
		down := balancer("2", "203.0.113.2", httpPort)
		down.Running = false
		c.servers = []workloads.Resource{balancer("1", "203.0.113.1", httpPort, dnsPort), down}
	})
	w.await("front", "203.0.113.1:53", "203.0.113.1:80", "down 203.0.113.2:80")
	before := w.service("front")
	w.balancers.set(t, func(c *cloud) { c.servers = []workloads.Resource{balancer("1", "203.0.113.1")} })
	w.await("front")
	if after := w.service("front"); after.UID != before.UID || len(after.Spec.Ports) != 2 {
		t.Errorf("the Service without endpoints is another one, or has ports %v", after.Spec.Ports)
	}
	if s := v.State(); len(s.Clouds) != 1 || s.Clouds[0].LoadBalancers != 1 || s.Clouds[0].Servers != 0 {
		t.Errorf("state %+v", s)
	}
	w.balancers.set(t, func(c *cloud) { c.servers = nil })
	w.awaitGone("front")
	conformance.Holds(t, "F23")
}

// While Octavia is silent, its last list stays in effect, also for a process that has never read it, and the servers of the
// same cloud are followed. The same holds for load balancers while Nova is silent.
func TestSilentOctaviaAndSilentNova(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1")}
	w.balancers = &cloud{servers: []workloads.Resource{balancer("1", "203.0.113.1", httpPort)}}
	_, stop := w.run()
	w.await("web", "10.9.0.1:80")
	w.await("front", "203.0.113.1:80")
	_, before := w.endpoints("front")
	stop()
	silent := func(c *cloud) { c.silent, c.servers = true, nil }
	w.balancers.mu.Lock()
	silent(w.balancers)
	w.balancers.mu.Unlock()
	v, _ := w.run()
	w.cloud.set(t, func(c *cloud) { c.servers = []workloads.Resource{vm("2", "10.9.0.2")} })
	w.await("web", "10.9.0.2:80")
	if _, after := w.endpoints("front"); !slices.Equal(before, after) {
		t.Errorf("slices %v became %v", before, after)
	}
	if s := v.State(); len(s.Clouds) != 1 || s.Clouds[0].Err == nil || s.Clouds[0].Servers != 1 {
		t.Errorf("state %+v", s)
	}
	w.cloud.set(t, silent)
	w.balancers.set(t, func(c *cloud) {
		c.silent, c.servers = false, []workloads.Resource{balancer("1", "203.0.113.7", httpPort)}
	})
	w.await("front", "203.0.113.7:80")
	w.await("web", "10.9.0.2:80")
	w.balancers.set(t, func(c *cloud) { c.servers = nil })
	w.awaitGone("front")
}

// Servers and load balancers share a Service only if all of them chose its name.
func TestServersAndLoadBalancersOfOneName(t *testing.T) {
	w := newTestbed(t)
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1"), vm("2", "10.9.0.2", v1alpha1.MachineServiceAntrea+"=lb-9")}
	named, unnamed := balancer("8", "203.0.113.8", httpPort), balancer("9", "203.0.113.9", httpPort)
	named.Labels[v1alpha1.MachineServiceAntrea], unnamed.Labels[v1alpha1.MachineServiceAntrea] = "web", ""
	unnamed.Created = unnamed.Created.Add(-time.Second)
	w.balancers = &cloud{servers: []workloads.Resource{named, unnamed}}
	v, _ := w.run()
	w.await("web", "10.9.0.1:80", "203.0.113.8:80")
	await.True(t, "the younger owner is refused", func() bool {
		p := w.problems(v)
		return slices.ContainsFunc(p, func(p string) bool {
			return strings.HasPrefix(p, "server name-2 (2)") && strings.Contains(p, "is that of load balancer name-9 (9) of cloud east")
		})
	})
	w.await("lb-9", "203.0.113.9:80")
}
