// Package supervisor is the protocol between the lab and the first process of a machine, to start, stop and list the machine's
// components.
//
// The server side (Supervisor) runs as PID 1 of the machine, so it also reaps every orphan. The client side (Client) sends it
// one JSON request per connection over a unix socket, and receives one JSON reply. When the server dies, so do its PID
// namespace and every component.
package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"sort"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopGrace is the time between SIGTERM and SIGKILL.
const stopGrace = 10 * time.Second

// Component is one long-running program of a machine.
type Component struct {
	Name string
	Argv []string // Argv[0] is an absolute path
	Env  []string // the whole environment
	Log  string   // file that receives stdout and stderr, appended
}

// State is the state of a component that was started at least once.
type State struct {
	Name  string `json:"name"`
	Alive bool   `json:"alive"`
	PID   int    `json:"pid,omitempty"`  // in the machine's PID namespace
	Exit  string `json:"exit,omitempty"` // its exit status, if it is not alive
}

type request struct {
	Start *Component `json:",omitempty"`
	Stop  string     `json:",omitempty"`
}

// reply is the response to every request: the states after it.
type reply struct {
	States []State
	Err    string `json:",omitempty"`
}

// Supervisor starts and reaps processes. It must be the only caller of wait in its process.
type Supervisor struct {
	// mu is also held from fork to registration, so that a child that exits at once is registered when it is reaped.
	mu         sync.Mutex
	components map[string]*running
}

type running struct {
	State
	done chan struct{} // closed when the process is reaped
}

// New returns a Supervisor without components.
func New() *Supervisor {
	return &Supervisor{components: map[string]*running{}}
}

// Serve answers requests until the listener is closed. Every connection is served by a
// goroutine of its own, because a stop may take stopGrace.
func (s *Supervisor) Serve(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("accept on %s: %w", l.Addr(), err)
		}
		go s.answer(conn)
	}
}

// Reap reaps every dead child of this process. It does not return.
func (s *Supervisor) Reap() {
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, unix.SIGCHLD)
	for range sigs {
		for s.reapOne() {
		}
	}
}

func (s *Supervisor) reapOne() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	if errors.Is(err, unix.EINTR) {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	for _, c := range s.components {
		if c.Alive && c.PID == pid {
			c.Alive, c.PID = false, 0
			c.Exit = describe(status)
			close(c.done)
		}
	}
	return true
}

func describe(status unix.WaitStatus) string {
	if status.Signaled() {
		return "killed by " + unix.SignalName(status.Signal())
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus())
}

func (s *Supervisor) answer(conn net.Conn) {
	defer conn.Close()
	var req request
	if err := json.NewDecoder(conn).Decode(&req); err != nil {
		return // the client notices the closed connection
	}
	var err error
	switch {
	case req.Start != nil:
		err = s.start(*req.Start)
	case req.Stop != "":
		err = s.stop(req.Stop)
	}
	out := reply{States: s.states()}
	if err != nil {
		out.Err = err.Error()
	}
	json.NewEncoder(conn).Encode(out) //nolint:errcheck // a client that disconnected needs no reply
}

// start does nothing when the component is alive.
func (s *Supervisor) start(c Component) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.components[c.Name]; have != nil && have.Alive {
		return nil
	}
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", c.Name, err)
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	pid, err := syscall.ForkExec(c.Argv[0], c.Argv, &syscall.ProcAttr{
		Dir:   "/",
		Env:   c.Env,
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", c.Argv[0], err)
	}
	s.components[c.Name] = &running{State: State{Name: c.Name, Alive: true, PID: pid}, done: make(chan struct{})}
	return nil
}

// stop does nothing when the component is not alive.
func (s *Supervisor) stop(name string) error {
	s.mu.Lock()
	c := s.components[name]
	if c == nil || !c.Alive {
		s.mu.Unlock()
		return nil
	}
	pid := c.PID
	err := unix.Kill(pid, unix.SIGTERM)
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("stop %s: %w", name, err)
	}
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	select {
	case <-c.done:
		return nil
	case <-grace.C:
	}
	s.mu.Lock()
	if c.Alive {
		err = unix.Kill(pid, unix.SIGKILL)
	}
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("kill %s: %w", name, err)
	}
	<-c.done
	return nil
}

func (s *Supervisor) states() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]State, 0, len(s.components))
	for _, c := range s.components {
		all = append(all, c.State)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// Client talks to the Supervisor behind a unix socket.
type Client struct {
	Socket string
}

// Start starts the component unless it is alive.
func (c Client) Start(component Component) error {
	_, err := c.call(request{Start: &component})
	return err
}

// Stop ends the component and waits until it has ended. It succeeds if the component does not run.
func (c Client) Stop(name string) error {
	_, err := c.call(request{Stop: name})
	return err
}

// List returns every component that was started, sorted by name.
func (c Client) List() ([]State, error) {
	return c.call(request{})
}

// PID returns the supervisor's process ID in the caller's PID namespace. The kernel reports it for the listening socket, so it
// is never that of an earlier process.
func (c Client) PID() (int, error) {
	conn, err := net.Dial("unix", c.Socket) //nolint:noctx // a local socket: it answers or refuses at once
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(ctlErr, err); err != nil {
		return 0, fmt.Errorf("peer of %s: %w", c.Socket, err)
	}
	return int(cred.Pid), nil
}

func (c Client) call(req request) ([]State, error) {
	conn, err := net.Dial("unix", c.Socket) //nolint:noctx // a local socket: it answers or refuses at once
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(3 * stopGrace)); err != nil {
		return nil, err
	}
	if err := json.NewEncoder(conn).Encode(req); err != nil {
		return nil, fmt.Errorf("ask %s: %w", c.Socket, err)
	}
	var out reply
	if err := json.NewDecoder(conn).Decode(&out); err != nil {
		return nil, fmt.Errorf("answer of %s: %w", c.Socket, err)
	}
	if out.Err != "" {
		return nil, errors.New(out.Err)
	}
	return out.States, nil
}
