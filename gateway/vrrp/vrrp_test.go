package vrrp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/announcertest"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/subprocess"
)

var _ agent.Announcer = (*vrrp.Router)(nil)

func TestMain(m *testing.M) {
	subprocess.Main(func(dir string) subprocess.Announcer {
		r, err := vrrp.New(vrrp.Config{Dir: dir, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
		if err != nil {
			panic(err)
		}
		return r
	})
	_ = flag.Set("test.parallel", "4") // they wait for timers, not for CPUs
	os.Exit(netlab.Main(m))
}

// The VIPs are in the gateways' network, so a router resolves them by ARP and neighbour discovery.
var (
	vip   = netip.MustParseAddr("10.99.0.100")
	vip6  = netip.MustParseAddr("fd99::100")
	later = netip.MustParseAddr("10.99.0.50") // sorts before vip
)

// lab is two gateways in one virtual router; gateway 0 has the higher priority.
type lab struct {
	*announcertest.Lab
	dirs [2]string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{Lab: announcertest.NewLab(t, vip, vip6, later)}
	for i := range l.dirs {
		l.dirs[i] = t.TempDir()
		t.Cleanup(func() { // keepalived outlives its starter
			if log, err := os.ReadFile(filepath.Join(l.dirs[i], "keepalived.log")); err == nil && t.Failed() {
				t.Logf("keepalived of gateway %d:\n%s", i, log)
			}
			if err := l.Gateways[i].Do(func() error { return vrrp.Cleanup(context.WithoutCancel(t.Context()), l.dirs[i]) }); err != nil {
				t.Error(err)
			}
		})
	}
	return l
}

// newPair returns a lab in which gateway 0 has vip and vip6, and gateway 1 is its backup.
func newPair(t *testing.T) *lab {
	t.Helper()
	l := newLab(t)
	l.begin(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.awaitHolder(t, 0, vip, vip6)
	return l
}

// begin starts a gateway's announcer and applies a state with VIPs.
func (l *lab) begin(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	l.Start(t, gateway, l.dirs[gateway], state(gateway, vips...))
}

// intervalMillis is between two advertisements. A backup takes over after missing three, so three are longer than a busy
// machine needs to reload keepalived.
const intervalMillis = 600

func state(gateway int, vips ...netip.Addr) *desired.State {
	return &desired.State{
		Cluster: "a", Group: "edge", Balancer: desired.NFTables,
		VRRP: &desired.VRRP{
			Interface: edge.Device, Source: edge.Gateways[gateway][0], Peers: []netip.Addr{edge.Gateways[1-gateway][0]},
			RouterID: 51, Priority: uint8(200 - gateway*100), IntervalMillis: intervalMillis,
		},
		VIPs: announcertest.VIPs(desired.ByVRRP, vips...),
	}
}

// awaitHolder waits until a gateway, and no other, has these VIPs.
func (l *lab) awaitHolder(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	announcertest.Eventually(t, func() string {
		for _, a := range vips {
			for i := range l.Announcers {
				has, err := l.Has(i, a)
				if err != nil {
					t.Fatal(err)
				}
				if has != (i == gateway) {
					return fmt.Sprintf("gateway %d has %s: %t, want gateway %d alone to have it", i, a, has, gateway)
				}
			}
		}
		return ""
	})
}

// mustLack fails the test if a gateway has one of these VIPs.
func (l *lab) mustLack(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	for _, a := range vips {
		if has, err := l.Has(gateway, a); err != nil || has {
			t.Errorf("gateway %d has %s: %t, %v", gateway, a, has, err)
		}
	}
}

// Two gateways in one virtual router keep the contract of announcers.
func TestAnnouncer(t *testing.T) {
	t.Parallel()
	announcertest.Contract(t, func(t *testing.T) announcertest.Group {
		t.Helper()
		l := newLab(t)
		return announcertest.Group{
			Lab: l.Lab, VIPs: [2]netip.Addr{vip, vip6}, Arguments: l.dirs, AtOnce: true,
			State:     func(gateway int) *desired.State { return state(gateway, vip, vip6) },
			Announces: l.Has,
		}
	})
}

// The backup takes all VIPs, of both families, when the master's cable is cut; the master takes them back afterwards.
func TestTakeover(t *testing.T) {
	t.Parallel()
	l := newPair(t)
	p, p6 := l.Probe(t, vip), l.Probe(t, vip6)
	announcertest.AwaitAnswers(t, p, 0)
	announcertest.AwaitAnswers(t, p6, 0)
	if err := l.Cut(0); err != nil {
		t.Fatal(err)
	}
	cut := time.Now()
	announcertest.AwaitAnswers(t, p, 1)
	announcertest.AwaitAnswers(t, p6, 1)
	if err := l.Mend(0); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 0, vip, vip6)
	announcertest.AwaitAnswers(t, p, 0)
	r := p.Stop()
	t.Logf("the backup answered %s after the cut; %s", r.From(1, cut).Sub(cut), r)
	p6.Stop()
	announced, drift, err := l.Announcers[0].Status()
	if err != nil || len(drift) > 0 || !reflect.DeepEqual(announced, []netip.Addr{vip, vip6}) {
		t.Errorf("the master announces %v, drift %v, %v", announced, drift, err)
	}
	if announced, drift, err = l.Announcers[1].Status(); err != nil || len(drift) > 0 || len(announced) > 0 {
		t.Errorf("the backup announces %v, drift %v, %v", announced, drift, err)
	}
}

// VIPs are added and removed on one gateway after another, and the agent restarts: the master stays the same, and no
// request to a remaining VIP is lost.
func TestReloadLosesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip)
	l.awaitHolder(t, 0, vip)
	l.begin(t, 1, vip)
	child, err := l.pid(0, "vrrp.pid")
	if err != nil {
		t.Fatal(err)
	}
	p := l.Probe(t, vip)
	announcertest.AwaitAnswers(t, p, 0)
	l.Apply(t, 1, state(1, later, vip, vip6))
	// The states differ for as long as a backup needs to miss a master.
	announcertest.AwaitAnswersAfter(t, p, 0, time.Now().Add(5*intervalMillis*time.Millisecond))
	l.Apply(t, 0, state(0, later, vip, vip6))
	l.awaitHolder(t, 0, vip, vip6, later)
	l.Apply(t, 0, state(0, vip))
	l.mustLack(t, 0, vip6, later) // removed when Apply returns
	l.Announcers[0].Kill()
	l.begin(t, 0, vip) // takes over the first one's keepalived
	if err := l.Announcers[0].Close(false); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 0, vip)
	announcertest.AwaitAnswers(t, p, 0)
	if r := p.Stop(); r.Lost() > 0 || r.By(1) > 0 {
		t.Errorf("%s, want all answered by gateway 0", r)
	}
	if now, err := l.pid(0, "vrrp.pid"); err != nil || now != child {
		t.Errorf("a reload replaced keepalived's process %d by %d, %v", child, now, err)
	}
}

