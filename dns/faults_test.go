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

// changing is a world of many Services of which hello.demo has the address of turn n.
func changing(n int64) *clusterset.Snapshot {
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

// asker sends questions at a pace and checks every answer.
type asker struct {
	conn     *net.UDPConn
	begun    atomic.Int64          // the turn that was last given to the server
	done     atomic.Int64          // the turn that was last taken by it
	pending  [1 << 16]atomic.Int64 // by ID: 1 more than the last turn when it was asked, 0 when nothing is asked
	answered atomic.Int64
}

// send asks n questions, perSecond each second.
func (a *asker) send(n, perSecond int) error {
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
				return fmt.Errorf("question %d: the one %d before has no answer", sent, 1<<16)
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

// receive takes n answers. Each must be of a turn that was so between its question and it.
func (a *asker) receive(n int) error {
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
		turn := int64(binary.BigEndian.Uint32(answer[size-4:size]) & 0xffffff)
		if asked == 0 || answer[3]&0x0f != wire.RcodeSuccess || turn < asked-1 || turn > a.begun.Load() {
			return fmt.Errorf("answer %d: asked in turn %d, it is of turn %d of %d: %x", a.answered.Load(), asked-1, turn, a.begun.Load(), answer[:size])
		}
		a.answered.Add(1)
	}
	return nil
}

// change gives the server another world, perSecond each second, until stop.
func (a *asker) change(t *testing.T, s *dns.Server, perSecond int, stop <-chan struct{}) error {
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
		if err := s.Sync(t.Context(), changing(n)); err != nil {
			return err
		}
		a.done.Store(n)
	}
}

// Twenty thousand questions a second while the world changes a hundred times a second: none is lost, and none is
// answered by what was no longer or not yet so. A million of them at full length.
func TestQuestionsDuringChanges(t *testing.T) {
	const pace, changes = 20_000, 100
	questions := pace
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		questions = 1_000_000
	}
	s, _ := startWith(t, dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: dns.DefaultTTL, Limits: dns.DefaultLimits})
	if err := s.Sync(t.Context(), changing(0)); err != nil {
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
	// What the client has no room for is not what the server lost.
	if failed := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) }); failed != nil || err != nil {
		t.Fatal(failed, err)
	}
	a := &asker{conn: conn}
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
		t.Errorf("the world changed %d times only", n)
	}
}

// A full disk costs the memory of changes, not answers; what was kept stays.
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
	if err := s.Sync(t.Context(), changing(1)); err != nil { // which is larger than what is left
		t.Fatal(err)
	}
	if have := ask(t, "udp", s.Status().Listen[0], wire.TypeA); strings.Join(have, " ") != "NOERROR 243.0.0.1" {
		t.Errorf("have %v", have)
	}
	stop()
	if err := s.Status().FileErr; err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("the disk is full: %v", err)
	}
	if left, err := filepath.Glob(cfg.File + "*"); err != nil || len(left) != 1 {
		t.Errorf("files: %v %v", left, err)
	}
	s, _ = startWith(t, cfg)
	if have := ask(t, "udp", s.Status().Listen[0], wire.TypeA); strings.Join(have, " ") != "NOERROR 243.0.0.1" {
		t.Errorf("after a restart: have %v", have)
	}
}
