package conntrack

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// Masqueraded lists only the flows whose source is translated and whose destination is not, in both families.
func TestMasqueraded(t *testing.T) {
	netlab.Privileged(t)
	var ns [3]*netlab.Namespace
	for i := range ns {
		n, err := netlab.NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		if err := n.Do(func() error {
			return errors.Join(
				os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0),
				os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
		}); err != nil {
			t.Fatal(err)
		}
		ns[i] = n
	}
	client, node, server := ns[0], ns[1], ns[2]
	p, a := netip.MustParsePrefix, netip.MustParseAddr
	for _, err := range []error{
		client.Connect(node, p("10.9.1.2/24"), p("10.9.1.1/24")), node.Connect(server, p("10.9.2.1/24"), p("10.9.2.2/24")),
		client.Connect(node, p("fd09:1::1:2/64"), p("fd09:1::1:1/64")), node.Connect(server, p("fd09:2::2:1/64"), p("fd09:2::2:2/64")),
		client.RouteTo(p("10.0.0.0/8"), a("10.9.1.1")), client.RouteTo(p("fd00::/8"), a("fd09:1::1:1")), server.RouteTo(p("10.0.0.0/8"), a("10.9.2.1")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	const rules = `table inet cni {
	chain out {
		type nat hook postrouting priority srcnat
		udp dport { 1, 2 } masquerade
	}
	chain in {
		type nat hook prerouting priority dstnat
		ip daddr 10.9.3.1 dnat ip to 10.9.2.2
	}
}`
	if output, err := exec.CommandContext(t.Context(), "nsenter", "--net="+node.Path(), "nft", rules).CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, output)
	}
	for _, to := range []string{"10.9.3.1:1", "10.9.2.2:3", "10.9.2.2:1", "[fd09:2::2:2]:2"} { // the first two: also translated, and not masqueraded
		if err := client.Do(func() error {
			c, err := net.Dial("udp", to)
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("?"))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	want := []Flow{
		{Source: a("10.9.1.2"), Translated: a("10.9.2.1"), To: netip.MustParseAddrPort("10.9.2.2:1"), Protocol: unix.IPPROTO_UDP},
		{Source: a("fd09:1::1:2"), Translated: a("fd09:2::2:1"), To: netip.MustParseAddrPort("[fd09:2::2:2]:2"), Protocol: unix.IPPROTO_UDP},
	}
	less := func(a, b Flow) bool { return a.Source.Less(b.Source) }
	await.NoError(t, "the masqueraded flows", func() error { // the datagrams wait for their neighbours to be found
		var have []Flow
		err := node.Do(func() error {
			return Masqueraded(func(f Flow) bool { have = append(have, f); return true })
		})
		if diff := cmp.Diff(want, have, cmpopts.SortSlices(less), cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); err == nil && diff != "" {
			err = fmt.Errorf("masqueraded (-want +have):\n%s", diff)
		}
		return err
	})
	n := 0
	if err := node.Do(func() error { return Masqueraded(func(Flow) bool { n++; return false }) }); err != nil || n != 1 {
		t.Errorf("visited %d after the visitor returned false, %v", n, err)
	}
	if err := client.Do(func() error { return Masqueraded(func(f Flow) bool { t.Errorf("elsewhere: %v", f); return true }) }); err != nil {
		t.Fatal(err)
	}
}

// Broken messages are errors, never panics.
func FuzzParse(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 8, 0, 3, 0, 0, 0, 0, 16})
	f.Add([]byte("0000\x0e\x00000000000000")) // an attribute whose padding is missing
	f.Fuzz(func(t *testing.T, message []byte) {
		if flow, ok, err := parse(message); ok && (err != nil || !flow.Source.IsValid() || !flow.Translated.IsValid() || !flow.To.IsValid()) {
			t.Errorf("%v, %v", flow, err)
		}
	})
}