// A killed keepalived leaves no VIP behind on two gateways, whether its agent lives or restarts.
func TestKilledKeepalivedLeavesNoVIP(t *testing.T) {
	t.Parallel()
	l := newPair(t)
	killed := l.killKeepalived(t, 0)
	announcertest.Eventually(t, func() string {
		if now, err := l.pid(0, "keepalived.pid"); err != nil || now == killed {
			return fmt.Sprintf("keepalived is %d still, %v", now, err)
		}
		return ""
	})
	l.awaitHolder(t, 0, vip, vip6) // preferred

	l.Announcers[0].Kill() // without a watch
	l.killKeepalived(t, 0)
	l.begin(t, 0) // without VIPs
	l.mustLack(t, 0, vip, vip6)
	l.awaitHolder(t, 1, vip, vip6)
}

// pid reads a process id from a file of a gateway.
func (l *lab) pid(gateway int, name string) (int, error) {
	content, err := os.ReadFile(filepath.Join(l.dirs[gateway], name))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(content)))
}

// killKeepalived kills both processes and returns the parent's id.
func (l *lab) killKeepalived(t *testing.T, gateway int) (parent int) {
	t.Helper()
	for _, name := range []string{"vrrp.pid", "keepalived.pid"} { // the child of a dead parent ends gracefully
		pid, err := l.pid(gateway, name)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		parent = pid
	}
	return parent
}

