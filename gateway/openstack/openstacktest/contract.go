package openstacktest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/gateway/openstack"
)

// Cloud is a project without objects of ours.
type Cloud struct {
	// Connect returns a client of a cluster.
	Connect func(t testing.TB, cluster string) *openstack.Client
	// Network and its subnets, IPv4 first, are joined with External by a router.
	Network  string
	Subnets  []string
	External string
	// Gateway and Second are ports of machines without address pairs, and GatewayAddrs their IPv4 addresses.
	Gateway, Second string
	GatewayAddrs    [2]netip.Addr
	// GatewayIP is the router's address in the IPv4 subnet.
	GatewayIP netip.Addr
	// Discard deletes a floating IP of the project, of any owner.
	Discard func(t testing.TB, id string)
	// MaxPairs is the maximum number of address pairs of a port.
	MaxPairs int
}

// Contract tests what the gateway controller relies on, of a cloud and the client together. It leaves nothing behind.
func Contract(t *testing.T, cloud Cloud) {
	t.Helper()
	c := contract{Cloud: cloud, mine: cloud.Connect(t, "cluster-a"), other: cloud.Connect(t, "cluster-b")}
	t.Run("creates ports with an address of each subnet, and finds them by their purposes", c.ports)
	t.Run("creates a port with the addresses that are asked for, if Neutron would give them", c.askedAddresses)
	t.Run("keeps clusters of one project apart", c.isolation)
	t.Run("creates a floating IP once, moves it, and keeps it when its port is deleted", c.floatingIPs)
	t.Run("reserves a floating IP once and moves it between gateway ports", c.reservations)
	t.Run("keeps the association of a retained floating IP and never deletes it", c.retained)
	t.Run("leaves foreign address pairs in place", c.addressPairs)
	t.Run("reads the quota", c.quota)
	t.Run("refuses an unknown network", c.unknownNetwork)
}

// contract holds clients of two clusters that share a project.
type contract struct {
	Cloud
	mine, other *openstack.Client
}

// compareAddrs lets cmp compare addresses.
var compareAddrs = cmpopts.EquateComparable(netip.Addr{})

func (c contract) request(purpose string) openstack.PortRequest {
	return openstack.PortRequest{Network: c.Network, Subnets: c.Subnets, Purpose: purpose}
}

