// Package machine makes one machine of the lab: a set of Linux namespaces (mount, uts,
// ipc, pid, cgroup, net) with a cgroup of its own in every hierarchy, held open by one
// process, the program tools/lab/nodeinit, which is PID 1 in there.
//
// In: a Spec and a directory that belongs to the machine. Out: a running machine whose
// components are started through Components. Kill ends every process of it, however it
// came there, and removes its cgroups; the directory is the caller's.
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

// startTimeout bounds the making of namespaces and mounts, on a busy machine too.
const startTimeout = 30 * time.Second

// Spec is what a machine is made of. It is kept in the machine's directory, where
// nodeinit reads it.
type Spec struct {
	Name    string     // host name
	Group   string     // name of its cgroup, unique on the host
	Netns   string     // path of its network namespace, which exists
	DNS     netip.Addr // written to its /etc/resolv.conf
	Cgroups []string   // its cgroup directories on the host, one a hierarchy; filled by Start
}

// Machine is a handle on a directory that may or may not hold a running machine.
type Machine struct {
	Dir  string
	Init string // the nodeinit executable
}

// Names of the files in a machine's directory.
const (
	specFile   = "machine.json"
	socketFile = "control.sock"
)

// Load reads the Spec that Start left in dir.
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

// Socket is where the supervisor of the machine in dir listens.
func Socket(dir string) string { return filepath.Join(dir, socketFile) }

// Components starts and stops programs on the running machine.
func (m Machine) Components() supervisor.Client {
	return supervisor.Client{Socket: Socket(m.Dir)}
}

// LogFile is where a component of that name writes.
func (m Machine) LogFile(component string) string {
	return filepath.Join(m.Dir, "log", component+".log")
}

// Running says whether the machine's first process answers.
func (m Machine) Running() bool {
	_, err := m.Components().List()
	return err == nil
}

// Start makes the machine and returns when its first process answers. Leftovers of an
// earlier one in the same directory are cleared first. A running machine is left alone.
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
	// "spawn" leaves as soon as PID 1 of the machine is born; it inherits the log.
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

// Command returns a command that will run on the machine: in all its namespaces and in
// its cgroups, with the machine's file system. It dies with the caller.
func (m Machine) Command(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, m.Init, slices.Concat([]string{"enter", m.Dir}, argv)...)
}

// Visit is Command without the machine's cgroups: hooks attached there do not see it.
func (m Machine) Visit(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, m.Init, slices.Concat([]string{"visit", m.Dir}, argv)...)
}

// Kill ends every process of the machine and removes its cgroups, those recorded by
// Start and those of the given name below the caller's own. What is gone already is fine.
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

// poll asks cond every 10 ms until it holds (true), or the time or ctx is over (false).
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

// Etc holds the machine's own files in /etc. Files are put there before Start.
func (m Machine) Etc() string { return filepath.Join(m.Dir, "etc") }
