package process

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	t.Parallel()
	const rest = " S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 1 0 100 1 1\n"
	for _, name := range []string{"(etcd)", "(a b)", "(a) b (c)"} {
		if cpu, err := parseStat("7 " + name + rest); err != nil || cpu != 2*time.Second {
			t.Errorf("%s: CPU time %s (%v), want 2s", name, cpu, err)
		}
	}
	for name, stat := range map[string]string{"nothing": "", "cut": "7 (etcd) S 1 2", "letters": "7 (etcd)" + strings.Replace(rest, "150", "x", 1)} {
		if _, err := parseStat(stat); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestParseStatus(t *testing.T) {
	t.Parallel()
	have, err := parseStatus("Name:\tetcd\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nRssAnon:\t     512 kB\nThreads:\t1\n")
	if want := (Memory{RSS: 1 << 20, Anonymous: 1 << 19, Peak: 2 << 20}); err != nil || have != want {
		t.Errorf("have %+v (%v), want %+v", have, err, want)
	}
	if _, err := parseStatus("Name:\tzombie\n"); err == nil {
		t.Error("no error for a process without memory")
	}
}

func TestParseMachine(t *testing.T) {
	t.Parallel()
	const line = "cpu  100 20 30 9000 800 4 5 6 50 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
	if cpu, err := parseMachine(line); err != nil || cpu != 1650*time.Millisecond {
		t.Errorf("have %s (%v), want 1.65s", cpu, err)
	}
	for _, bad := range []string{"", "cpu 1 2", strings.Replace(line, "30", "x", 1)} {
		if _, err := parseMachine(bad); err == nil {
			t.Errorf("no error for %q", bad)
		}
	}
	if cpu, err := MachineCPU(); err != nil || cpu <= 0 {
		t.Errorf("the machine's CPU time is %s (%v)", cpu, err)
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	p := start(t, "/bin/sh", "-c", "while :; do :; done")
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		u, err := p.Usage()
		if err == nil && u.CPU > 0 && u.RSS > 0 && u.Peak >= u.RSS {
			break
		}
		select {
		case <-deadline:
			t.Fatalf("the usage of a busy shell is %+v (%v)", u, err)
		case <-tick.C:
		}
	}
	if err := p.ResetPeak(); err != nil {
		t.Error(err)
	}
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join("/proc", "self")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Usage(); err == nil {
		t.Error("an exited process still has usage")
	}
	if err := p.Stop(); err != nil {
		t.Errorf("stop twice: %v", err)
	}
}

func TestFailure(t *testing.T) {
	t.Parallel()
	p := start(t, "/bin/sh", "-c", "echo no room >&2; exit 3")
	select {
	case <-p.Ended():
	case <-time.After(20 * time.Second):
		t.Fatal("the process does not exit")
	}
	err := p.Failure()
	for _, word := range []string{"sh", "exit status 3", "no room"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the error lacks %q: %v", word, err)
		}
	}
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	if _, err := Start("/nonexistent/etcd", filepath.Join(t.TempDir(), "log")); err == nil || !strings.Contains(err.Error(), "etcd") {
		t.Errorf("have %v, want an error that names etcd", err)
	}
	if _, err := Start("/bin/sh", filepath.Join(t.TempDir(), "no", "log")); err == nil {
		t.Error("no error for a log in a missing folder")
	}
}

func start(t *testing.T, path string, args ...string) *Process {
	t.Helper()
	p, err := Start(path, filepath.Join(t.TempDir(), "log"), args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Stop() })
	return p
}

// A process has the timer slack of its options, and the next one that of this process again.
func TestTimerSlack(t *testing.T) {
	t.Parallel()
	slack := func(o Options) string {
		p, err := StartWith(o, "/bin/sh", filepath.Join(t.TempDir(), "log"), "-c", "exec sleep 60")
		if err != nil {
			t.Fatal(err)
		}
		defer p.Kill()
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.PID()), "timerslack_ns"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	own := slack(Options{})
	if have := slack(Options{TimerSlack: 3 * time.Millisecond}); have != "3000000" {
		t.Errorf("the slack is %s ns, want 3000000", have)
	}
	if have := slack(Options{}); have != own {
		t.Errorf("afterwards the slack is %s ns, want %s", have, own)
	}
}
