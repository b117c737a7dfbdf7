package dns_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	wire "github.com/miekg/dns"
	"go.uber.org/goleak"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hello is a snapshot with one service, hello.demo, at the given addresses.
func hello(ips ...string) *clusterset.Snapshot {
	s := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"},
		Type:    clusterset.ClusterSetIP,
	}}
	for _, ip := range ips {
		s.IPs = append(s.IPs, netip.MustParseAddr(ip))
	}
	return &clusterset.Snapshot{Services: []clusterset.Service{s}}
}

// start runs a server on both loopback addresses until stop is called or the test ends. stop waits for the server to
// end.
func start(t *testing.T) (s *dns.Server, stop func()) {
	t.Helper()
	return startWith(t, dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("[::1]:0")}, TTL: dns.DefaultTTL})
}

// startWith is start with a Config.
func startWith(t *testing.T, c dns.Config) (s *dns.Server, stop func()) {
	t.Helper()
	s, err := dns.New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(stop)
	return s, stop
}

// ask returns the rcode and the addresses of the answer for hello.demo.
func ask(t *testing.T, network string, at netip.AddrPort, qtype uint16) []string {
	t.Helper()
	return askFor(t, "Hello.Demo.svc.clusterset.local.", network, at, qtype)
}

// askFor is ask with a name.
func askFor(t *testing.T, name, network string, at netip.AddrPort, qtype uint16) []string {
	t.Helper()
	q := new(wire.Msg)
	q.SetQuestion(name, qtype)
	resp, _, err := (&wire.Client{Net: network, Timeout: 5 * time.Second}).ExchangeContext(t.Context(), q, at.String())
	if err != nil {
		t.Fatalf("ask %s over %s: %v", at, network, err)
	}
	have := []string{wire.RcodeToString[resp.Rcode]}
	for _, rr := range resp.Answer {
		have = append(have, wire.Field(rr, 1))
	}
	return have
}

func TestServer(t *testing.T) {
	s, _ := start(t)
	for _, at := range s.Status().Listen {
		for _, network := range []string{"udp", "tcp"} {
			if diff := cmp.Diff([]string{"SERVFAIL"}, ask(t, network, at, wire.TypeA)); diff != "" {
				t.Errorf("%s over %s before the first snapshot (-want +have):\n%s", at, network, diff)
			}
		}
	}
	if err := s.Sync(t.Context(), hello("243.0.0.1", "fd00:243::1")); err != nil {
		t.Fatal(err)
	}
	for _, at := range s.Status().Listen {
		for _, network := range []string{"udp", "tcp"} {
			if diff := cmp.Diff([]string{"NOERROR", "243.0.0.1"}, ask(t, network, at, wire.TypeA)); diff != "" {
				t.Errorf("A from %s over %s (-want +have):\n%s", at, network, diff)
			}
			if diff := cmp.Diff([]string{"NOERROR", "fd00:243::1"}, ask(t, network, at, wire.TypeAAAA)); diff != "" {
				t.Errorf("AAAA from %s over %s (-want +have):\n%s", at, network, diff)
			}
		}
	}
	if err := s.Sync(t.Context(), &clusterset.Snapshot{}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"NXDOMAIN"}, ask(t, "udp", s.Status().Listen[0], wire.TypeA)); diff != "" {
		t.Errorf("after the Service was removed (-want +have):\n%s", diff)
	}
}

