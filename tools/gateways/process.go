package gateways

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// grace is how long a program may take to end.
const grace = 20 * time.Second

// programs are the programs of an installation.
var programs = []string{"isthmus-gateway", "isthmus-gateway-controller", "isthmusctl"}

// Build compiles programs of cmd/ into a folder.
func Build(ctx context.Context, dir string, names ...string) error {
	args := []string{"build", "-o", dir + "/"}
	for _, name := range names {
		args = append(args, "github.com/isthmus-net/isthmus/cmd/"+name)
	}
	if said, err := compile.Go(ctx, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", strings.Join(names, ", "), err, said)
	}
	return nil
}

// Process is a program in a network namespace. The caller ends it.
type Process struct {
	cmd     *exec.Cmd
	logPath string
	ended   chan struct{}
}

// Start starts a program. Its output is appended to a file.
func Start(ctx context.Context, ns *netlab.Namespace, log, program string, args ...string) (*Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p := &Process{cmd: exec.CommandContext(context.WithoutCancel(ctx), program, args...), logPath: log, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := ns.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	go func() {
		_ = p.cmd.Wait() // its state has the result
		close(p.ended)
	}()
	return p, nil
}

// Stop ends the program gracefully. The error has its exit status, and the end of its log.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

// Reload ends it as a reload of its unit does, for a successor to take over.
func (p *Process) Reload() error { return p.end(syscall.SIGHUP) }

func (p *Process) end(s syscall.Signal) error {
	if err := p.signal(s); err != nil {
		return err
	}
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("%s: %s\n%s", p.cmd.Path, p.cmd.ProcessState, p.Log())
	}
	return nil
}

// Kill ends the program as a crash does.
func (p *Process) Kill() error { return p.signal(syscall.SIGKILL) }

func (p *Process) signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(grace):
	}
	return errors.Join(fmt.Errorf("%s does not end within %s\n%s", p.cmd.Path, grace, p.Log()), p.cmd.Process.Kill())
}

// Runs reports whether the program still runs.
func (p *Process) Runs() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Memory returns the resident memory of the program in bytes (VmRSS of proc_pid_status(5)).
func (p *Process) Memory() (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	var kib uint64
	_, text, _ := bytes.Cut(b, []byte("VmRSS:"))
	if _, err := fmt.Sscan(string(text), &kib); err != nil {
		return 0, fmt.Errorf("memory of %s: %w", p.cmd.Path, err)
	}
	return kib << 10, nil
}

// CPUTime returns the CPU time that the program has taken (clock_getcpuclockid(3)).
func (p *Process) CPUTime() (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^p.cmd.Process.Pid)<<3|scheduled, &t); err != nil {
		return 0, fmt.Errorf("CPU time of %s: %w", p.cmd.Path, err)
	}
	return time.Duration(t.Nano()), nil
}

// Log returns the end of the program's log.
func (p *Process) Log() string {
	b, err := os.ReadFile(p.logPath)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-20):], []byte("\n")))
}