// create creates a port, which the end of the test deletes.
func (c contract) create(t *testing.T, by *openstack.Client, purpose string) openstack.Port {
	t.Helper()
	p, err := by.CreatePort(t.Context(), c.request(purpose))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := by.DeletePort(context.WithoutCancel(t.Context()), p.ID); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (c contract) ports(t *testing.T) {
	p := c.create(t, c.mine, "uid-1")
	if len(p.Addrs) != len(c.Subnets) || !p.Addrs[0].Is4() || p.Purpose != "uid-1" {
		t.Errorf("port %+v", p)
	}
	want := []openstack.Port{p, c.create(t, c.mine, "uid-2")}
	slices.SortFunc(want, func(a, b openstack.Port) int { return strings.Compare(a.ID, b.ID) })
	all, err := c.mine.Ports(t.Context())
	if diff := cmp.Diff(want, all, compareAddrs); diff != "" || err != nil {
		t.Errorf("ports: %v (-want +have):\n%s", err, diff)
	}
}

func (c contract) askedAddresses(t *testing.T) {
	ctx := t.Context()
	first, err := c.mine.CreatePort(ctx, c.request("uid-1"))
	if err != nil {
		t.Fatal(err)
	}
	ask := c.request("uid-2")
	ask.Addresses = map[string]netip.Addr{c.Subnets[0]: first.Addrs[0]}
	if _, err := c.mine.CreatePort(ctx, ask); !errors.Is(err, openstack.ErrTaken) {
		t.Errorf("an address of another port: %v", err)
	}
	if err := c.mine.DeletePort(ctx, first.ID); err != nil {
		t.Fatal(err)
	}
	for i, a := range first.Addrs {
		ask.Addresses[c.Subnets[i]] = a
	}
	p, err := c.mine.CreatePort(ctx, ask)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(first.Addrs, p.Addrs, compareAddrs); diff != "" {
		t.Errorf("addresses (-want +have):\n%s", diff)
	}
	if err := c.mine.DeletePort(ctx, p.ID); err != nil {
		t.Error(err)
	}
	for name, a := range map[string]netip.Addr{"the router's address": c.GatewayIP, "an address of another network": netip.MustParseAddr("203.0.113.9")} {
		ask.Addresses[c.Subnets[0]] = a
		if _, err := c.mine.CreatePort(ctx, ask); !errors.Is(err, openstack.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func (c contract) isolation(t *testing.T) {
	ctx := t.Context()
	p := c.create(t, c.mine, "uid-1")
	f, err := c.mine.CreateFloatingIP(ctx, c.External, p.ID, p.Addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := c.other.Ports(ctx)
	if err != nil || len(theirs) != 0 {
		t.Errorf("the other cluster has ports %v, %v", theirs, err)
	}
	if theirs, err := c.other.FloatingIPs(ctx); err != nil || len(theirs) != 0 {
		t.Errorf("the other cluster has floating IPs %v, %v", theirs, err)
	}
	if err := c.other.DeletePort(ctx, p.ID); err == nil {
		t.Error("the other cluster deleted a port of ours")
	}
	if err := c.other.DeleteFloatingIP(ctx, f.ID); err == nil {
		t.Error("the other cluster deleted a floating IP of ours")
	}
	if err := c.mine.DeletePort(ctx, c.Gateway); err == nil {
		t.Error("the port of a gateway was deleted")
	}
	lent, err := c.other.FindFloatingIP(ctx, f.Addr.String())
	if err != nil || lent.ID != f.ID || lent.Ours {
		t.Errorf("found %+v, %v by the address", lent, err)
	}
	if err := c.mine.DeleteFloatingIP(ctx, f.ID); err != nil {
		t.Error(err)
	}
	for _, id := range []string{f.ID, f.Addr.String()} {
		if _, err := c.mine.FindFloatingIP(ctx, id); !errors.Is(err, openstack.ErrGone) {
			t.Errorf("after it was deleted, %s: %v", id, err)
		}
	}
	if err := errors.Join(c.mine.DeleteFloatingIP(ctx, f.ID), c.mine.DeletePort(ctx, p.ID), c.mine.DeletePort(ctx, p.ID)); err != nil {
		t.Errorf("delete missing objects: %v", err)
	}
}

func (c contract) floatingIPs(t *testing.T) {
	ctx := t.Context()
	one, two := c.create(t, c.mine, "uid-1"), c.create(t, c.mine, "uid-2")
	f, err := c.mine.CreateFloatingIP(ctx, c.External, one.ID, one.Addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.mine.DeleteFloatingIP(ctx, f.ID); err != nil {
			t.Error(err)
		}
	}()
	again, err := c.mine.CreateFloatingIP(ctx, c.External, one.ID, one.Addrs[0])
	if diff := cmp.Diff(f, again, compareAddrs); diff != "" || err != nil {
		t.Errorf("created again: %v (-first +second):\n%s", err, diff)
	}
	for range 2 { // the second call changes nothing
		if err := c.mine.AssociateFloatingIP(ctx, f.ID, two.ID, two.Addrs[0]); err != nil {
			t.Fatal(err)
		}
	}
	want := openstack.FloatingIP{ID: f.ID, Addr: f.Addr, Port: two.ID, Fixed: two.Addrs[0], Ours: true}
	if got, err := c.mine.FloatingIPs(ctx); err != nil || !slices.Equal(got, []openstack.FloatingIP{want}) {
		t.Errorf("floating IPs %+v, %v, want %+v", got, err, want)
	}
	if err := c.mine.AssociateFloatingIP(ctx, f.ID, one.ID, two.Addrs[0]); err == nil {
		t.Error("it was associated with an address that the port does not have")
	}
	if err := c.mine.DeletePort(ctx, two.ID); err != nil {
		t.Fatal(err)
	}
	want.Port, want.Fixed = "", netip.Addr{}
	if got, err := c.mine.FloatingIPs(ctx); err != nil || !slices.Equal(got, []openstack.FloatingIP{want}) {
		t.Errorf("with its port deleted %+v, %v, want %+v", got, err, want)
	}
	if err := c.mine.AssociateFloatingIP(ctx, f.ID, "", netip.Addr{}); err != nil {
		t.Errorf("disassociate a floating IP without a port: %v", err)
	}
}

func (c contract) reservations(t *testing.T) {
	ctx := t.Context()
	f, err := c.mine.ReserveFloatingIP(ctx, c.External, "pool.uid-1")
	if err != nil || f.Port != "" || f.Purpose != "pool.uid-1" || !f.Ours {
		t.Fatalf("reserved %+v, %v", f, err)
	}
	defer func() {
		if err := c.mine.DeleteFloatingIP(ctx, f.ID); err != nil {
			t.Error(err)
		}
	}()
	for i, port := range []string{c.Gateway, c.Second} {
		if err := c.mine.AssociateFloatingIP(ctx, f.ID, port, c.GatewayAddrs[i]); err != nil {
			t.Fatal(err)
		}
		f.Port, f.Fixed = port, c.GatewayAddrs[i]
		again, err := c.mine.ReserveFloatingIP(ctx, c.External, "pool.uid-1")
		if diff := cmp.Diff(f, again, compareAddrs); diff != "" || err != nil {
			t.Errorf("reserved again: %v (-want +have):\n%s", err, diff)
		}
	}
	second, err := c.other.ReserveFloatingIP(ctx, c.External, "pool.uid-1")
	if err != nil || second.ID == f.ID {
		t.Fatalf("the other cluster reserved %+v, %v", second, err)
	}
	if err := c.other.AssociateFloatingIP(ctx, second.ID, c.Second, c.GatewayAddrs[1]); !errors.Is(err, openstack.ErrTaken) {
		t.Errorf("two floating IPs of one address: %v", err)
	}
	if err := c.mine.DeleteFloatingIP(ctx, second.ID); err == nil {
		t.Error("a floating IP of the other cluster was deleted")
	}
	if err := c.other.DeleteFloatingIP(ctx, second.ID); err != nil {
		t.Error(err)
	}
}

func (c contract) retained(t *testing.T) {
	ctx := t.Context()
	p := c.create(t, c.mine, "uid-1")
	f, err := c.mine.CreateFloatingIP(ctx, c.External, p.ID, p.Addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.mine.RetainFloatingIP(ctx, f.ID, "team-a"), c.mine.RetainFloatingIP(ctx, f.ID, "team-b")); err != nil {
		t.Fatal(err)
	}
	f.Ours, f.KeptFor = false, "team-a"
	if is, err := c.mine.FindFloatingIP(ctx, f.ID); err != nil || is != f {
		t.Errorf("it is %+v, %v, want %+v", is, err, f)
	}
	if all, err := c.mine.AllFloatingIPs(ctx); err != nil || !slices.Contains(all, f) {
		t.Errorf("all floating IPs: %+v, %v", all, err)
	}
	if is, err := c.other.FindFloatingIP(ctx, f.ID); err != nil || is.Ours || !strings.HasSuffix(is.KeptFor, "/team-a") {
		t.Errorf("to the other cluster it is %+v, %v", is, err)
	}
	if ours, err := c.mine.FloatingIPs(ctx); err != nil || len(ours) != 0 {
		t.Errorf("ours: %+v, %v", ours, err)
	}
	if err := c.mine.DeleteFloatingIP(ctx, f.ID); err == nil {
		t.Error("it was deleted")
	}
	c.Discard(t, f.ID)
}

func (c contract) addressPairs(t *testing.T) {
	ctx := t.Context()
	foreign := netip.MustParsePrefix("198.51.100.7/32")
	vips := func(n int) (all []netip.Prefix) {
		for i := range n {
			all = append(all, netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/32", i+1)))
		}
		return append(all, netip.MustParsePrefix("2001:db8::/64"))
	}
	// Pairs that another client set look like ours; only that we never set them makes them foreign.
	set := func(had, want []netip.Prefix) error { return c.mine.SetAddressPairs(ctx, c.Gateway, had, want) }
	if err := set(nil, []netip.Prefix{foreign}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := set(append(vips(c.MaxPairs+3), foreign), nil); err != nil {
			t.Error(err)
		}
	}()
	if err := errors.Join(set(nil, vips(3)), set(vips(3), vips(1)), set(vips(1), vips(1))); err != nil {
		t.Fatal(err)
	}
	pairs, err := c.mine.AddressPairs(ctx, c.Gateway)
	if want := append(vips(1), foreign); err != nil || !sameSet(pairs, want) {
		t.Errorf("pairs %v, %v, want %v", pairs, err, want)
	}
	many := vips(c.MaxPairs + 3)
	err = set(vips(1), many[1:]) // one of the existing pairs is no longer wanted
	room, ok := errors.AsType[*openstack.PairsExhausted](err)
	if !ok || !errors.Is(err, openstack.ErrPairs) || len(room.Missing) != 4 || slices.Contains(room.Missing, many[len(many)-1]) {
		t.Fatalf("too many pairs: %v", err)
	}
	pairs, err = c.mine.AddressPairs(ctx, c.Gateway)
	if want := append(slices.DeleteFunc(slices.Clone(many[1:]), func(p netip.Prefix) bool { return slices.Contains(room.Missing, p) }), foreign); err != nil || !sameSet(pairs, want) {
		t.Errorf("of too many pairs %v, %v, want %v", pairs, err, want)
	}
	if err := c.mine.SetAddressPairs(ctx, "11111111-2222-3333-4444-555555555555", nil, vips(1)); !errors.Is(err, openstack.ErrGone) {
		t.Errorf("an unknown port: %v", err)
	}
}

func (c contract) quota(t *testing.T) {
	ctx := t.Context()
	before, err := c.mine.Quota(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c.create(t, c.mine, "uid-1")
	after, err := c.mine.Quota(ctx)
	if err != nil || after.Ports.Used != before.Ports.Used+1 || after.Ports.Limit != before.Ports.Limit {
		t.Errorf("before a port %+v, with it %+v, %v", before, after, err)
	}
}

func (c contract) unknownNetwork(t *testing.T) {
	ctx := t.Context()
	r := c.request("uid-1")
	r.Network = "11111111-2222-3333-4444-555555555555"
	if _, err := c.mine.CreatePort(ctx, r); !errors.Is(err, openstack.ErrGone) {
		t.Errorf("%v", err)
	}
}

func sameSet(a, b []netip.Prefix) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, netip.Prefix.Compare)
	slices.SortFunc(b, netip.Prefix.Compare)
	return slices.Equal(a, b)
}