// Names of single clusters come and go with the setting, without another snapshot. The same setting again changes nothing.
func TestSetNames(t *testing.T) {
	s, _ := start(t)
	snapshot := hello("243.0.0.1")
	service := &snapshot.Services[0]
	service.Clusters = []clusterset.ClusterID{"a"}
	service.Slices = []clusterset.Slice{{Cluster: "a", Endpoints: []clusterset.Endpoint{{Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.1")}, Ready: true}}}}
	s.SetNames(dns.Names{ClusterScoped: true})
	if err := s.Sync(t.Context(), snapshot); err != nil {
		t.Fatal(err)
	}
	asked := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, askFor(t, "a.hello.demo.svc.clusterset.local.", "udp", s.Status().Listen[0], wire.TypeA)); diff != "" {
			t.Errorf("the name with a cluster (-want +have):\n%s", diff)
		}
	}
	asked("NOERROR", "10.1.0.1")
	serial := s.Status().Serial
	s.SetNames(dns.Names{ClusterScoped: true})
	if now := s.Status().Serial; now != serial {
		t.Errorf("the serial went from %d to %d", serial, now)
	}
	s.SetNames(dns.Names{})
	asked("NXDOMAIN")
	s.SetNames(dns.Names{ClusterScoped: true})
	asked("NOERROR", "10.1.0.1")
}

func TestSyncOfEqualSnapshotChangesNothing(t *testing.T) {
	s, _ := start(t)
	var serials []uint32
	for _, snap := range []*clusterset.Snapshot{hello("243.0.0.1"), hello("243.0.0.1"), hello("243.0.0.2"), {}, {}} {
		if err := s.Sync(t.Context(), snap); err != nil {
			t.Fatal(err)
		}
		serials = append(serials, s.Status().Serial)
	}
	if serials[0] != serials[1] || serials[3] != serials[4] {
		t.Errorf("serials %v: an equal snapshot got a new one", serials)
	}
	if serials[1] >= serials[2] || serials[2] >= serials[3] {
		t.Errorf("serials %v: a changed snapshot needs a greater one", serials)
	}
}

func TestSyncWithCancelledContext(t *testing.T) {
	s, _ := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Sync(ctx, hello("243.0.0.1")); !errors.Is(err, context.Canceled) {
		t.Errorf("have %v, want context.Canceled", err)
	}
	if s.Status().Synced {
		t.Error("a cancelled Sync was applied")
	}
}

func TestServiceWithoutValidName(t *testing.T) {
	var log bytes.Buffer
	s, err := dns.New(dns.Config{
		Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")},
		Log:    slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	snap := hello("243.0.0.1")
	snap.Services[0].Service.Name = "a.b"
	for _, snap := range []*clusterset.Snapshot{snap, {Services: append(hello("243.0.0.9").Services, snap.Services...)}} {
		if err := s.Sync(ctx, snap); err != nil {
			t.Fatal(err)
		}
	}
	if have := s.Status().Skipped; len(have) != 1 || !strings.HasPrefix(have[0], "demo/a.b: ") {
		t.Errorf("skipped: %q", have)
	}
	if n := strings.Count(log.String(), "service=a.b"); n != 1 {
		t.Errorf("logged %d times, want once:\n%s", n, &log)
	}
	conformance.Holds(t, "N48")
	cancel()
	if err := s.Run(ctx); err != nil { // closes the sockets
		t.Error(err)
	}
}

func TestTCPPipelining(t *testing.T) {
	s, _ := start(t)
	if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
		t.Fatal(err)
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Status().Listen[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := &wire.Conn{Conn: conn}
	q := new(wire.Msg).SetQuestion("hello.demo.svc.clusterset.local.", wire.TypeA)
	for q.Id = 1; q.Id <= 50; q.Id++ {
		if err := c.WriteMsg(q); err != nil {
			t.Fatal(err)
		}
	}
	for id := uint16(1); id <= 50; id++ {
		resp, err := c.ReadMsg()
		if err != nil {
			t.Fatalf("answer %d: %v", id, err)
		}
		if resp.Id != id || len(resp.Answer) != 1 {
			t.Fatalf("answer %d: id %d, %d records", id, resp.Id, len(resp.Answer))
		}
	}
}

// A restarted server answers from the zone of its predecessor until the first Sync, and from the snapshot afterwards.
func TestZoneSurvivesARestart(t *testing.T) {
	cfg := dns.Config{
		Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: dns.DefaultTTL,
		File: filepath.Join(t.TempDir(), "new", "zone"),
	}
	s, stop := startWith(t, cfg)
	if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
		t.Fatal(err)
	}
	stop()
	s, stop = startWith(t, cfg)
	if st := s.Status(); !st.Synced || !st.Stale || st.FileErr != nil || time.Since(st.SyncedAt) > time.Minute {
		t.Errorf("status after a restart: %+v", st)
	}
	if diff := cmp.Diff([]string{"NOERROR", "243.0.0.1"}, ask(t, "udp", s.Status().Listen[0], wire.TypeA)); diff != "" {
		t.Errorf("before the first snapshot (-want +have):\n%s", diff)
	}
	if err := s.Sync(t.Context(), hello("243.0.0.2")); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"NOERROR", "243.0.0.2"}, ask(t, "udp", s.Status().Listen[0], wire.TypeA)); diff != "" || s.Status().Stale {
		t.Errorf("after the first snapshot, stale: %t (-want +have):\n%s", s.Status().Stale, diff)
	}
	stop()
	if left, err := filepath.Glob(cfg.File + "*"); err != nil || len(left) != 1 {
		t.Errorf("files: %v %v", left, err)
	}
}

// A zone file that cannot be read or written is reported and does not affect answers.
func TestBrokenZoneFile(t *testing.T) {
	dir := t.TempDir()
	damaged := filepath.Join(dir, "damaged")
	if err := os.WriteFile(damaged, []byte("isthmus-zone, once"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		file     string
		atStart  string
		repaired bool // the file is valid again at the end
	}{
		"damaged":   {damaged, damaged, true},
		"a folder":  {dir, "read the saved zone", false},
		"no folder": {filepath.Join(damaged, "below", "zone"), "not a directory", false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: dns.DefaultTTL, File: tc.file}
			s, stop := startWith(t, cfg)
			if err := s.Status().FileErr; err == nil || !strings.Contains(err.Error(), tc.atStart) {
				t.Errorf("at the start: %v, want %q", err, tc.atStart)
			}
			if diff := cmp.Diff([]string{"SERVFAIL"}, ask(t, "udp", s.Status().Listen[0], wire.TypeA)); diff != "" {
				t.Errorf("before the first snapshot (-want +have):\n%s", diff)
			}
			if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"NOERROR", "243.0.0.1"}, ask(t, "udp", s.Status().Listen[0], wire.TypeA)); diff != "" {
				t.Errorf("after it (-want +have):\n%s", diff)
			}
			stop()
			if err := s.Status().FileErr; (err == nil) != tc.repaired {
				t.Errorf("at the end: %v", err)
			}
		})
	}
}

