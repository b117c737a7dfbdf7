// Package process runs programs as child processes: servers whose output goes to a file and whose CPU time and memory are read from the
// kernel ([Start]), and commands for their output ([Output]).
package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// grace is how long a process may take to exit before it is killed.
	grace = 20 * time.Second
	// tail is the size of the end of a log that errors quote, in bytes.
	tail = 2000
	// tick is the unit of times in /proc/PID/stat: USER_HZ, which is 100 on every Linux that Go runs on.
	tick = time.Second / 100
)

// Process is a child process. The kernel kills it when this process exits.
type Process struct {
	name, log string
	cmd       *exec.Cmd
	ended     chan struct{} // closed when the process has exited
	err       error         // of Wait; read it after ended is closed
}

// Start starts the executable at path. Its output is appended to the file log, which is created if it is missing.
func Start(path, log string, args ...string) (*Process, error) {
	return StartWith(Options{}, path, log, args...)
}

// Options change how a program runs. The zero value changes nothing.
type Options struct {
	// Env is the environment; nil means that of this process.
	Env []string
	// TimerSlack is how late the program's timers may be; 0 means as late as those of this process (prctl(2), PR_SET_TIMERSLACK).
	// Go's runtime polls every 20 us while a program is at work: with a slack of 1 ms, an API server beside others spends an
	// eighth less CPU time.
	TimerSlack time.Duration
}

// StartWith is Start with options.
func StartWith(o Options, path, log string, args ...string) (*Process, error) {
	name := filepath.Base(path)
	out, err := os.OpenFile(log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer out.Close()                  // the child has its own
	cmd := exec.Command(path, args...) //nolint:noctx // the process outlives this call; Stop ends it
	p := &Process{name: name, log: log, cmd: cmd, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Env = out, out, o.Env
	// A process group of its own: an interrupt from the terminal reaches this process only, which stops its children in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// Pdeathsig is sent when the starting thread exits, so that thread waits for the child.
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := withTimerSlack(o.TimerSlack, p.cmd.Start)
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// withTimerSlack calls start on this thread, with a timer slack that the process it starts inherits. 0 changes nothing. The
// goroutine must be locked to its thread.
func withTimerSlack(slack time.Duration, start func() error) error {
	if slack == 0 {
		return start()
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("set the timer slack: %w", err)
	}
	err := start()
	return errors.Join(err, unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0)) // 0 is the thread's own
}

// PID returns the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Ended is closed when the process has exited.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Failure returns an error with the exit status and the end of the log. Call it only after Ended is closed.
func (p *Process) Failure() error {
	why := p.err
	if why == nil {
		why = errors.New("without an error")
	}
	return fmt.Errorf("%s exited: %w; the end of its log:\n%s", p.name, why, lastOf(p.log))
}

func lastOf(path string) []byte {
	content, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	return bytes.TrimSpace(content[max(0, len(content)-tail):])
}

// Stop sends SIGTERM and waits until the process has exited. After 20 seconds it kills the process and returns an error.
// Stopping an exited process succeeds.
func (p *Process) Stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); errors.Is(err, os.ErrProcessDone) {
		<-p.ended
		return nil
	}
	late := time.NewTimer(grace)
	defer late.Stop()
	select {
	case <-p.ended:
		return nil
	case <-late.C:
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.ended
	return fmt.Errorf("%s did not exit within %s and was killed", p.name, grace)
}

// Usage is the CPU time and memory of a process.
type Usage struct {
	CPU       time.Duration // user and system
	RSS, Peak int64         // resident memory in bytes: current, and the maximum since the start or ResetPeak
}

// Usage returns the usage of the process so far, from /proc.
func (p *Process) Usage() (Usage, error) {
	dir := filepath.Join("/proc", strconv.Itoa(p.PID()))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return Usage{}, fmt.Errorf("read the CPU time of %s: %w", p.name, err)
	}
	cpu, err := parseStat(string(stat))
	if err != nil {
		return Usage{}, fmt.Errorf("read the CPU time of %s: %w", p.name, err)
	}
	memory, err := MemoryOf(p.PID())
	if err != nil {
		return Usage{}, fmt.Errorf("read the memory of %s: %w", p.name, err)
	}
	return Usage{CPU: cpu, RSS: memory.RSS, Peak: memory.Peak}, nil
}

// Memory is the resident memory of a process in bytes: all of it, its anonymous part, and the maximum of all of it.
type Memory struct{ RSS, Anonymous, Peak int64 }

// MemoryOf returns the memory of a process, from /proc.
func MemoryOf(pid int) (Memory, error) {
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return Memory{}, err
	}
	return parseStatus(string(status))
}

// MachineCPU returns the CPU time of all processes of this machine since it booted.
func MachineCPU() (time.Duration, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("read the CPU time of the machine: %w", err)
	}
	return parseMachine(string(stat))
}

// parseMachine adds up the first line of /proc/stat without idle and iowait, fields 4 and 5 of proc_stat(5),
// and without guests, which user includes.
func parseMachine(stat string) (time.Duration, error) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("read the CPU time of the machine: unexpected %q", line)
	}
	var total time.Duration
	for _, i := range []int{1, 2, 3, 6, 7, 8} { // user, nice, system, irq, softirq, steal
		ticks, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the CPU time of the machine: %w", err)
		}
		total += time.Duration(ticks) * tick
	}
	return total, nil
}

// ResetPeak restarts Usage.Peak (clear_refs in proc_pid_clear_refs(5)).
func (p *Process) ResetPeak() error {
	if err := os.WriteFile(filepath.Join("/proc", strconv.Itoa(p.PID()), "clear_refs"), []byte("5"), 0); err != nil {
		return fmt.Errorf("reset the peak memory of %s: %w", p.name, err)
	}
	return nil
}

// parseStat returns utime and stime of /proc/PID/stat, fields 14 and 15 of proc_pid_stat(5). The name of
// the program, field 2, is in parentheses and may itself contain spaces and parentheses.
func parseStat(stat string) (time.Duration, error) {
	_, rest, ok := cutLast(stat, ")")
	fields := strings.Fields(rest) // from field 3 on
	if !ok || len(fields) < 13 {
		return 0, fmt.Errorf("stat has too few fields: %q", stat)
	}
	var total time.Duration
	for _, text := range fields[11:13] {
		ticks, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("stat: %w", err)
		}
		total += time.Duration(ticks) * tick
	}
	return total, nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// parseStatus returns VmRSS, RssAnon and VmHWM of /proc/PID/status (proc_pid_status(5)), in bytes.
func parseStatus(status string) (m Memory, err error) {
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		var to *int64
		switch key {
		case "VmRSS":
			to = &m.RSS
		case "VmHWM":
			to = &m.Peak
		case "RssAnon":
			to = &m.Anonymous
		default:
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return Memory{}, fmt.Errorf("status: %s: %w", key, err)
		}
		*to = kib << 10
	}
	if m.RSS == 0 || m.Peak == 0 {
		return Memory{}, errors.New("status names no memory; has the process exited?")
	}
	return m, nil
}

// Pause stops the process until Resume: it keeps its memory and its connections, and gets no CPU time.
func (p *Process) Pause() error { return p.signal(syscall.SIGSTOP) }

// Resume lets a paused process go on.
func (p *Process) Resume() error { return p.signal(syscall.SIGCONT) }

func (p *Process) signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("send %s to %s: %w", s, p.name, err)
	}
	return nil
}

// Kill ends the process at once and waits until it has exited.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may have exited
	<-p.ended
}
