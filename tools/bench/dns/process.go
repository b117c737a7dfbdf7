package dns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/process"
)

// server is a name server in a separate process.
type server struct {
	name  string
	at    netip.AddrPort
	cmd   *exec.Cmd
	stdin io.Closer
	log   *logTail  // the end of its standard error
	out   io.Reader // its standard output
	echo  bool      // it sends questions back
	// attached means that it exits when its standard input closes.
	attached bool
}

// start runs a program on one CPU, or on all if cpu is negative. Its standard input stays open until stop.
func start(ctx context.Context, name string, at netip.AddrPort, cpu int, program string, args ...string) (*server, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	s := &server{name: name, at: at, cmd: cmd, log: new(logTail)}
	cmd.Stderr = s.log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	s.stdin = stdin
	if s.out, err = cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := onCPU(cpu, cmd.Start); err != nil { // a child inherits the affinity of the thread that starts it
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return s, nil
}

// stop ends the server and returns its error.
func (s *server) stop() error {
	_ = s.stdin.Close()
	if !s.attached {
		_ = s.cmd.Process.Signal(syscall.SIGTERM) // fails only if the process has exited, and Wait returns why
	}
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", s.name, err, s.log)
	}
	return nil
}

// letRun continues the servers for which runs returns true and stops the others.
func letRun(all map[string]*server, runs func(name string) bool) error {
	var errs []error
	for name, s := range all {
		signal := unix.SIGSTOP
		if runs(name) {
			signal = unix.SIGCONT
		}
		if err := s.cmd.Process.Signal(signal); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w\n%s", name, err, s.log))
		}
	}
	return errors.Join(errs...)
}

// logTail keeps the end of a program's output. It is safe for concurrent use.
type logTail struct {
	mu   sync.Mutex
	text []byte
}

// Write appends b and drops the beginning of longer output.
func (l *logTail) Write(b []byte) (int, error) {
	const enough = 4000
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	l.text = l.text[max(0, len(l.text)-enough):]
	return len(b), nil
}

func (l *logTail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// logOutput adds the server's standard output to the log.
func (s *server) logOutput() {
	go func() { _, _ = io.Copy(s.log, s.out) }() // ends with the process
}

// startLimit is the time that a server has until it answers.
const startLimit = 3 * time.Minute

// await repeats a question until the answer is correct, and returns the time of that answer.
func (s *server) await(ctx context.Context, q names.Question) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "udp", s.at.String())
	if err != nil {
		return time.Time{}, err
	}
	defer conn.Close()
	answer := make([]byte, answerSize)
	last := errors.New("nothing listens")
	for ctx.Err() == nil {
		if err := conn.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
			return time.Time{}, err
		}
		_, _ = conn.Write(q.Wire) // refused while nothing listens
		n, err := conn.Read(answer)
		if err != nil {
			continue
		}
		if last = check(answer[:n], &q); s.echo || last == nil {
			return time.Now(), nil
		}
		select { // leave the CPU to the server, which still reads its objects
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return time.Time{}, fmt.Errorf("wait for %s: %w: %w\n%s", s.name, ctx.Err(), last, s.log)
}

// cpuTime returns the CPU time that the process has used, its kernel time included.
func (s *server) cpuTime() (time.Duration, error) {
	// The CPU clock of a process, as clock_getcpuclockid(3) of the C library computes it.
	clock := int32(^s.cmd.Process.Pid<<3 | 2)
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		return 0, fmt.Errorf("read CPU clock of %s: %w", s.name, err)
	}
	return time.Duration(ts.Nano()), nil
}

// memory returns the resident memory of the process in bytes.
func (s *server) memory() (float64, error) {
	m, err := process.MemoryOf(s.cmd.Process.Pid)
	return float64(m.RSS), err
}

// onCPU calls f on a thread that is pinned to one CPU and has the highest priority there. A negative cpu means an ordinary
// thread.
func onCPU(cpu int, f func() error) error {
	if cpu < 0 {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("read CPU affinity: %w", err)
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("pin to one CPU: %w", err)
	}
	tid := unix.Gettid()
	if err := unix.Setpriority(unix.PRIO_PROCESS, tid, -20); err != nil {
		return fmt.Errorf("raise priority: %w", err)
	}
	return errors.Join(f(), unix.Setpriority(unix.PRIO_PROCESS, tid, 0), unix.SchedSetaffinity(0, &before))
}

// outerCPUs returns the first and the last CPU that this process may use; with one CPU they are the same.
func outerCPUs() (first, last int, err error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return 0, 0, fmt.Errorf("read CPU affinity: %w", err)
	}
	first = -1
	for cpu := range int(unsafe.Sizeof(allowed)) * 8 {
		if !allowed.IsSet(cpu) {
			continue
		}
		if first < 0 {
			first = cpu
		}
		last = cpu
	}
	return first, last, nil
}

// build compiles a package of the module in folder module to out. The package "tool" is that module's tool.
func build(ctx context.Context, module, pkg, out string) error {
	cmd := compile.Go(ctx, "build", "-o", out, pkg)
	cmd.Dir = module
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, output)
	}
	return nil
}

// moduleDir returns the folder of this module.
func moduleDir(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find this module: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}
