package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
)

// crashing is a supervisor whose components end as soon as they are started, until they
// have been started lives times.
type crashing struct {
	lives  int
	starts map[string][]time.Time
}

func (c *crashing) Start(component supervisor.Component) error {
	c.starts[component.Name] = append(c.starts[component.Name], time.Now())
	return nil
}

func (c *crashing) List() (states []supervisor.State, err error) {
	for name, starts := range c.starts {
		states = append(states, supervisor.State{Name: name, Alive: len(starts) >= c.lives, Exit: "exit status 1"})
	}
	return states, nil
}

func TestRevive(t *testing.T) {
	dir := t.TempDir()
	component := func(name string) supervisor.Component {
		log := filepath.Join(dir, name+".log")
		if err := os.WriteFile(log, []byte("starting\ntoo many open files\n\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return supervisor.Component{Name: name, Log: log}
	}
	kubelet, proxy := component("kubelet"), component("kube-proxy")
	for name, tc := range map[string]struct {
		lives  int
		starts int // of each component, the first among them
		gaveUp bool
	}{
		"recovers":     {lives: 4, starts: 4},
		"just in time": {lives: 1 + reviveLimit, starts: 1 + reviveLimit},
		"never":        {lives: 100, starts: 1 + reviveLimit, gaveUp: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host := &crashing{lives: tc.lives, starts: map[string][]time.Time{"kubelet": {time.Now()}, "kube-proxy": {time.Now()}}}
				var said []string
				r := &revival{tries: map[string]tries{}, say: func(format string, args ...any) {
					said = append(said, fmt.Sprintf(format, args...))
				}}
				err := waitFor(t.Context(), "nodes", func(context.Context) error {
					return r.revive("a1", host, []supervisor.Component{kubelet, proxy})
				})
				if gaveUp := errors.As(err, new(hopelessError)); gaveUp != tc.gaveUp || err != nil && !gaveUp {
					t.Fatalf("have %v, gave up %v, want %v", err, gaveUp, tc.gaveUp)
				}
				if tc.gaveUp {
					for _, want := range []string{"kubelet of a1", kubelet.Log, "too many open files", "10 restarts"} {
						if !strings.Contains(err.Error(), want) {
							t.Errorf("have %q, want %q", err, want)
						}
					}
				}
				for name, starts := range host.starts {
					if len(starts) != tc.starts {
						t.Errorf("%s: %d starts, want %d", name, len(starts), tc.starts)
					}
					for i := 2; i < len(starts); i++ {
						if pause := starts[i].Sub(starts[i-1]); pause < reviveInterval || pause > 2*reviveInterval {
							t.Errorf("%s: %v between restarts, want %v", name, pause, reviveInterval)
						}
					}
				}
				if want := "a1: kubelet ended (exit status 1), starting it again: too many open files"; len(said) == 0 || said[0] != want {
					t.Errorf("said %q, want first %q", said, want)
				}
			})
		})
	}
}

func TestLastLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	for name, tc := range map[string]struct{ text, want string }{
		"empty":         {"", ""},
		"one":           {"only", "only"},
		"blank at end":  {"first\nlast\n \n", "last"},
		"longer":        {strings.Repeat("x\n", 10_000) + "last\n", "last"},
		"one long line": {strings.Repeat("x", 10_000), strings.Repeat("x", 8<<10)},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(tc.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if have := lastLine(file); have != tc.want {
				t.Errorf("have %q, want %q", have, tc.want)
			}
		})
	}
}