// Clients that send nothing, or half a question, do not delay the end of the server.
func TestStopWithIdleClients(t *testing.T) {
	s, stop := start(t)
	for _, sent := range []string{"", "\x00", "\x00\x40half a question"} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Status().Listen[1].String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte(sent)); err != nil {
			t.Fatal(err)
		}
	}
	ask(t, "tcp", s.Status().Listen[1], wire.TypeA) // accepted after the three, so these are being served
	begin := time.Now()
	stop()
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("the stop took %s, as long as an idle client may stay", took)
	}
}

// Questions already in a socket's buffer are answered when the server stops, so that no client waits for a timeout during a
// planned restart.
func TestStopAnswersPendingQuestions(t *testing.T) {
	s, stop := start(t)
	if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
		t.Fatal(err)
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "udp", s.Status().Listen[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	q := new(wire.Msg).SetQuestion("hello.demo.svc.clusterset.local.", wire.TypeA)
	question, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	const questions = 200
	for range questions {
		if _, err := conn.Write(question); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	answer := make([]byte, 512)
	if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	for i := range questions {
		if _, err := conn.Read(answer); err != nil {
			t.Fatalf("after %d answers of %d: %v", i, questions, err)
		}
	}
}

func TestListenErrors(t *testing.T) {
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	tests := map[string]struct {
		listen string
		cause  error
		words  []string
	}{
		"address taken":   {taken.Addr().String(), syscall.EADDRINUSE, []string{"tcp", "127.0.0.1", strconv.Itoa(port), "--dns-listen"}},
		"unknown address": {"192.0.2.1:5353", syscall.EADDRNOTAVAIL, []string{"udp", "192.0.2.1", "5353", "--dns-listen"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := dns.New(dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("[::1]:0"), netip.MustParseAddrPort(tc.listen)}})
			if !errors.Is(err, tc.cause) {
				t.Fatalf("have %v, want %v", err, tc.cause)
			}
			for _, word := range tc.words {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q does not name %s", err, word)
				}
			}
		})
	}
}

