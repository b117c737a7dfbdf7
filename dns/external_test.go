package dns_test

import (
	"maps"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	wire "github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns"
)

// askFrom is ask with a source address.
func askFrom(t *testing.T, network, from string, at netip.AddrPort) []string {
	t.Helper()
	var local net.Addr = &net.UDPAddr{IP: net.ParseIP(from)}
	if network == "tcp" {
		local = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	q := new(wire.Msg)
	q.SetQuestion("hello.demo.svc.clusterset.local.", wire.TypeA)
	c := &wire.Client{Net: network, Timeout: 5 * time.Second, Dialer: &net.Dialer{LocalAddr: local}}
	resp, _, err := c.ExchangeContext(t.Context(), q, at.String())
	if err != nil {
		t.Fatalf("ask %s over %s from %s: %v", at, network, from, err)
	}
	have := []string{wire.RcodeToString[resp.Rcode]}
	for _, rr := range append(resp.Answer, resp.Ns...) {
		have = append(have, wire.Field(rr, 1))
	}
	return have
}

// External clients in an allowed range get answers at the addresses for them; other clients are refused there and counted.
// Pods' addresses refuse no client. An address that the node does not have does no harm.
func TestExternalClients(t *testing.T) {
	s, _ := startWith(t, dns.Config{
		Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")},
		ExternalClients: dns.ExternalClients{
			Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("203.0.113.53:0"), netip.MustParseAddrPort("[2001:db8::53]:0")},
			Allow:  []netip.Prefix{netip.MustParsePrefix("127.0.2.0/24")},
		},
	})
	if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
		t.Fatal(err)
	}
	listen := s.Status().Listen
	if len(listen) != 4 {
		t.Fatalf("listens on %v", listen)
	}
	answer, refusal := []string{"NOERROR", "243.0.0.1"}, []string{"REFUSED"}
	for _, tc := range []struct {
		from string
		at   netip.AddrPort
		want []string
	}{
		{"127.0.1.1", listen[0], answer}, {"127.0.2.1", listen[1], answer}, {"127.0.1.1", listen[1], refusal},
	} {
		for _, network := range []string{"udp", "tcp"} {
			if diff := cmp.Diff(tc.want, askFrom(t, network, tc.from, tc.at)); diff != "" {
				t.Errorf("%s over %s from %s (-want +have):\n%s", tc.at, network, tc.from, diff)
			}
		}
	}
	counts := s.Status().Counts
	refused := uint64(0)
	for _, a := range counts.Answers {
		if a.Rcode == "REFUSED" {
			refused += a.Messages
		}
	}
	if want := map[dns.ACLRefusal]uint64{{Listener: "external", Outcome: "refused"}: 2}; !maps.Equal(counts.ACLRefused, want) || refused != 2 {
		t.Errorf("%v refused by the ACL, %d refused in all, want 2", counts.ACLRefused, refused)
	}
	noRange := dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, ExternalClients: dns.ExternalClients{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}}
	if err := noRange.Validate(); err == nil || !strings.Contains(err.Error(), "no client may use") {
		t.Error(err)
	}
}
