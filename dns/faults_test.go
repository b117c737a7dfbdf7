package dns_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// snapshotOf returns a snapshot of many Services in which the address of hello.demo encodes version n.
func snapshotOf(n int64) *clusterset.Snapshot {
	var v4 [4]byte
	binary.BigEndian.PutUint32(v4[:], uint32(n))
	v4[0] = 243
	s := hello(netip.AddrFrom4(v4).String())
	for i := range 200 {
		other := s.Services[0]
		other.Service.Name = fmt.Sprintf("other-%03d", i)
		s.Services = append(s.Services, other)
	}
	return s
}

// client sends questions at a constant rate and checks every answer.
type client struct {
	conn     *net.UDPConn
	begun    atomic.Int64          // the last version passed to Sync
	done     atomic.Int64          // the last version that Sync applied
	pending  [1 << 16]atomic.Int64 // by ID: 1 plus the applied version when the question was sent; 0 if none is pending
	answered atomic.Int64
}

// send sends n questions at a rate.
func (a *client) send(n, perSecond int) error {
	query, err := new(wire.Msg).SetQuestion("hello.demo.svc.clusterset.local.", wire.TypeA).Pack()
	if err != nil {
		return err
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	begin := time.Now()
	for sent := 0; sent < n; {
		for due := min(n, int(time.Since(begin).Seconds()*float64(perSecond))); sent < due; sent++ {
			if a.pending[uint16(sent)].Swap(a.done.Load()+1) != 0 {
				return fmt.Errorf("question %d: the question %d before it has no answer", sent, 1<<16)
			}
			binary.BigEndian.PutUint16(query, uint16(sent))
			if _, err := a.conn.Write(query); err != nil {
				return err
			}
		}
		<-tick.C
	}
	return nil
}

// receive reads n answers. Each must have a version that was current at some time between question and answer.
func (a *client) receive(n int) error {
	answer := make([]byte, 512)
	for range n {
		if err := a.conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		size, err := a.conn.Read(answer)
		if err != nil {
			return fmt.Errorf("after %d answers: %w", a.answered.Load(), err)
		}
		asked := a.pending[binary.BigEndian.Uint16(answer)].Swap(0)
		version := int64(binary.BigEndian.Uint32(answer[size-4:size]) & 0xffffff)
		if asked == 0 || answer[3]&0x0f != wire.RcodeSuccess || version < asked-1 || version > a.begun.Load() {
			return fmt.Errorf("answer %d: asked at version %d, it has version %d of %d: %x", a.answered.Load(), asked-1, version, a.begun.Load(), answer[:size])
		}
		a.answered.Add(1)
	}
	return nil
}

// change syncs new snapshots at a rate until stop is closed.
func (a *client) change(t *testing.T, s *dns.Server, perSecond int, stop <-chan struct{}) error {
	t.Helper()
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	for n := int64(1); ; n++ {
		select {
		case <-stop:
			return nil
		case <-tick.C:
		}
		a.begun.Store(n)
		if err := s.Sync(t.Context(), snapshotOf(n)); err != nil {
			return err
		}
		a.done.Store(n)
	}
}

// 20,000 questions per second while the snapshot changes 100 times per second: none is lost, and no answer is outdated or
// premature. At full length there are a million questions.
func TestQuestionsDuringChanges(t *testing.T) {
	const pace, changes = 20_000, 100
	questions := pace
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		questions = 1_000_000
	}
	s, _ := startWith(t, dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: dns.DefaultTTL, Limits: dns.DefaultLimits})
	if err := s.Sync(t.Context(), snapshotOf(0)); err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(s.Status().Listen[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	netlab.Privileged(t)
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// A question that the client drops must not look like one that the server lost.
	if failed := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) }); failed != nil || err != nil {
		t.Fatal(failed, err)
	}
	a := &client{conn: conn}
	stop := make(chan struct{})
	var group errgroup.Group
	group.Go(func() error { return a.change(t, s, changes, stop) })
	group.Go(func() error { return a.send(questions, pace) })
	group.Go(func() error {
		defer close(stop)
		return a.receive(questions)
	})
	err = group.Wait()
	if dropped := s.Status().Counts.Dropped; err != nil || dropped > 0 {
		t.Errorf("%d of %d questions were answered, %d dropped: %v", a.answered.Load(), questions, dropped, err)
	}
	if n := s.Status().Updates.Count; n < uint64(questions/pace*changes/4) {
		t.Errorf("the snapshot changed only %d times", n)
	}
}

// With a full disk, changes are answered and not saved; the file saved before stays.
func TestFullDisk(t *testing.T) {
	netlab.Privileged(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	cfg := dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: dns.DefaultTTL, File: filepath.Join(dir, "zone")}
	s, stop := startWith(t, cfg)
	if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := os.WriteFile(filepath.Join(dir, "other"), make([]byte, 50<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	s, stop = startWith(t, cfg)
	if err := s.Sync(t.Context(), snapshotOf(1)); err != nil { // larger than the space left
		t.Fatal(err)
	}
	if have := ask(t, "udp", s.Status().Listen[0], wire.TypeA); strings.Join(have, " ") != "NOERROR 243.0.0.1" {
		t.Errorf("have %v", have)
	}
	stop()
	if err := s.Status().FileErr; err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("want an error about the full disk, have %v", err)
	}
	if left, err := filepath.Glob(cfg.File + "*"); err != nil || len(left) != 1 {
		t.Errorf("files: %v %v", left, err)
	}
	s, _ = startWith(t, cfg)
	if have := ask(t, "udp", s.Status().Listen[0], wire.TypeA); strings.Join(have, " ") != "NOERROR 243.0.0.1" {
		t.Errorf("after a restart: have %v", have)
	}
}
