package resolvers

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	wire "github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// machine is a network namespace beside that of the node, with an address of each family.
type machine struct {
	*netlab.Namespace

	addrs [2]netip.Addr
}

// connect makes a machine on a link with the node. Its addresses are the second ones of the subnets, and it reaches the node-local
// addresses through the first ones.
func connect(t *testing.T, node *netlab.Namespace, subnets ...string) machine {
	t.Helper()
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Close(); err != nil {
			t.Error(err)
		}
	})
	m := machine{Namespace: ns}
	for i, local := range []netip.Addr{device.IPv4, device.IPv6} {
		p := netip.MustParsePrefix(subnets[i])
		here := p.Addr().Next()
		m.addrs[i] = here.Next()
		err := errors.Join(
			node.Connect(ns, netip.PrefixFrom(here, p.Bits()), netip.PrefixFrom(m.addrs[i], p.Bits())),
			ns.RouteTo(netip.PrefixFrom(local, local.BitLen()), here),
		)
		if err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// ask asks a node-local address for hello from one of the machine's own, and returns the code of the answer.
func (m machine) ask(t *testing.T, network string, at, from netip.Addr) (code string) {
	t.Helper()
	err := m.Do(func() error {
		client := &wire.Client{Net: network, Timeout: 20 * time.Second}
		client.Dialer = &net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
		if network == "tcp" {
			client.Dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
		}
		answer, _, err := client.ExchangeContext(t.Context(), new(wire.Msg).SetQuestion(hello+".", wire.TypeA), netip.AddrPortFrom(at, dns.DefaultPort).String())
		if err == nil {
			code = wire.RcodeToString[answer.Rcode]
		}
		return err
	})
	if err != nil {
		t.Fatalf("%s from %s: %v", network, from, err)
	}
	return code
}

// A machine on the node's own network that sends questions to the node-local addresses is refused. Clients behind devices of their
// own get answers: pods, and virtual machines of which the cluster knows nothing. So does a pod that is bridged onto the network.
func TestClientsOutside(t *testing.T) {
	netlab.Privileged(t)
	node, err := netlab.OpenNamespace("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(device.Remove([]netip.Addr{device.IPv4, device.IPv6}), node.Close()); err != nil {
			t.Error(err)
		}
	})
	if _, _, err := device.Ensure([]netip.Addr{device.IPv4, device.IPv6}); err != nil {
		t.Fatal(err)
	}
	network := connect(t, node, "198.51.100.0/24", "fd00:100::100:0/112")
	pod := connect(t, node, "10.201.0.0/24", "fd00:201::201:0/112")
	vm := connect(t, node, "172.20.0.0/24", "fd00:20::20:0/112")
	bridged := machine{network.Namespace, [2]netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("fd00:100::100:7")}}
	for i, gateway := range network.addrs {
		own := netip.PrefixFrom(bridged.addrs[i], bridged.addrs[i].BitLen())
		if err := errors.Join(network.Own(bridged.addrs[i]), node.RouteTo(own, gateway), node.Route(gateway)); err != nil {
			t.Fatal(err)
		}
	}
	at := [2]netip.Addr{device.IPv4, device.IPv6}
	s := serve(t, dns.Config{
		Listen: []netip.AddrPort{netip.AddrPortFrom(at[0], dns.DefaultPort), netip.AddrPortFrom(at[1], dns.DefaultPort)},
		TTL:    dns.DefaultTTL, Limits: dns.DefaultLimits, Outside: device.IsOutside,
	})
	refused := 0
	clients := []netip.Prefix{
		netip.MustParsePrefix("10.201.0.0/24"), netip.MustParsePrefix("fd00:201::/64"),
		netip.PrefixFrom(bridged.addrs[0], 32), netip.PrefixFrom(bridged.addrs[1], 128),
	}
	for _, step := range []struct {
		name  string
		set   func()
		known bool
	}{
		{"no clients known", func() {}, false},
		{"not all pods known", func() { s.SetClients(clients, false) }, false},
		{"pods known", func() { s.SetClients(clients, true) }, true},
	} {
		step.set()
		for _, client := range []struct {
			name string
			machine
		}{{"a stranger", network}, {"a bridged pod", bridged}, {"a pod", pod}, {"a virtual machine", vm}} { // in this order: the pod is behind the stranger
			want := "NOERROR"
			if step.known && client.name == "a stranger" {
				want = "REFUSED"
			}
			for i := range at {
				for _, over := range []string{"udp", "tcp"} {
					if have := client.ask(t, over, at[i], client.addrs[i]); have != want {
						t.Errorf("%s: %s over %s at %s gets %s, want %s", step.name, client.name, over, at[i], have, want)
					}
					if want == "REFUSED" {
						refused++
					}
				}
			}
		}
	}
	if have := s.Status().Counts.ACLRefused[dns.ACLRefusal{Listener: "pods", Outcome: "refused"}]; have != uint64(refused) {
		t.Errorf("%d refusals are counted, want %d", have, refused)
	}
}
