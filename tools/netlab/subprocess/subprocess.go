// Package part runs a part of a gateway that announces as a process of its own in a network namespace, because that is
// what is killed and restarted. States go in; what it announces and what drifts come out.
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

// Part is what is run: a gateway's agent.Announcer.
type Announcer interface {
	Apply(ctx context.Context, s *desired.State) error
	Drift(ctx context.Context) ([]desired.Fault, error)
	Close(ctx context.Context, drain bool) error
	Announced() []netip.Addr
}

// child tells a program that Start made it; its value is the argument.
const childEnv = "ISTHMUS_NETLAB_PART"

// A question and its answer are each a line of JSON.
type (
	question struct {
		State *desired.State `json:"state,omitempty"` // apply it
		Close *bool          `json:"close,omitempty"` // with drain or without
	}
	answer struct {
		Error     string          `json:"error,omitempty"`
		Faults    []desired.Fault `json:"faults,omitempty"` // of Apply, or the drift
		Announced []netip.Addr    `json:"announced,omitempty"`
	}
)

// Main is what a program that Start runs does first: it serves as the part that make makes of Start's argument, and
// exits, or returns when Start did not make it.
func Main(make func(argument string) Announcer) {
	argument, is := os.LookupEnv(childEnv)
	if !is {
		return
	}
	if err := serve(context.Background(), make(argument), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "part:", err)
		os.Exit(1)
	}
	os.Exit(0) // without a word to anybody
}

func serve(ctx context.Context, p Announcer, in io.Reader, out io.Writer) error {
	questions, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var q question
		if err := questions.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		a := answer{}
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

// Process is a part in its process. It is the caller's to end.
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
		return nil, fmt.Errorf("start a part: %w", err)
	}
	return p, nil
}

func (p *Process) ask(q question) (answer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := json.NewEncoder(p.in).Encode(q); err != nil {
		return answer{}, fmt.Errorf("ask a part: %w", err)
	}
	var a answer
	if err := p.out.Decode(&a); err != nil {
		return answer{}, fmt.Errorf("hear a part: %w", err)
	}
	if len(a.Faults) > 0 && q.State != nil {
		return a, desired.Faults(a.Faults)
	}
	if a.Error != "" {
		return a, errors.New(a.Error)
	}
	return a, nil
}

// Apply is the part's.
func (p *Process) Apply(s *desired.State) error {
	_, err := p.ask(question{State: s})
	return err
}

// Status returns what the part's Announced and Drift do.
func (p *Process) Status() ([]netip.Addr, []desired.Fault, error) {
	a, err := p.ask(question{})
	return a.Announced, a.Faults, err
}

// Close is the part's, and ends the process.
func (p *Process) Close(drain bool) error {
	_, err := p.ask(question{Close: &drain})
	return errors.Join(err, p.in.Close(), p.cmd.Wait())
}

// Kill ends the process as a crash does.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it was killed
}
