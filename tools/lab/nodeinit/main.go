// Nodeinit is the first process of a lab machine, and the way onto it.
//
//	nodeinit spawn DIR          join the machine's cgroups and network, give birth to PID 1, leave
//	nodeinit init DIR           be PID 1: make the mounts, supervise components (only spawn calls it)
//	nodeinit enter DIR CMD ...  run CMD on the machine: its cgroups and all its namespaces
//	nodeinit visit DIR CMD ...  run CMD in all its namespaces, but in the caller's cgroups
//	nodeinit become CMD ...     turn into CMD, tied to the parent's life (only enter and visit call it)
//
// DIR is the machine's directory, see package machine. It is a program of its own, not a
// mode of the lab's, because tests and the demo drive the lab too and must find it under a
// path that outlives `go run` and `go test`.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/lab/internal/machine"
	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
)

// searchPath is the PATH on a machine: Debian's own programs, whatever the caller has.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func init() {
	// Namespaces belong to threads. main stays on the process's first one.
	runtime.LockOSThread()
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: nodeinit spawn|init DIR | nodeinit enter|visit DIR COMMAND [ARG...]")
		os.Exit(2)
	}
	var err error
	switch verb, dir := os.Args[1], os.Args[2]; verb {
	case "spawn":
		err = spawn(dir)
	case "init":
		err = boot(dir)
	case "enter":
		err = enter(dir, os.Args[3:], true)
	case "visit":
		err = enter(dir, os.Args[3:], false)
	case "become":
		err = become(os.Args[2:])
	default:
		err = fmt.Errorf("unknown verb %q", verb)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exitCode(exit))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "nodeinit:", err)
		os.Exit(1)
	}
}

// spawn starts "nodeinit init" as PID 1 of new namespaces. The cgroup namespace takes its
// root from where the parent is, so the parent joins the machine's cgroups first.
func spawn(dir string) error {
	spec, err := machine.Load(dir)
	if err != nil {
		return err
	}
	if err := machine.Join(spec.Cgroups); err != nil {
		return err
	}
	if err := setns(spec.Netns, unix.CLONE_NEWNET); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", "init", dir) //nolint:noctx // the machine outlives its caller
	cmd.Env = []string{"PATH=" + searchPath, "HOME=/root"}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
			unix.CLONE_NEWPID | unix.CLONE_NEWCGROUP,
	}
	// All programs of the machine inherit it: a dozen machines share a few CPUs (see process.Options).
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(time.Millisecond.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("set the timer slack: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("new namespaces: %w", err)
	}
	return cmd.Process.Release()
}

// boot is the life of PID 1. The kernel shields it from every signal sent inside.
func boot(dir string) error {
	spec, err := machine.Load(dir)
	if err != nil {
		return err
	}
	if err := mountAll(dir, spec); err != nil {
		return err
	}
	if err := setSysctls(); err != nil {
		return err
	}
	if machine.OnlyV2() {
		if err := machine.DelegateV2(context.Background()); err != nil {
			return err
		}
	}
	s := supervisor.New()
	go s.Reap()
	l, err := net.Listen("unix", machine.Socket(dir)) //nolint:noctx // for the life of the machine
	if err != nil {
		return err
	}
	return s.Serve(l)
}

// enter runs argv on the machine, in its cgroups if join says so, and returns its exit. The child
// is killed when this process dies, and gets the signals this process gets.
func enter(dir string, argv []string, join bool) error {
	if len(argv) == 0 {
		return errors.New("enter: no command given")
	}
	if err := dieWithParent(); err != nil {
		return err
	}
	spec, err := machine.Load(dir)
	if err != nil {
		return err
	}
	pid, err := supervisor.Client{Socket: machine.Socket(dir)}.PID()
	if err != nil {
		return fmt.Errorf("machine %s is not running: %w", spec.Name, err)
	}
	if join {
		if err := machine.Join(spec.Cgroups); err != nil {
			return err
		}
	}
	// A thread that shares its root and working directory may not change mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	target, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("machine %s: %w", spec.Name, err)
	}
	const all = unix.CLONE_NEWCGROUP | unix.CLONE_NEWIPC | unix.CLONE_NEWNET |
		unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWNS
	if err := unix.Setns(target, all); err != nil {
		return fmt.Errorf("enter machine %s: %w", spec.Name, err)
	}
	// Only children are in the PID namespace.
	cmd := exec.Command("/proc/self/exe", slices.Concat([]string{"become"}, argv)...) //nolint:noctx // dies with its parent
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)
	// A terminal sends ^C to the child itself.
	signal.Ignore(unix.SIGINT, unix.SIGQUIT)
	go func() {
		for s := range sigs {
			cmd.Process.Signal(s) //nolint:errcheck // the child may be gone
		}
	}()
	return cmd.Wait()
}

// become sets what SysProcAttr.Pdeathsig cannot: its check for a parent that died meanwhile
// misfires when the parent is outside the PID namespace.
func become(argv []string) error {
	if err := dieWithParent(); err != nil {
		return err
	}
	if err := os.Setenv("PATH", searchPath); err != nil {
		return err
	}
	program, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return syscall.Exec(program, argv, os.Environ())
}

func dieWithParent() error {
	return unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
}

// exitCode follows the shells: 128 and the signal for a command that was killed.
func exitCode(err *exec.ExitError) int {
	if status, ok := err.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return err.ExitCode()
}

func setns(path string, kind int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, kind); err != nil {
		return fmt.Errorf("enter namespace %s (%s): %w", path, strconv.Itoa(kind), err)
	}
	return nil
}
