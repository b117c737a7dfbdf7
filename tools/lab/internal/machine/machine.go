// Package machine creates one machine of the lab: a set of Linux namespaces (mount, uts, ipc, pid, cgroup, net) and a cgroup in
// every hierarchy. One process, the program tools/lab/nodeinit, keeps them alive; it is PID 1 of the machine.
//
// In: a Spec and a directory that belongs to the machine. Out: a running machine whose components are started through
// Components. Kill ends every process in the machine and removes its cgroups, but not the directory.
package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
)

// startTimeout is the timeout for the creation of namespaces and mounts on a busy host.
const startTimeout = 30 * time.Second

// Spec is the configuration of a machine. Start writes it to the machine's directory, where nodeinit reads it.
type Spec struct {
	Name    string     // host name
	Group   string     // name of its cgroup, unique on the host
	Netns   string     // path of its network namespace, which must exist
	DNS     netip.Addr // written to its /etc/resolv.conf
	Cgroups []string   // its cgroup directories on the host, one per hierarchy; set by Start
}

// Machine is a handle on the directory of a machine, running or not.
type Machine struct {
	Dir  string
	Init string // the nodeinit executable
}

// Names of the files in a machine's directory.
const (
	specFile   = "machine.json"
	socketFile = "control.sock"
)

// Load reads the Spec that Start wrote to dir.
func Load(dir string) (Spec, error) {
	var s Spec
	raw, err := os.ReadFile(filepath.Join(dir, specFile))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("parse %s: %w", filepath.Join(dir, specFile), err)
	}
	return s, nil
}

// Socket returns the path of the socket of the supervisor of the machine in dir.
func Socket(dir string) string { return filepath.Join(dir, socketFile) }

// Components returns a client that starts and stops programs on the running machine.
func (m Machine) Components() supervisor.Client {
	return supervisor.Client{Socket: Socket(m.Dir)}
}

// LogFile returns the path of a component's log.
func (m Machine) LogFile(component string) string {
	return filepath.Join(m.Dir, "log", component+".log")
}

// Running reports whether the machine's first process answers.
func (m Machine) Running() bool {
	_, err := m.Components().List()
	return err == nil
}

// Start creates the machine and returns when its first process answers. It first removes the remains of an earlier machine in
// the same directory. It does nothing if the machine runs.
func (m Machine) Start(ctx context.Context, spec Spec) error {
	if m.Running() {
		return nil
	}
	if err := m.Kill(ctx, spec.Group); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(m.Dir, "log"), 0o755); err != nil {
		return err
	}
	var err error
	if spec.Cgroups, err = createCgroups(spec.Group); err != nil {
		return fmt.Errorf("cgroups of %s: %w", spec.Name, err)
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(m.Dir, specFile), raw, 0o644); err != nil {
		return err
	}
	logFile, err := os.OpenFile(m.LogFile("init"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	// "spawn" exits as soon as the machine's PID 1 exists, which inherits the log.
	cmd := exec.CommandContext(ctx, m.Init, "spawn", m.Dir)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start machine %s: %w: %s", spec.Name, err, m.lastWords())
	}
	if !poll(ctx, startTimeout, m.Running) {
		return fmt.Errorf("machine %s did not start: %s", spec.Name, m.lastWords())
	}
	return nil
}

func (m Machine) lastWords() string {
	raw, err := os.ReadFile(m.LogFile("init"))
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// Command returns a command that runs on the machine: in all its namespaces and cgroups, with its file system. The command dies
// with the caller.
func (m Machine) Command(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, m.Init, slices.Concat([]string{"enter", m.Dir}, argv)...)
}

// Visit is Command without the machine's cgroups, so that BPF hooks attached to them do not run for the command.
func (m Machine) Visit(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, m.Init, slices.Concat([]string{"visit", m.Dir}, argv)...)
}

// Kill ends every process of the machine and removes its cgroups: those recorded by Start, and those of the given name below
// the caller's own. It succeeds if they no longer exist.
func (m Machine) Kill(ctx context.Context, group string) error {
	dirs, err := cgroupDirs(group)
	if err != nil {
		return err
	}
	spec, err := Load(m.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	dirs = append(dirs, spec.Cgroups...)
	slices.Sort(dirs)
	dirs = slices.Compact(dirs)
	if err := removeCgroups(ctx, dirs); err != nil {
		return fmt.Errorf("end machine %s: %w", group, err)
	}
	if err := os.Remove(Socket(m.Dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// poll calls cond every 10 ms. It returns true when cond does, and false when the time or ctx has ended.
func poll(ctx context.Context, timeout time.Duration, cond func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
	return true
}

// Etc returns the directory with the machine's own files in /etc. Write files there before Start.
func (m Machine) Etc() string { return filepath.Join(m.Dir, "etc") }
