// Package program runs another program beside this one: what it says goes to a file, what it costs is read
// from the kernel, and it is ended by its own process id.
package program

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
)

const (
	// grace is how long a program may take to end before it is killed.
	grace = 20 * time.Second
	// tail is how much of a log an error shows, in bytes.
	tail = 2000
	// tick is the unit of times in /proc/PID/stat: USER_HZ, which is 100 on every Linux that Go runs on.
	tick = time.Second / 100
)

// Program is one that was started. It ends with this process at the latest.
type Program struct {
	name, log string
	cmd       *exec.Cmd
	ended     chan struct{} // closed when it has
	err       error         // why; read after ended
}

// Start starts the executable at path. Its output is appended to the file log, made where it is missing.
func Start(path, log string, args ...string) (*Program, error) {
	name := filepath.Base(path)
	out, err := os.OpenFile(log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer out.Close()                  // the child has its own
	cmd := exec.Command(path, args...) //nolint:noctx // it outlives this call; Stop ends it
	p := &Program{name: name, log: log, cmd: cmd, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	// Own process group: an interrupt from the terminal reaches us alone, and we stop things in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// The child dies with the thread that starts it, so that thread waits for it.
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
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

// PID returns the process id.
func (p *Program) PID() int { return p.cmd.Process.Pid }

// Ended is closed when the program has ended, asked or not.
func (p *Program) Ended() <-chan struct{} { return p.ended }

// Failure says that the program has ended, why, and the last it said. It may be called once Ended is closed.
func (p *Program) Failure() error {
	why := p.err
	if why == nil {
		why = errors.New("without an error")
	}
	return fmt.Errorf("%s ended, %w; it said last:\n%s", p.name, why, lastOf(p.log))
}

func lastOf(path string) []byte {
	content, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	return bytes.TrimSpace(content[max(0, len(content)-tail):])
}

// Stop asks the program to end and waits until it has. One that does not is killed, which is an error.
// Stopping what has ended already succeeds.
func (p *Program) Stop() error {
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
	return fmt.Errorf("%s did not end within %s and was killed", p.name, grace)
}

// Usage is what a program has taken so far.
type Usage struct {
	CPU       time.Duration // user and system
	RSS, Peak int64         // resident memory, bytes: now, and the most since the start or ForgetPeak
}

// Usage reads it from /proc.
func (p *Program) Usage() (Usage, error) {
	dir := filepath.Join("/proc", strconv.Itoa(p.PID()))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return Usage{}, fmt.Errorf("read the CPU time of %s: %w", p.name, err)
	}
	cpu, err := parseStat(string(stat))
	if err != nil {
		return Usage{}, fmt.Errorf("read the CPU time of %s: %w", p.name, err)
	}
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return Usage{}, fmt.Errorf("read the memory of %s: %w", p.name, err)
	}
	rss, peak, err := parseStatus(string(status))
	if err != nil {
		return Usage{}, fmt.Errorf("read the memory of %s: %w", p.name, err)
	}
	return Usage{CPU: cpu, RSS: rss, Peak: peak}, nil
}

// MachineCPU returns the CPU time that everything on this machine has taken since it started.
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

// ForgetPeak makes Usage.Peak start anew (clear_refs in proc_pid_clear_refs(5)).
func (p *Program) ForgetPeak() error {
	if err := os.WriteFile(filepath.Join("/proc", strconv.Itoa(p.PID()), "clear_refs"), []byte("5"), 0); err != nil {
		return fmt.Errorf("reset the peak memory of %s: %w", p.name, err)
	}
	return nil
}

// parseStat returns utime and stime of /proc/PID/stat, fields 14 and 15 of proc_pid_stat(5). The name of
// the program, field 2, stands in parentheses and may itself hold spaces and parentheses.
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

// parseStatus returns VmRSS and VmHWM of /proc/PID/status, in bytes.
func parseStatus(status string) (rss, peak int64, err error) {
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		var to *int64
		switch key {
		case "VmRSS":
			to = &rss
		case "VmHWM":
			to = &peak
		default:
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("status: %s: %w", key, err)
		}
		*to = kib << 10
	}
	if rss == 0 || peak == 0 {
		return 0, 0, errors.New("status names no memory; has the program ended?")
	}
	return rss, peak, nil
}
