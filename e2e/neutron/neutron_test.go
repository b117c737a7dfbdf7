package neutron_test

import (
	"context"
	"net/netip"
	"os"
	"testing"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"

	"github.com/isthmus-net/isthmus/e2e/neutron"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

func connect(t testing.TB, cloud *neutron.Cloud, as, cluster string) *openstack.Client {
	t.Helper()
	client, err := openstack.Connect(t.Context(), openstack.Config{Cloud: as, File: cloud.CloudsYAML(), Cluster: cluster})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// The real Neutron keeps the contract that the fake keeps in its own tests, and lives through a crash.
func TestNeutron(t *testing.T) {
	netlab.Privileged(t)
	cloud := neutron.Open(neutron.Config{Dir: t.TempDir(), Progress: t.Output()})
	t.Cleanup(func() {
		if err := cloud.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if err := cloud.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	ids, err := cloud.IDs()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("contract", func(t *testing.T) {
		openstacktest.Contract(t, openstacktest.Cloud{
			Connect: func(t testing.TB, cluster string) *openstack.Client {
				t.Helper()
				return connect(t, cloud, neutron.UserByCredential, cluster)
			},
			Network: ids.Network, Subnets: ids.Subnets[:], External: ids.External, Gateway: ids.Gateways[0].Port, Second: ids.Gateways[1].Port,
			GatewayAddrs: [2]netip.Addr{ids.Gateways[0].Addrs[0], ids.Gateways[1].Addrs[0]}, MaxPairs: 10,
			Discard: func(t testing.TB, id string) {
				t.Helper()
				admin, err := cloud.Networking(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := floatingips.Delete(t.Context(), admin, id).ExtractErr(); err != nil {
					t.Error(err)
				}
			},
		})
	})
	t.Run("crash", func(t *testing.T) {
		client := connect(t, cloud, neutron.User, "survivor")
		made, err := client.CreatePort(t.Context(), openstack.PortRequest{Network: ids.Network, Subnets: ids.Subnets[:], Purpose: "uid"})
		if err != nil {
			t.Fatal(err)
		}
		if err := cloud.Kill(t.Context(), neutron.Neutron); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Ports(t.Context()); err == nil {
			t.Error("a Neutron that was killed answers")
		}
		if err := cloud.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		if all, err := client.Ports(t.Context()); err != nil || len(all) != 1 || all[0].ID != made.ID {
			t.Errorf("ports %v, %v; want %s alone", all, err, made.ID)
		}
	})
	t.Run("a stranger sees nothing", func(t *testing.T) {
		if all, err := connect(t, cloud, neutron.Stranger, "survivor").Ports(t.Context()); err != nil || len(all) != 0 {
			t.Errorf("ports %v, %v", all, err)
		}
	})
}
