package nft

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

// serve answers on all backends with the backend and the client's address there. A TCP client first names what it wants:
// "echo" of each line, an endless "download" of timestamps, or "upload".
func (w *testbed) serve() *servers {
	w.t.Helper()
	s := &servers{uploaded: map[string]chan int{}, served: map[string]*served{}}
	for family := range familyNames {
		for n := 1; n <= backendCount; n++ {
			at := netip.AddrPortFrom(backendAddr(family, n), backendPort).String()
			in(w.t, w.servers, func() error {
				l, err := net.Listen("tcp", at)
				if err != nil {
					return err
				}
				w.t.Cleanup(func() { _ = l.Close() })
				go s.accept(l)
				p, err := net.ListenPacket("udp", at)
				if err != nil {
					return err
				}
				w.t.Cleanup(func() { _ = p.Close() })
				go echo(p)
				return nil
			})
		}
	}
	return s
}

type servers struct {
	mu       sync.Mutex
	uploaded map[string]chan int // by client: received bytes
	served   map[string]*served  // by backend and client
}

// served is a connection at the backend.
type served struct {
	*net.TCPConn
	ended chan error // the error that ended reading
}

// of returns the backend's end of a flow.
func (s *servers) of(f *flow) *served {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.served[f.backend+" "+f.shown]
}

// uploadOf returns the counter of a client's uploaded bytes.
func (s *servers) uploadOf(client string) chan int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uploaded[client] == nil {
		s.uploaded[client] = make(chan int, 1<<10)
	}
	return s.uploaded[client]
}

func echo(p net.PacketConn) {
	b := make([]byte, 1500)
	for {
		_, from, err := p.ReadFrom(b)
		if err != nil {
			return
		}
		_, _ = p.WriteTo([]byte(p.LocalAddr().String()+" "+from.String()), from)
	}
}

func (s *servers) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go s.talk(c)
	}
}

func (s *servers) talk(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	wish, err := r.ReadString('\n')
	if err != nil {
		return
	}
	who := fmt.Sprint(c.LocalAddr(), " ", c.RemoteAddr())
	is := &served{c.(*net.TCPConn), make(chan error, 1)}
	s.mu.Lock()
	s.served[who] = is
	s.mu.Unlock()
	fmt.Fprintln(c, who)
	switch wish {
	case "download\n":
		for tick := time.NewTicker(5 * time.Millisecond); ; <-tick.C {
			if _, err := fmt.Fprintln(c, time.Now().UnixNano()); err != nil {
				return
			}
		}
	case "upload\n":
		b := make([]byte, 1<<10)
		for {
			n, err := r.Read(b)
			if err != nil {
				return
			}
			s.uploadOf(c.RemoteAddr().String()) <- n
		}
	default:
		_, err := io.Copy(c, r)
		is.ended <- err
	}
}