func TestValidate(t *testing.T) {
	local := netip.MustParseAddrPort("127.0.0.1:53")
	tests := map[string]struct {
		listen []netip.AddrPort
		faults int
	}{
		"one address":        {[]netip.AddrPort{local}, 0},
		"port 0, twice":      {[]netip.AddrPort{netip.MustParseAddrPort("[::1]:0"), netip.MustParseAddrPort("[::1]:0")}, 0},
		"none":               {nil, 1},
		"wildcards":          {[]netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:53"), netip.MustParseAddrPort("[::]:53")}, 2},
		"twice":              {[]netip.AddrPort{local, local}, 1},
		"multicast":          {[]netip.AddrPort{netip.MustParseAddrPort("224.0.0.251:53")}, 1},
		"no address":         {[]netip.AddrPort{{}}, 1},
		"all faults at once": {[]netip.AddrPort{{}, netip.MustParseAddrPort("0.0.0.0:53"), local, local}, 3},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			err := dns.Config{Listen: tc.listen}.Validate()
			have := 0
			if joined, ok := err.(interface{ Unwrap() []error }); ok {
				have = len(joined.Unwrap())
			}
			if have != tc.faults {
				t.Errorf("have %d faults, want %d: %v", have, tc.faults, err)
			}
			if tc.faults > 0 {
				if _, err := dns.New(dns.Config{Listen: tc.listen}); err == nil {
					t.Error("New accepts it")
				}
			}
		})
	}
}

// fakeKernel is a Kernel that records its updates.
type fakeKernel map[string][2]netip.Addr

func (k fakeKernel) Update(ttl uint32, soa string, changes iter.Seq2[string, [2]netip.Addr]) error {
	for name, addrs := range changes {
		k[fmt.Sprintf("%d %d %q", ttl, len(soa), name)] = addrs
	}
	return nil
}

// The kernel receives every change, as part of Sync.
func TestKernelUpdates(t *testing.T) {
	const name = `5 84 "\x05hello\x04demo\x03svc\nclusterset\x05local\x00"`
	kernel := fakeKernel{}
	s, _ := startWith(t, dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: dns.DefaultTTL, Kernel: kernel})
	for _, ips := range [][]string{{"243.0.0.1", "fd99::1"}, {"243.0.0.2"}, nil} {
		clear(kernel)
		if err := s.Sync(t.Context(), hello(ips...)); err != nil {
			t.Fatal(err)
		}
		var want [2]netip.Addr
		for i, ip := range ips {
			want[i] = netip.MustParseAddr(ip)
		}
		if got, ok := kernel[name]; !ok || got != want {
			t.Errorf("with %v the kernel receives %v", ips, kernel)
		}
	}
	clear(kernel)
	if err := s.Sync(t.Context(), hello()); err != nil || len(kernel) > 0 {
		t.Errorf("%v; the kernel receives unchanged names: %v", err, kernel)
	}
}

// Positive and negative answers have the configured TTL, at most one hour.
func TestTTL(t *testing.T) {
	for _, ttl := range []uint32{0, 60, 3600} {
		s, _ := startWith(t, dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: ttl})
		if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"hello", "unknown"} {
			resp, err := wire.ExchangeContext(t.Context(), new(wire.Msg).SetQuestion(name+".demo.svc.clusterset.local.", wire.TypeA), s.Status().Listen[0].String())
			if err != nil {
				t.Fatal(err)
			}
			for _, rr := range append(resp.Answer, resp.Ns...) {
				if rr.Header().Ttl != ttl {
					t.Errorf("%s: TTL %d, want %d", name, rr.Header().Ttl, ttl)
				}
				if soa, is := rr.(*wire.SOA); is && soa.Minttl != ttl {
					t.Errorf("%s: minimum %d, want %d", name, soa.Minttl, ttl)
				}
			}
		}
	}
	if _, err := dns.New(dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: 3601}); err == nil {
		t.Error("a TTL above one hour is accepted")
	}
	conformance.Holds(t, "L56")
}
