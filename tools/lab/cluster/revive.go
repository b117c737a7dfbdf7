package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/lab/internal/machine"
	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
)

// A component that keeps ending is not restarted faster, nor more often in one bring-up.
const (
	reviveInterval = time.Second
	reviveLimit    = 10
)

// revival starts again what ended by itself during the bring-up of one cluster, as an init
// system would: on a busy machine the kubelet gives up on a containerd that has not opened
// its CRI yet, and the controllers on an API server that is slow. It belongs to one goroutine.
type revival struct {
	say   func(format string, args ...any)
	tries map[string]tries // by log file
}

type tries struct {
	restarts int
	last     time.Time // of the latest restart
}

// supervised is a machine's supervisor.
type supervised interface {
	List() ([]supervisor.State, error)
	Start(supervisor.Component) error
}

// hopelessError ends a wait at once.
type hopelessError struct{ error }

func (e hopelessError) Unwrap() error { return e.error }

func (l *Lab) newRevival() *revival {
	return &revival{say: l.step, tries: map[string]tries{}}
}

// revive looks once at components of a machine. The error names those that were found
// dead, restarted or not; it is a hopelessError when one of them is given up.
func (r *revival) revive(machineName string, host supervised, components []supervisor.Component) error {
	states, err := host.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range components {
		for _, s := range states {
			if s.Name == c.Name && !s.Alive {
				errs = append(errs, r.restart(machineName, host, c, s))
			}
		}
	}
	return errors.Join(errs...)
}

// restart starts a dead component, now or at a later call. It always returns an error.
func (r *revival) restart(machineName string, host supervised, c supervisor.Component, s supervisor.State) error {
	t := r.tries[c.Log]
	if t.restarts >= reviveLimit {
		return hopelessError{fmt.Errorf("gave up after %d restarts: %w", t.restarts, ended(machineName, c, s))}
	}
	if t.restarts > 0 && time.Since(t.last) < reviveInterval {
		return ended(machineName, c, s)
	}
	r.tries[c.Log] = tries{restarts: t.restarts + 1, last: time.Now()}
	r.say("%s: %s ended (%s), starting it again: %s", machineName, s.Name, s.Exit, lastLine(c.Log))
	if err := host.Start(c); err != nil {
		return err
	}
	return ended(machineName, c, s)
}

// ended is the error of a component that is dead.
func ended(machineName string, c supervisor.Component, s supervisor.State) error {
	return fmt.Errorf("%s of %s ended (%s), its log %s ends with %q", c.Name, machineName, s.Exit, c.Log, lastLine(c.Log))
}

// revive is revival.revive for a machine of the lab.
func (l *Lab) revive(r *revival, machineName string, components []supervisor.Component) error {
	m := l.machine(machineName)
	return r.revive(machineName, m.Components(), logged(m, components))
}

// stayAlive returns a hopelessError when a component has ended.
func (l *Lab) stayAlive(machineName string, c supervisor.Component) error {
	states, err := l.machine(machineName).Components().List()
	if err != nil {
		return err
	}
	for _, s := range states {
		if s.Name == c.Name && !s.Alive {
			return hopelessError{ended(machineName, c, s)}
		}
	}
	return nil
}

// logged returns components with their log files on m.
func logged(m machine.Machine, components []supervisor.Component) []supervisor.Component {
	all := make([]supervisor.Component, 0, len(components))
	for _, c := range components {
		c.Log = m.LogFile(c.Name)
		all = append(all, c)
	}
	return all
}

// lastLine is the last line of a file that is not empty, or why it cannot be read.
func lastLine(file string) string {
	const enough = 8 << 10 // bytes
	f, err := os.Open(file)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	end, err := io.ReadAll(io.NewSectionReader(f, max(0, size-enough), enough))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(end)), "\n")
	return lines[len(lines)-1]
}