// handsOver drains gateway 0, which has these VIPs, and waits until the other one has them.
func (l *lab) handsOver(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	l.awaitHolder(t, 0, vips...)
	if err := l.Announcers[0].Close(true); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 1, vips...)
}

// Two virtual routers have different masters. Each gateway is the other's backup, and hands over only what it has.
func TestTwoRouters(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	// By default, the first gateway is preferred; in the further virtual router, the second one.
	sharing := func(gateway int) *desired.State {
		s := state(gateway, vip, vip6, later)
		s.VRRP.Routers = []desired.VirtualRouter{{RouterID: 52, Priority: uint8(100 + gateway*100)}}
		s.VIPs[slices.IndexFunc(s.VIPs, func(v desired.VIP) bool { return v.Addr == later })].RouterID = 52
		return s
	}
	l.begin(t, 0, vip, vip6, later)
	l.begin(t, 1, vip, vip6, later)
	l.awaitHolder(t, 0, vip, vip6, later)
	p, p6 := l.Probe(t, vip), l.Probe(t, vip6)
	announcertest.AwaitAnswers(t, p, 0)
	announcertest.AwaitAnswers(t, p6, 0)
	for i := range 2 {
		l.Apply(t, i, sharing(i))
	}
	shared := func() {
		t.Helper()
		l.awaitHolder(t, 0, vip, vip6)
		l.awaitHolder(t, 1, later)
		for i, want := range [][]netip.Addr{{vip, vip6}, {later}} {
			if announced, drift, err := l.Announcers[i].Status(); err != nil || len(drift) > 0 || !reflect.DeepEqual(announced, want) {
				t.Errorf("gateway %d announces %v, want %v; drift %v, %v", i, announced, want, drift, err)
			}
		}
	}
	shared()
	for _, probe := range []*edge.Probe{p, p6} { // their master has not changed
		if r := probe.Stop(); r.Lost() > 0 || r.By(1) > 0 {
			t.Errorf("%s, want all answered by gateway 0", r)
		}
	}
	p = l.Probe(t, later)
	announcertest.AwaitAnswers(t, p, 1)
	if err := l.Announcers[1].Close(true); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 0, vip, vip6, later)
	announcertest.AwaitAnswers(t, p, 0)
	l.Announcers[1].Kill()
	l.Start(t, 1, l.dirs[1], sharing(1))
	shared()
	announcertest.AwaitAnswers(t, p, 1)
	if r := p.Stop(); r.Lost() > 0 {
		t.Errorf("%s, want all answered", r)
	}
	if err := l.Cut(0); err != nil {
		t.Fatal(err)
	}
	announcertest.Eventually(t, func() string {
		for _, a := range []netip.Addr{vip, vip6, later} {
			if has, err := l.Has(1, a); err != nil || !has {
				return fmt.Sprintf("gateway 1 has %s: %t, %v", a, has, err)
			}
		}
		return ""
	})
}

// A single gateway has no peers until another one is added.
func TestSingleGateway(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0)
	alone := state(0, vip, vip6)
	alone.VRRP.Peers = nil
	l.Apply(t, 0, alone)
	l.awaitHolder(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.Apply(t, 0, state(0, vip, vip6))
	l.handsOver(t, vip, vip6)
}

