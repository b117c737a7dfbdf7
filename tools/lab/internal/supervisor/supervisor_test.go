package supervisor_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
)

// only is the supervisor of this process. A process can have only one, because it reaps every child.
var only = sync.OnceValue(func() *supervisor.Supervisor {
	s := supervisor.New()
	go s.Reap()
	return s
})

// serve makes this process a supervisor.
func serve(t *testing.T) (client supervisor.Client, dir string) {
	t.Helper()
	dir = t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	s := only()
	done := make(chan error)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		l.Close()
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("serve: %v", err)
		}
	})
	return supervisor.Client{Socket: l.Addr().String()}, dir
}

func TestSupervisor(t *testing.T) {
	client, dir := serve(t)
	sleeper := supervisor.Component{Name: "sleeper", Argv: []string{"/bin/sleep", "60"}, Log: filepath.Join(dir, "sleeper.log")}
	quitter := supervisor.Component{Name: "quitter", Argv: []string{"/bin/sh", "-c", "echo bye $WHO; exit 3"}, Env: []string{"WHO=you"}, Log: filepath.Join(dir, "quitter.log")}
	check := func(want ...supervisor.State) {
		t.Helper()
		var have []supervisor.State
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for deadline := time.Now().Add(30 * time.Second); ; <-tick.C {
			var err error
			if have, err = client.List(); err != nil {
				t.Fatal(err)
			}
			diff := cmp.Diff(want, have, cmpopts.IgnoreFields(supervisor.State{}, "PID"))
			if diff == "" {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("states (-want +have):\n%s", diff)
			}
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	must(client.Start(sleeper))
	must(client.Start(quitter))
	check(supervisor.State{Name: "quitter", Exit: "exit status 3"}, supervisor.State{Name: "sleeper", Alive: true})
	if log, err := os.ReadFile(quitter.Log); err != nil || string(log) != "bye you\n" {
		t.Errorf("log is %q, %v", log, err)
	}

	before, err := client.List()
	must(err)
	must(client.Start(sleeper)) // no effect: it is alive
	after, err := client.List()
	must(err)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("starting what runs changed (-before +after):\n%s", diff)
	}

	must(client.Stop("sleeper"))
	must(client.Stop("sleeper"))
	must(client.Stop("never started"))
	check(supervisor.State{Name: "quitter", Exit: "exit status 3"}, supervisor.State{Name: "sleeper", Exit: "killed by SIGTERM"})

	if err := client.Start(supervisor.Component{Name: "absent", Argv: []string{"/absent"}, Log: sleeper.Log}); err == nil {
		t.Error("a program that does not exist was started")
	}
	if pid, err := client.PID(); pid != os.Getpid() || err != nil {
		t.Errorf("the supervisor is %d, %v, want %d", pid, err, os.Getpid())
	}
}
