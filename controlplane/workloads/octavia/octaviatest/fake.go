package octaviatest

import (
	"fmt"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/workloads/internal/openstack/openstacktest"
)

// Object is an object of the cloud in its JSON form: https://docs.openstack.org/api-ref/load-balancer/v2/
type Object = openstacktest.Object

// Names of the lists, for Fake.FailList and Fake.Asked.
const (
	LoadBalancers = "loadbalancers"
	Listeners     = "listeners"
	FloatingIPs   = "floatingips"
)

// Fake is an in-memory Keystone, Octavia and Neutron. Its clouds.yaml has two projects: mine, which has the load balancers, and
// strange.
type Fake struct{ *openstacktest.Fake }

// NewFake starts a Fake that ends with the test. Its pages have two objects each.
func NewFake(t testing.TB) Fake {
	t.Helper()
	return Fake{openstacktest.NewFake(
		t,
		openstacktest.Service{
			Type: "load-balancer", Version: "2.26", Base: "load-balancer/",
			Lists: map[string]string{LoadBalancers: "v2.0/lbaas/loadbalancers", Listeners: "v2.0/lbaas/listeners"},
		},
		openstacktest.Service{Type: "network", Version: "2.0", Base: "network/", Lists: map[string]string{FloatingIPs: "v2.0/floatingips"}},
	)}
}

// Add adds a load balancer whose VIP is 10.9.0.N, with defaults for the fields that o does not set. Its VIP port is PORT-ID.
func (f Fake) Add(o Object) (id string) {
	return f.AddTo(LoadBalancers, func(n int) Object {
		id := fmt.Sprintf("balancer-%03d", n)
		return Object{
			"id": id, "name": "lb", "project_id": "mine", "created_at": "2026-01-02T03:04:05", "updated_at": nil, "admin_state_up": true,
			"provisioning_status": "ACTIVE", "operating_status": "ONLINE", "vip_address": fmt.Sprintf("10.9.0.%d", n), "vip_port_id": "port-" + id,
			"additional_vips": []Object{}, "listeners": []Object{}, "pools": []Object{}, "tags": []string{},
		}
	}, o)
}

// Listen adds a listener to a load balancer, with defaults for the fields that o does not set.
func (f Fake) Listen(balancer string, o Object) (id string) {
	return f.AddTo(Listeners, func(n int) Object {
		return Object{
			"id": fmt.Sprintf("listener-%03d", n), "name": "", "project_id": "mine", "admin_state_up": true, "provisioning_status": "ACTIVE",
			"operating_status": "ONLINE", "protocol": "TCP", "protocol_port": 80, "loadbalancers": []Object{{"id": balancer}},
		}
	}, o)
}

// Float adds a floating IP to the VIP port of a load balancer.
func (f Fake) Float(balancer, addr string) (id string) {
	return f.AddTo(FloatingIPs, func(n int) Object {
		return Object{"id": fmt.Sprintf("floating-%03d", n), "project_id": "mine", "floating_ip_address": addr, "port_id": "port-" + balancer}
	}, nil)
}