// A master believes no advertisement of a higher priority from an address that is no peer's, nor one in a peer's name that a router has
// forwarded. Its backup believes none either.
func TestForgedAdvertisements(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		source netip.Addr
		ttl    byte
	}{"from a stranger": {edge.Router[0], 255}, "from a distance": {edge.Gateways[1][0], 254}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newPair(t)
			send := l.advertise(t, c.source, edge.Gateways[0][0], c.ttl)
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for range 40 { // longer than a backup waits for its master
				<-tick.C
				if err := send(); err != nil {
					t.Fatal(err)
				}
				if has, err := l.Has(0, vip); err != nil || !has {
					t.Fatalf("the master has the VIP: %t, %v", has, err)
				}
			}
			l.awaitHolder(t, 0, vip, vip6)
		})
	}
}

// advertise returns a function that sends an advertisement of the highest priority (RFC 9568 section 5.2) from the router.
func (l *lab) advertise(t *testing.T, source, to netip.Addr, ttl byte) (send func() error) {
	t.Helper()
	const vrrpProtocol = 112
	anchor := netip.MustParseAddr("169.254.255.51")
	message := []byte{0x31, 51, 255, 1, 0, 30, 0, 0}
	message = append(message, anchor.AsSlice()...)
	pseudo := slices.Concat(source.AsSlice(), to.AsSlice(), []byte{0, vrrpProtocol, 0, byte(len(message))}, message)
	sum := uint32(0)
	for i := 0; i < len(pseudo); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(pseudo[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(message[6:], ^uint16(sum>>16+sum))
	packet := slices.Concat([]byte{0x45, 0xc0, 0, byte(20 + len(message)), 0, 0, 0, 0, ttl, vrrpProtocol, 0, 0}, source.AsSlice(), to.AsSlice(), message)
	var fd int
	if err := l.Router.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return func() error { return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.As4()}) }
}

// Without a peer that takes the VIPs, a master withdraws them all the same.
func TestWithdrawalWithoutPeer(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 1, vip, vip6)
	l.awaitHolder(t, 1, vip, vip6)
	if err := l.Cut(0); err != nil {
		t.Fatal(err)
	}
	if err := l.Announcers[1].Close(true); err != nil {
		t.Fatal(err)
	}
	l.mustLack(t, 1, vip, vip6)
}

// An invalid state is refused with its field, and the previous one continues.
func TestRefusals(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip)
	l.awaitHolder(t, 0, vip)
	for field, spoil := range map[string]func(*desired.VRRP){
		"vrrp.interface": func(v *desired.VRRP) { v.Interface = "eth7" },
		"vrrp.source":    func(v *desired.VRRP) { v.Source = netip.MustParseAddr("10.99.0.77") },
		"vrrp":           func(v *desired.VRRP) { v.IntervalMillis = 90_000 }, // more than the protocol allows
	} {
		s := state(0, vip, vip6)
		spoil(s.VRRP)
		err := l.Announcers[0].Apply(s)
		var faults desired.Faults
		if !errors.As(err, &faults) || len(faults) != 1 || faults[0].Field != field || faults[0].Component != desired.ComponentVRRP {
			t.Errorf("%s: %v", field, err)
		}
	}
	l.awaitHolder(t, 0, vip)
	if _, drift, err := l.Announcers[0].Status(); err != nil || len(drift) > 0 {
		t.Errorf("drift %v, %v", drift, err)
	}
	if err := os.WriteFile(filepath.Join(l.dirs[0], "keepalived.conf"), []byte("# mine\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, drift, err := l.Announcers[0].Status(); err != nil || len(drift) != 1 || !strings.Contains(drift[0].Message, "was changed") {
		t.Errorf("drift %v, %v", drift, err)
	}
	l.Apply(t, 0, state(0, vip))
	if _, drift, err := l.Announcers[0].Status(); err != nil || len(drift) > 0 {
		t.Errorf("drift %v, %v", drift, err)
	}
}
