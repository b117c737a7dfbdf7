package dns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
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
)

// server is a name server in a process of its own.
type server struct {
	name  string
	at    netip.AddrPort
	cmd   *exec.Cmd
	stdin io.Closer
	said  *logged   // what it wrote on standard error
	out   io.Reader // what it writes on standard output
	echo  bool      // what comes back is no answer
	// attached says that it ends with its standard input.
	attached bool
}

// start runs a program on one CPU, or on all when cpu is negative. Its standard input stays open until stop.
func start(ctx context.Context, name string, at netip.AddrPort, cpu int, program string, args ...string) (*server, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	s := &server{name: name, at: at, cmd: cmd, said: new(logged)}
	cmd.Stderr = s.said
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	s.stdin = stdin
	if s.out, err = cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := onCPU(cpu, cmd.Start); err != nil { // a child has the affinity of the thread that makes it
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return s, nil
}

// stop ends the server and says what went wrong with it, if anything.
func (s *server) stop() error {
	_ = s.stdin.Close()
	if !s.attached {
		_ = s.cmd.Process.Signal(syscall.SIGTERM) // fails only when it has ended, which Wait tells
	}
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", s.name, err, s.said)
	}
	return nil
}

// letRun lets those servers run that it is said of, and the others stand still.
func letRun(all map[string]*server, runs func(name string) bool) error {
	var errs []error
	for name, s := range all {
		signal := unix.SIGSTOP
		if runs(name) {
			signal = unix.SIGCONT
		}
		if err := s.cmd.Process.Signal(signal); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w\n%s", name, err, s.said))
		}
	}
	return errors.Join(errs...)
}

// logged keeps the end of what a program says. Safe for concurrent use.
type logged struct {
	mu   sync.Mutex
	text []byte
}

// Write is part of io.Writer.
func (l *logged) Write(b []byte) (int, error) {
	const enough = 4000
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	l.text = l.text[max(0, len(l.text)-enough):]
	return len(b), nil
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// logOutput keeps the end of what the server says on standard output as well.
func (s *server) logOutput() {
	go func() { _, _ = io.Copy(s.said, s.out) }() // ends with the process
}

// startLimit is how long a server may take until it answers.
const startLimit = 3 * time.Minute

// await asks a question until the answer is right, and returns when that was.
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
		select { // it has other work: to read all Services
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return time.Time{}, fmt.Errorf("wait for %s: %w: %w\n%s", s.name, ctx.Err(), last, s.said)
}

// cpuTime returns the CPU time that the process has used, its kernel time included.
func (s *server) cpuTime() (time.Duration, error) {
	// The clock of a process: clock_getcpuclockid(3) of the C library makes its number so.
	clock := int32(^s.cmd.Process.Pid<<3 | 2)
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		return 0, fmt.Errorf("read CPU clock of %s: %w", s.name, err)
	}
	return time.Duration(ts.Nano()), nil
}

// memory returns the resident memory of the process in bytes.
func (s *server) memory() (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		var kilobytes float64
		if size, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			_, err := fmt.Sscanf(size, "%f kB", &kilobytes)
			return kilobytes * 1024, err
		}
	}
	return 0, fmt.Errorf("no memory in /proc/%d/status", s.cmd.Process.Pid)
}

// onCPU calls f on a thread that runs on one CPU and before everything else there, or as any other when cpu is
// negative.
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

// twoCPUs returns the first and the last CPU that this process may use.
func twoCPUs() (first, last int, err error) {
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
	if first == last {
		return 0, 0, errors.New("measuring needs two CPUs, one for the server and one for its clients")
	}
	return first, last, nil
}

// build compiles a package of this module into dir, or what dir's module of a component calls its tool.
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
