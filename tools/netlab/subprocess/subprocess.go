// Package subprocess runs an announcer of a gateway as a process in a network namespace, so that tests can kill and
// restart it. It takes states, and returns the announced VIPs and the drift.
package subprocess

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"sync"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Announcer is the announcer that runs: an agent.Announcer of the gateways.
type Announcer interface {
	Apply(ctx context.Context, s *desired.State) error
	Drift(ctx context.Context) ([]desired.Fault, error)
	Close(ctx context.Context, drain bool) error
	Announced() []netip.Addr
}

// childEnv marks a process that Start started; its value is the argument.
const childEnv = "ISTHMUS_NETLAB_ANNOUNCER"

// A request and a response are each a line of JSON.
type (
	request struct {
		State *desired.State `json:"state,omitempty"` // apply it
		Close *bool          `json:"close,omitempty"` // with drain or without
	}
	response struct {
		Error     string          `json:"error,omitempty"`
		Faults    []desired.Fault `json:"faults,omitempty"` // of Apply, or of Drift
		Announced []netip.Addr    `json:"announced,omitempty"`
	}
)

// Main must be the first call of a program that uses Start. In a child process of Start, it serves the announcer that
// newAnnouncer returns for Start's argument, and exits. In any other process it returns.
func Main(newAnnouncer func(argument string) Announcer) {
	argument, is := os.LookupEnv(childEnv)
	if !is {
		return
	}
	if err := serve(context.Background(), newAnnouncer(argument), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "announcer:", err)
		os.Exit(1)
	}
	os.Exit(0) // without Close, as a crash
}

func serve(ctx context.Context, p Announcer, in io.Reader, out io.Writer) error {
	questions, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var q request
		if err := questions.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		a := response{}
		var err error
		switch {
		case q.State != nil:
			err = p.Apply(ctx, q.State)
			_ = errors.As(err, (*desired.Faults)(&a.Faults))
		case q.Close != nil:
			err = p.Close(ctx, *q.Close)
		default:
			a.Announced = p.Announced()
			a.Faults, err = p.Drift(ctx)
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}

// Process is an announcer in its process. The caller ends it.
type Process struct {
	cmd *exec.Cmd

	mu  sync.Mutex
	in  io.WriteCloser
	out *json.Decoder
}

// Start runs program, which calls Main first, in ns.
func Start(ctx context.Context, ns *netlab.Namespace, program, argument string, stderr io.Writer) (*Process, error) {
	p := &Process{cmd: exec.CommandContext(context.WithoutCancel(ctx), program)}
	p.cmd.Env = append(os.Environ(), childEnv+"="+argument)
	p.cmd.Stderr = stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = json.NewDecoder(bufio.NewReader(out))
	if err := ns.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start an announcer: %w", err)
	}
	return p, nil
}

func (p *Process) ask(q request) (response, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := json.NewEncoder(p.in).Encode(q); err != nil {
		return response{}, fmt.Errorf("send a request to an announcer: %w", err)
	}
	var a response
	if err := p.out.Decode(&a); err != nil {
		return response{}, fmt.Errorf("read the response of an announcer: %w", err)
	}
	if len(a.Faults) > 0 && q.State != nil {
		return a, desired.Faults(a.Faults)
	}
	if a.Error != "" {
		return a, errors.New(a.Error)
	}
	return a, nil
}

// Apply calls Apply of the announcer.
func (p *Process) Apply(s *desired.State) error {
	_, err := p.ask(request{State: s})
	return err
}

// Status returns the results of Announced and Drift.
func (p *Process) Status() ([]netip.Addr, []desired.Fault, error) {
	a, err := p.ask(request{})
	return a.Announced, a.Faults, err
}

// Close calls Close of the announcer, and ends the process.
func (p *Process) Close(drain bool) error {
	_, err := p.ask(request{Close: &drain})
	return errors.Join(err, p.in.Close(), p.cmd.Wait())
}

// Kill ends the process as a crash does.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // reports the kill
}
