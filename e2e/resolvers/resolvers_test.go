package resolvers

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

const (
	hello = "hello.demo.svc.clusterset.local"
	many  = "many.demo.svc.clusterset.local"

	endpoints = 200 // of many: more than fit into any UDP answer
)

// The addresses of the name server, and of unbound, which forwards to it.
var (
	direct    = netip.MustParseAddr("127.0.0.1")
	forwarder = netip.MustParseAddr("127.0.0.2")
)

// snapshot returns hello.demo with a VIP of each family, and many.demo, which is headless.
func snapshot() *clusterset.Snapshot {
	port := []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}}
	slice := clusterset.Slice{Cluster: "a", Ports: []clusterset.EndpointPort{{Name: "http", Protocol: clusterset.TCP, Port: 8080}}}
	for i := range endpoints {
		slice.Endpoints = append(slice.Endpoints, clusterset.Endpoint{Ready: true, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}})
	}
	return &clusterset.Snapshot{Services: []clusterset.Service{
		{Import: clusterset.Import{
			Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: clusterset.ClusterSetIP, Ports: port,
			IPs: []netip.Addr{netip.MustParseAddr("243.0.0.1"), netip.MustParseAddr("fd00:243::1")},
		}},
		{Import: clusterset.Import{Service: clusterset.ServiceName{Namespace: "demo", Name: "many"}, Type: clusterset.Headless, Ports: port}, Slices: []clusterset.Slice{slice}},
	}}
}

// tool is a program that resolves names.
type tool struct {
	name string
	args []string // with "TYPE" and "NAME" as placeholders
	// overTCP are arguments that make it retry a truncated answer over TCP; nil if it does so anyway.
	overTCP []string
	// keepsTruncated is true if it uses the records of a truncated answer.
	keepsTruncated bool
}

// Each tool resolves addresses, SRV records and a large record set, directly and through unbound.
func TestResolvers(t *testing.T) {
	netlab.Privileged(t)
	for _, program := range []string{"dig", "nslookup", "kdig", "drill", "unbound", "gcc", "musl-gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			netlab.Skip(t, "needs "+program+", which go run ./tools/test installs")
		}
	}
	serve(t, dns.Config{Listen: []netip.AddrPort{netip.AddrPortFrom(direct, dns.DefaultPort)}, TTL: dns.DefaultTTL})
	startUnbound(t)
	resolvConf := replace(t, "/etc/resolv.conf", "")
	replace(t, "/etc/nsswitch.conf", "hosts: files dns\n")
	tools := []tool{
		{name: "dig", args: []string{"dig", "+short", "NAME", "TYPE"}},
		{name: "nslookup", args: []string{"nslookup", "-type=TYPE", "NAME"}},
		{name: "kdig", args: []string{"kdig", "+short", "NAME", "TYPE"}},
		{name: "drill", args: []string{"drill", "-Q", "NAME", "TYPE"}, overTCP: []string{"-t"}},
		{name: "glibc", args: []string{build(t, "gcc", "-lresolv"), "TYPE", "NAME"}},
		{name: "musl", args: []string{build(t, "musl-gcc", "-static"), "TYPE", "NAME"}, keepsTruncated: true}, // before 1.2.4
	}
	for server, at := range map[string]netip.Addr{"name server": direct, "unbound": forwarder} {
		if err := os.WriteFile(resolvConf, []byte("nameserver "+at.String()+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, tl := range tools {
			t.Run(server+"/"+tl.name, func(t *testing.T) {
				for _, q := range []struct{ name, qtype, want string }{
					{hello, "A", "243.0.0.1"},
					{hello, "AAAA", "fd00:243::1"},
					{hello, "SRV", "0 100 80 " + hello},
					{"_http._tcp." + hello, "SRV", "0 100 80 " + hello},
					{"10-0-0-7.a." + many, "A", "10.0.0.7"},
				} {
					if have := tl.ask(t, false, q.qtype, q.name); !slices.Equal(have, []string{q.want}) {
						t.Errorf("%s %s is %q, want %s", q.name, q.qtype, have, q.want)
					}
				}
				if tl.keepsTruncated && at == forwarder {
					return // unbound drops the records of a truncated answer
				}
				for qtype, one := range map[string]string{"A": "10.0.0.%d", "SRV": "0 1 8080 10-0-0-%d.a." + many} {
					var want []string
					for i := range endpoints {
						want = append(want, fmt.Sprintf(one, i))
					}
					slices.Sort(want)
					have := tl.ask(t, true, qtype, many)
					if tl.keepsTruncated {
						if len(have) == 0 || slices.ContainsFunc(have, func(h string) bool { return !slices.Contains(want, h) }) {
							t.Errorf("%s %s is %q, want a part of all", many, qtype, have)
						}
					} else if !slices.Equal(have, want) {
						t.Errorf("%s %s has %d records, want %d: %q", many, qtype, len(have), len(want), have)
					}
				}
			})
		}
	}
}

var srv = regexp.MustCompile(`(\d+ \d+ \d+ [^ ]+?)\.?$`)

// ask returns the addresses of a name that a tool prints, or the data of SRV records, sorted.
func (tl tool) ask(t *testing.T, large bool, qtype, name string) []string {
	t.Helper()
	argv := slices.Clone(tl.args)
	for i := range argv {
		argv[i] = strings.NewReplacer("TYPE", qtype, "NAME", name+".").Replace(argv[i])
	}
	if large {
		argv = slices.Insert(argv, 1, tl.overTCP...)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", argv, err, out)
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		if m := srv.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			found = append(found, m[1])
			continue
		}
		for word := range strings.FieldsSeq(line) {
			if a, err := netip.ParseAddr(word); err == nil && !a.IsLoopback() { // nslookup also prints the address of the server
				found = append(found, a.String())
			}
		}
	}
	slices.Sort(found)
	return found
}

// serve runs a name server until the test ends.
func serve(t *testing.T, c dns.Config) *dns.Server {
	t.Helper()
	s, err := dns.New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(t.Context(), snapshot()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// startUnbound runs unbound at forwarder until the test ends.
func startUnbound(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd := exec.CommandContext(ctx, "unbound", "-d", "-c", "testdata/unbound.conf")
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // killed by cancel
		if t.Failed() {
			t.Logf("the log of unbound:\n%s", &log)
		}
	})
	question := new(wire.Msg).SetQuestion(hello+".", wire.TypeA)
	tick, late := time.NewTicker(10*time.Millisecond), time.After(20*time.Second)
	defer tick.Stop()
	for {
		answer, err := wire.ExchangeContext(t.Context(), question, netip.AddrPortFrom(forwarder, dns.DefaultPort).String())
		if err == nil && len(answer.Answer) == 1 {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("unbound does not answer: %v %v", answer, err)
		}
	}
}

// replace mounts a file with text over path, for this process and its children, and returns the path of the file.
func replace(t *testing.T, path, text string) string {
	t.Helper()
	own := filepath.Join(t.TempDir(), filepath.Base(path))
	if err := os.WriteFile(own, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("mount over %s: %v", path, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return own
}

// build compiles testdata/lookup.c and returns the path of the program.
func build(t *testing.T, compiler, flag string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "lookup")
	out, err := exec.CommandContext(t.Context(), compiler, "-O1", "-Wall", "-Werror", "-o", program, "testdata/lookup.c", flag).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", compiler, err, out)
	}
	return program
}
