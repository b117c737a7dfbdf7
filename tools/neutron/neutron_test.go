package neutron_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/gophercloud/gophercloud/v2"
	gophercloudopenstack "github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/config"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/networks"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"github.com/gophercloud/gophercloud/v2/pagination"
	"github.com/vishvananda/netlink"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// fullLength adds the tests that take an hour.
var fullLength = os.Getenv("ISTHMUS_FULL_LENGTH") != ""

// patience bounds a call to Neutron. On a machine without free memory bandwidth one has taken more than openstack.DefaultTimeout.
const patience = 2 * time.Minute

// servers are the API servers of two clusters in one project.
var servers [2]apitest.Server

// withServers runs the tests with these API servers, if any selected test needs them.
type withServers struct{ *testing.M }

func (m withServers) Run() int {
	if !fullLength {
		return m.M.Run()
	}
	klog.SetLogger(logr.Discard()) // killed controllers log many errors
	ctrl.SetLogger(logr.Discard())
	if err := routed(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return apitest.Run(m.M, &servers[0], &servers[1])
}

// routed adds a default route without a destination to the tests' network: an API server does not start without a default
// route.
func routed() error {
	if !netlab.IsRoot() {
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
	client, err := openstack.Connect(t.Context(), openstack.Config{Cloud: as, File: cloud.CloudsYAML(), Cluster: cluster, Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// The real Neutron fulfils the contract that the fake fulfils in its own tests, and keeps its state in a crash.
func TestNeutron(t *testing.T) {
	netlab.Privileged(t)
	cloud := neutron.Open(neutron.Config{Dir: t.TempDir(), Compute: true, Balancing: true, Progress: t.Output()})
	t.Cleanup(func() {
		if err := cloud.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(cloud.Prepare(t.Context()), cloud.Up(t.Context())); err != nil {
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
				return connect(t, cloud, neutron.GatewaysCredential, cluster)
			},
			Network: ids.Network, Subnets: ids.Subnets[:], External: ids.External, Gateway: ids.Gateways[0].Port, Second: ids.Gateways[1].Port,
			GatewayAddrs: [2]netip.Addr{ids.Gateways[0].Addrs[0], ids.Gateways[1].Addrs[0]}, MaxPairs: 10,
			GatewayIP: netip.PrefixFrom(ids.Gateways[0].Addrs[0], 24).Masked().Addr().Next(),
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
	t.Run("load balancers", func(t *testing.T) { balancersOf(t, cloud, ids) })
	t.Run("security groups", func(t *testing.T) { securityGroupsOf(t, cloud, ids) })
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
			t.Error("the killed Neutron still answers")
		}
		if err := cloud.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		if all, err := client.Ports(t.Context()); err != nil || len(all) != 1 || all[0].ID != made.ID {
			t.Errorf("ports %v, %v; want %s alone", all, err, made.ID)
		}
	})
	t.Run("access rules", func(t *testing.T) { accessRules(t, cloud) })
	t.Run("user of another project", func(t *testing.T) {
		if all, err := connect(t, cloud, neutron.Stranger, "survivor").Ports(t.Context()); err != nil || len(all) != 0 {
			t.Errorf("ports %v, %v", all, err)
		}
	})
	t.Run("token expiry", func(t *testing.T) { tokenEnds(t, cloud, ids) })
}

// accessRules checks that the application credentials admit only the requests that the contracts above make.
func accessRules(t *testing.T, cloud *neutron.Cloud) {
	t.Helper()
	for of, list := range map[string]func(*gophercloud.ServiceClient) pagination.Pager{
		neutron.User:               func(c *gophercloud.ServiceClient) pagination.Pager { return networks.List(c, networks.ListOpts{}) },
		neutron.GatewaysCredential: func(c *gophercloud.ServiceClient) pagination.Pager { return networks.List(c, networks.ListOpts{}) },
		neutron.MachinesCredential: func(c *gophercloud.ServiceClient) pagination.Pager { return ports.List(c, ports.ListOpts{}) },
		neutron.SecurityGroupsCredential: func(c *gophercloud.ServiceClient) pagination.Pager {
			return networks.List(c, networks.ListOpts{})
		},
	} {
		_, err := list(networkOf(t, cloud, of)).AllPages(t.Context())
		if refused := gophercloud.ResponseCodeIs(err, http.StatusUnauthorized); refused != (of != neutron.User) {
			t.Errorf("%s: %v", of, err)
		}
	}
}

// networkOf returns a client of Neutron for an entry of clouds.yaml.
func networkOf(t testing.TB, cloud *neutron.Cloud, of string) *gophercloud.ServiceClient {
	t.Helper()
	auth, endpoint, _, err := clouds.Parse(clouds.WithLocations(cloud.CloudsYAML()), clouds.WithCloudName(of))
	if err != nil {
		t.Fatal(err)
	}
	provider, err := config.NewProviderClient(t.Context(), auth)
	if err != nil {
		t.Fatal(err)
	}
	network, err := gophercloudopenstack.NewNetworkV2(provider, endpoint)
	if err != nil {
		t.Fatal(err)
	}
	return network
}

// tokenEnds checks that a controller renews its token: Neutron refuses an old token that was not renewed, and accepts the
// controller, whose first token was as old. It must be the last test, because it shortens the lifetime of all tokens.
func tokenEnds(t *testing.T, cloud *neutron.Cloud, ids neutron.IDs) {
	t.Helper()
	if err := cloud.Kill(t.Context(), neutron.Keystone); err != nil {
		t.Fatal(err)
	}
	if err := cloud.WithTokens(5 * time.Second).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, of := range []string{neutron.User, neutron.GatewaysCredential} {
		client := connect(t, cloud, of, "lasting")
		if _, err := client.Ports(t.Context()); err != nil {
			t.Fatalf("%s: %v", of, err)
		}
		old := networkOf(t, cloud, of)
		old.ReauthFunc = nil
		deadline := time.Now().Add(listTimeout)
		for {
			_, err := ports.List(old, ports.ListOpts{NetworkID: ids.Network}).AllPages(t.Context())
			if gophercloud.ResponseCodeIs(err, http.StatusUnauthorized) {
				break
			}
			if err != nil || time.Now().After(deadline) {
				t.Fatalf("%s: a token of 5 s that was never renewed: %v", of, err)
			}
		}
		if _, err := client.Ports(t.Context()); err != nil {
			t.Errorf("%s: with a token that has ended: %v", of, err)
		}
	}
}
