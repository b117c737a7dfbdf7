// Package pool lends API servers to the tests of several packages, one package after the other. A server takes seconds of CPU
// time to start, and much less to be made as new: its etcd gets back what it held before the first loan.
//
// [Listen] starts a pool that serves on a Unix socket, and [Borrow] takes a server from it. A server returns to its pool when
// the connection of its borrower ends, so that a killed test costs nothing.
package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/rpc"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

const (
	// Variable is the environment variable with the path of a pool's socket.
	Variable = "ISTHMUS_API_SERVERS"

	// service is the name of the RPC service of a session.
	service = "Server"

	// restTime is how long a server is left alone after it was made as new: caches of admission policies and rights are up to a
	// second behind etcd. Then it is paused.
	restTime = 2 * time.Second

	// maxIdle bounds the servers that wait for a borrower. One needs up to 800 MiB.
	maxIdle = 8
)

// Pool is a set of API servers. It starts one when a borrower comes and none is idle.
type Pool struct {
	dir, assets string
	starting    chan struct{} // holds one for each server that is starting
	listener    net.Listener
	sessions    sync.WaitGroup

	mu     sync.Mutex
	idle   []*server
	conns  map[net.Conn]bool
	closed bool
}

// Listen starts an empty pool, with its socket and the files of its servers in a temporary folder. assets is the folder of
// kube-apiserver and etcd. The caller closes the pool.
func Listen(ctx context.Context, assets string) (*Pool, error) {
	dir, err := os.MkdirTemp("", "isthmus-apitest-")
	if err != nil {
		return nil, err
	}
	p := &Pool{dir: dir, assets: assets, starting: make(chan struct{}, runtime.NumCPU()), conns: map[net.Conn]bool{}}
	var lc net.ListenConfig
	if p.listener, err = lc.Listen(ctx, "unix", p.Socket()); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for borrowers of API servers: %w", err), os.RemoveAll(dir))
	}
	p.sessions.Go(p.accept)
	return p, nil
}

// Socket is the path of the pool's socket.
func (p *Pool) Socket() string { return filepath.Join(p.dir, "socket") }

func (p *Pool) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		if !p.admit(conn) {
			return
		}
		p.sessions.Go(func() { p.serve(conn) })
	}
}

// admit notes a connection, so that Close can end it. It reports false when the pool is closed.
func (p *Pool) admit(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = conn.Close()
		return false
	}
	p.conns[conn] = true
	return true
}

// serve lends a server to one borrower until the connection ends.
func (p *Pool) serve(conn net.Conn) {
	s := &session{pool: p}
	calls := rpc.NewServer()
	if err := calls.RegisterName(service, s); err != nil {
		panic(err) // its methods are constant
	}
	calls.ServeConn(conn)
	p.mu.Lock()
	delete(p.conns, conn)
	p.mu.Unlock()
	if s.server != nil {
		p.takeBack(s.server)
	}
}

// takeBack makes a server as new and keeps it, or stops it if that fails or if there are enough.
func (p *Pool) takeBack(s *server) {
	if !p.wanted() {
		s.stop()
		return
	}
	if err := s.reset(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "API server is not used again:", err)
		s.stop()
		return
	}
	p.mu.Lock()
	s.since = time.Now()
	p.idle = append(p.idle, s)
	p.mu.Unlock()
	time.AfterFunc(restTime, func() { p.pause(s) })
	p.trim()
}

// pause pauses a server that is idle and has had its rest, which it lacks if it was borrowed and returned meanwhile.
func (p *Pool) pause(s *server) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.idle, s) || time.Since(s.since) < restTime {
		return
	}
	if err := s.Pause(); err != nil {
		fmt.Fprintln(os.Stderr, "API server is not paused:", err)
	}
}

// wanted reports whether the pool keeps one more server.
func (p *Pool) wanted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.idle) < p.limit()
}

// limit returns how many servers may be idle. The caller holds p.mu.
func (p *Pool) limit() int {
	if p.closed {
		return 0
	}
	return maxIdle
}

// trim stops the servers that are idle for longest, beyond the pool's limit.
func (p *Pool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.idle) > p.limit() {
		p.idle[0].stop()
		p.idle = p.idle[1:]
	}
}

