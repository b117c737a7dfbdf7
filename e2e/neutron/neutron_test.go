package neutron_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/go-logr/logr"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/e2e/neutron"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// fullLength adds what takes an hour.
var fullLength = os.Getenv("ISTHMUS_FULL_LENGTH") != ""

// servers are those of two clusters in one project.
var servers [2]apitest.Server

// withServers runs the tests beside them, where there are tests that need them.
type withServers struct{ *testing.M }

func (m withServers) Run() int {
	if !fullLength {
		return m.M.Run()
	}
	klog.SetLogger(logr.Discard()) // controllers that are killed complain a lot
	ctrl.SetLogger(logr.Discard())
	if err := routed(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return apitest.Run(m.M, &servers[0], &servers[1])
}

// routed gives the tests' network a default route, which leads nowhere: an API server does not start without one.
func routed() error {
	if os.Geteuid() != 0 {
		return nil
	}
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "nowhere"}, PeerName: "nobody"}
	if err := errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link)); err != nil {
		return fmt.Errorf("make a device: %w", err)
	}
	addr, err := netlink.ParseAddr("192.0.2.1/24")
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(link, addr), netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Gw: net.IPv4(192, 0, 2, 254)}))
}

func TestMain(m *testing.M) { os.Exit(netlab.Main(withServers{m})) }

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
	cloud := neutron.Open(neutron.Config{Dir: t.TempDir(), Compute: true, Progress: t.Output()})
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
	t.Run("servers", func(t *testing.T) { serversOf(t, cloud, ids) })
	if fullLength {
		t.Run("cycles", func(t *testing.T) { cycles(t, cloud, ids) })
	}
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
