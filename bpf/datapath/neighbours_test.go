package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The fields of struct bpf_sock_addr that these tests use.
const (
	userIP4  = 4
	userPort = 24 // network order, in the lower half
)

// rewriting is another vendor's socket load balancer: it redirects connects from one address to another, and leaves all
// others alone.
func rewriting(t *testing.T, from, to netip.AddrPort) *ebpf.Program {
	t.Helper()
	addr := func(a netip.AddrPort) int32 { b := a.Addr().As4(); return int32(binary.NativeEndian.Uint32(b[:])) }
	port := func(a netip.AddrPort) int32 {
		return int32(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, a.Port())))
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "their_lb", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R1, asm.R6, userIP4, asm.Word),
			asm.Mov.Imm32(asm.R2, addr(from)),
			asm.JNE.Reg(asm.R1, asm.R2, "out"),
			asm.LoadMem(asm.R1, asm.R6, userPort, asm.Word),
			asm.JNE.Imm(asm.R1, port(from), "out"),
			asm.Mov.Imm32(asm.R1, addr(to)),
			asm.StoreMem(asm.R6, userIP4, asm.R1, asm.Word),
			asm.Mov.Imm32(asm.R1, port(to)),
			asm.StoreMem(asm.R6, userPort, asm.R1, asm.Word),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// Another vendor's load balancer on the same hook serves its addresses and ours serves VIPs, in either order and with
// either kind of attachment. A VIP whose backend is one of their addresses is served if theirs runs after ours: each sees
// the address that the one before it has written.
func TestBesideAnotherSocketBalancer(t *testing.T) {
	service := netip.MustParseAddrPort("10.96.0.10:80") // theirs
	vip, chained := netip.MustParseAddrPort("243.0.0.5:80"), netip.MustParseAddrPort("243.0.0.6:80")
	attachments := map[string]func(t *testing.T, cgroup string, p *ebpf.Program){
		"link": func(t *testing.T, cgroup string, p *ebpf.Program) {
			t.Helper()
			l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupInet4Connect, Program: p})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
		},
		"without a link": func(t *testing.T, cgroup string, p *ebpf.Program) {
			t.Helper()
			dir, err := os.Open(cgroup)
			if err != nil {
				t.Fatal(err)
			}
			how := link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInet4Connect, Flags: unix.BPF_F_ALLOW_MULTI}
			if err := link.RawAttachProgram(how); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: how.Target, Program: p, Attach: how.Attach})
				if err := errors.Join(err, dir.Close()); err != nil {
					t.Error(err)
				}
			})
		},
	}
	for kind, attach := range attachments {
		for when, first := range map[string]bool{"before ours": true, "after ours": false} {
			t.Run(kind+" "+when, func(t *testing.T) {
				cfg := testConfig(t)
				server := listen(t)
				theirs := rewriting(t, service, server)
				if first {
					attach(t, cfg.CgroupRoot, theirs)
				}
				want := servedBy(server.Addr())
				want.Backends[1] = lb.Backend{Address: lb.Address{AddrPort: server, Protocol: clusterset.TCP}, Cluster: 1}
				want.Backends[2] = lb.Backend{Address: lb.Address{AddrPort: service, Protocol: clusterset.TCP}, Cluster: 1}
				want.Frontends[lb.Address{AddrPort: chained, Protocol: clusterset.TCP}] = lb.Frontend{ID: 2, Count: 1}
				want.Slots[lb.Slot{Frontend: 2}] = 2
				upgrade(t, cfg, currentVersion(t), want)
				if !first {
					attach(t, cfg.CgroupRoot, theirs)
				}
				for to, ok := range map[netip.AddrPort]bool{service: true, vip: true, chained: !first} {
					peer, err := peerOf(to)
					if (err == nil) != ok {
						t.Errorf("connect to %s: %v, want success: %v", to, err, ok)
					}
					// For the chained VIP, theirs would have to translate the peer's name back.
					if to == vip && peer != vip {
						t.Errorf("the peer of a connection to %s is %s", to, peer)
					}
				}
				if err := Remove(cfg); err != nil {
					t.Fatal(err)
				}
				if _, err := peerOf(service); err != nil {
					t.Errorf("after ours went, theirs: %v", err)
				}
				if _, err := peerOf(vip); !errors.Is(err, unix.ENETUNREACH) {
					t.Errorf("after ours went, the VIP: %v", err)
				}
			})
		}
	}
}

// listen accepts connections on loopback until the test ends.
func listen(t *testing.T) netip.AddrPort {
	t.Helper()
	config := &net.ListenConfig{}
	config.SetMultipathTCP(false)
	l, err := config.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return netip.MustParseAddrPort(l.Addr().String())
}

// peerOf connects and returns the socket's peer address.
func peerOf(to netip.AddrPort) (netip.AddrPort, error) {
	c, err := net.Dial("tcp4", to.String())
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer c.Close()
	return netip.MustParseAddrPort(c.RemoteAddr().String()), nil
}

// The error names a program that holds a hook exclusively above the node's cgroup.
func TestOccupiedAboveIsNamed(t *testing.T) {
	cfg := testConfig(t)
	above := cfg.CgroupRoot
	cfg.CgroupRoot = filepath.Join(above, "node")
	if err := os.Mkdir(cfg.CgroupRoot, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(cfg.CgroupRoot) })
	dir, err := os.Open(above)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	anywhere := netip.MustParseAddrPort("192.0.2.1:1")
	alone := link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: rewriting(t, anywhere, anywhere), Attach: ebpf.AttachCGroupInet4Connect}
	if err := link.RawAttachProgram(alone); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if says := fmt.Sprint(err); !errors.Is(err, ErrOccupied) || !strings.Contains(says, "their_lb") || !strings.Contains(says, "attached exclusively to "+above+";") {
		t.Errorf("Open: %v; it must name the program and %s", err, above)
	}
	if files := pinned(t, cfg); len(files) > 0 {
		t.Errorf("left behind: %v", files)
	}
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: alone.Target, Program: alone.Program, Attach: alone.Attach}); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, cfg)
}
