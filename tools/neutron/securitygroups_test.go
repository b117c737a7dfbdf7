package neutron_test

import (
	"testing"
	"time"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/groups"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"

	"github.com/isthmus-net/isthmus/controlplane/workloads/neutron/neutrontest"

	workloadsneutron "github.com/isthmus-net/isthmus/controlplane/workloads/neutron"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// securityGroupsOf checks that the real Neutron fulfils the contract that the fake fulfils in its own tests. The ports are not bound,
// so no packet is judged.
func securityGroupsOf(t *testing.T, cloud *neutron.Cloud, ids neutron.IDs) {
	t.Helper()
	begun := time.Now()
	network := networkOf(t, cloud, neutron.User)
	neutrontest.Contract(t, neutrontest.Cloud{
		Mine: workloadsneutron.New(workloadsneutron.Config{
			Cloud: neutron.SecurityGroupsCredential, File: cloud.CloudsYAML(), Timeout: listTimeout,
		}),
		Network: network,
		NewPort: func(t testing.TB, server string, groups ...string) string {
			t.Helper()
			p, err := ports.Create(t.Context(), network, ports.CreateOpts{NetworkID: ids.Network, DeviceID: server, SecurityGroups: &groups}).Extract()
			if err != nil {
				t.Fatal(err)
			}
			return p.ID
		},
		NewGroup: func(t testing.TB, name string) string {
			t.Helper()
			g, err := groups.Create(t.Context(), network, groups.CreateOpts{Name: name}).Extract()
			if err != nil {
				t.Fatal(err)
			}
			return g.ID
		},
	})
	t.Logf("the contract of security groups took %s", time.Since(begun).Round(time.Second/10))
}
