package neutron_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/gophercloud/gophercloud/v2/openstack/loadbalancer/v2/listeners"
	"github.com/gophercloud/gophercloud/v2/openstack/loadbalancer/v2/loadbalancers"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"

	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia"
	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia/octaviatest"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// balancersOf checks that the real API of Octavia, with ports and floating IPs of the real Neutron, fulfils the contract that the
// fake fulfils in its own tests. No packets are balanced: the provider does nothing, and balancing.py sets the statuses that
// a provider would report.
func balancersOf(t *testing.T, cloud *neutron.Cloud, ids neutron.IDs) {
	t.Helper()
	begun := time.Now()
	balancing, err := cloud.Balancing(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	network := networkOf(t, cloud, neutron.User)
	check := func(t testing.TB, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	octaviatest.Contract(t, octaviatest.Cloud{
		Mine:    octavia.New(octavia.Config{Cloud: neutron.MachinesCredential, File: cloud.CloudsYAML(), Timeout: listTimeout}),
		Strange: octavia.New(octavia.Config{Cloud: neutron.Stranger, File: cloud.CloudsYAML(), Timeout: listTimeout}),
		Make: func(t testing.TB, name string, tags ...string) (string, netip.Addr) {
			t.Helper()
			b, err := loadbalancers.Create(t.Context(), balancing, loadbalancers.CreateOpts{Name: name, VipSubnetID: ids.Subnets[0], Tags: tags}).Extract()
			check(t, err)
			vip, err := netip.ParseAddr(b.VipAddress)
			check(t, err)
			return b.ID, vip
		},
		Listen: func(t testing.TB, balancer, name, protocol string, port int) {
			t.Helper()
			_, err := listeners.Create(t.Context(), balancing, listeners.CreateOpts{
				LoadbalancerID: balancer, Name: name, Protocol: listeners.Protocol(protocol), ProtocolPort: port,
			}).Extract()
			check(t, err)
		},
		Float: func(t testing.TB, balancer string) netip.Addr {
			t.Helper()
			b, err := loadbalancers.Get(t.Context(), balancing, balancer).Extract()
			check(t, err)
			f, err := floatingips.Create(t.Context(), network, floatingips.CreateOpts{FloatingNetworkID: ids.External, PortID: b.VipPortID}).Extract()
			check(t, err)
			addr, err := netip.ParseAddr(f.FloatingIP)
			check(t, err)
			return addr
		},
		Disable: func(t testing.TB, id string) {
			t.Helper()
			_, err := loadbalancers.Update(t.Context(), balancing, id, loadbalancers.UpdateOpts{AdminStateUp: new(false)}).Extract()
			check(t, err)
		},
		Delete: func(t testing.TB, id string) {
			t.Helper()
			check(t, loadbalancers.Delete(t.Context(), balancing, id, loadbalancers.DeleteOpts{Cascade: true}).ExtractErr())
		},
	})
	t.Logf("the contract of load balancers took %s", time.Since(begun).Round(time.Second/10))
}