// take returns an idle server with these CIDRs, or a new one.
func (p *Pool) take(ctx context.Context, cidrs []netip.Prefix) (*server, error) {
	for {
		s := p.takeIdle(cidrs)
		if s == nil {
			return p.start(ctx, cidrs)
		}
		<-time.After(time.Until(s.since.Add(restTime)))
		err := s.Resume(ctx)
		if err == nil {
			err = s.asNew(ctx)
		}
		if err == nil {
			return s, nil
		}
		fmt.Fprintln(os.Stderr, "API server is not used again:", err)
		s.stop()
	}
}

// start starts a server. One for each CPU starts at a time: more would take as long in all, and each of them longer.
func (p *Pool) start(ctx context.Context, cidrs []netip.Prefix) (*server, error) {
	p.starting <- struct{}{}
	defer func() { <-p.starting }()
	return start(ctx, p.dir, p.assets, cidrs)
}

// takeIdle takes the server that was idle for longest, nil for none.
func (p *Pool) takeIdle(cidrs []netip.Prefix) *server {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.idle, func(s *server) bool { return slices.Equal(s.cidrs, cidrs) })
	if i < 0 {
		return nil
	}
	s := p.idle[i]
	p.idle = slices.Delete(p.idle, i, i+1)
	return s
}

// Close ends all loans, stops all servers and removes their files.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	for conn := range p.conns {
		_ = conn.Close()
	}
	p.mu.Unlock()
	err := p.listener.Close()
	p.sessions.Wait()
	p.trim()
	return errors.Join(err, os.RemoveAll(p.dir))
}

// session is the RPC service of one borrower. Its methods are called one after the other.
type session struct {
	pool   *Pool
	server *server
}

// Access is how a borrower reaches a server, as its administrator.
type Access struct {
	Host, Token string
	CA          []byte // PEM
}

// Take takes a server of these Service CIDRs.
func (s *session) Take(cidrs []netip.Prefix, a *Access) error {
	if s.server != nil {
		return errors.New("a connection is for one server")
	}
	var err error
	if s.server, err = s.pool.take(context.Background(), cidrs); err == nil {
		*a = s.server.access()
	}
	return err
}

// Restart kills the API server and starts it again after a while.
func (s *session) Restart(away time.Duration, _ *struct{}) error {
	return s.server.Restart(context.Background(), away)
}

// Wipe gives the server an empty database with the kinds of Isthmus.
func (s *session) Wipe(_ struct{}, _ *struct{}) error { return s.server.wipe(context.Background()) }

// ServiceAccountKey returns the key that signs tokens of ServiceAccounts, as PEM.
func (s *session) ServiceAccountKey(_ struct{}, key *[]byte) (err error) {
	*key, err = s.server.ServiceAccountKey()
	return err
}

// Loan is a borrowed API server. Its methods are called by one goroutine at a time.
type Loan struct {
	client *rpc.Client
	access Access
}

// Borrow takes a server from the pool that serves on socket. The caller closes the loan.
func Borrow(ctx context.Context, socket string, cidrs []netip.Prefix) (*Loan, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("borrow an API server: %w", err)
	}
	l := &Loan{client: rpc.NewClient(conn)}
	if err := l.client.Call(service+".Take", cidrs, &l.access); err != nil {
		return nil, errors.Join(fmt.Errorf("borrow an API server: %w", err), l.client.Close())
	}
	return l, nil
}

// Config returns an administrator's configuration, which the caller may change.
func (l *Loan) Config() *rest.Config {
	return &rest.Config{Host: l.access.Host, BearerToken: l.access.Token, TLSClientConfig: rest.TLSClientConfig{CAData: l.access.CA}, QPS: -1}
}

// ServiceAccountKey returns the key that signs tokens of ServiceAccounts, as PEM.
func (l *Loan) ServiceAccountKey() (key []byte, err error) {
	err = l.client.Call(service+".ServiceAccountKey", struct{}{}, &key)
	return key, err
}

// Restart kills the API server, waits for a while, starts it again and waits until it is ready. Its etcd keeps running.
func (l *Loan) Restart(away time.Duration) error { return l.client.Call(service+".Restart", away, nil) }

// Wipe replaces the cluster behind the server's address by one that has only the kinds of Isthmus.
func (l *Loan) Wipe() error { return l.client.Call(service+".Wipe", struct{}{}, nil) }

// Close returns the server to its pool.
func (l *Loan) Close() error {
	if err := l.client.Close(); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("return an API server: %w", err)
	}
	return nil
}
