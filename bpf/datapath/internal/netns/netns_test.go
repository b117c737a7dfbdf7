package netns

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// sleeper starts a process, in its own network namespace if flags say so, and returns its PID.
func sleeper(t *testing.T, flags uintptr) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// Each namespace is visited once, however many processes and names it has. Ended namespaces are skipped.
func TestVisit(t *testing.T) {
	netlab.Privileged(t)
	proc, run := t.TempDir(), t.TempDir()
	show := func(as string, pid int) {
		dir := filepath.Join(proc, as, "ns")
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.Symlink("/proc/"+strconv.Itoa(pid)+"/ns/net", filepath.Join(dir, "net"))); err != nil {
			t.Fatal(err)
		}
	}
	first, second, neighbour := sleeper(t, unix.CLONE_NEWNET), sleeper(t, unix.CLONE_NEWNET), sleeper(t, 0)
	show("1", first)
	show("2", first) // another process of it
	show("3", neighbour)
	show("4", 1<<30) // ended
	show("self", second)
	if err := os.Symlink("/proc/"+strconv.Itoa(first)+"/ns/net", filepath.Join(run, "named")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/"+strconv.Itoa(second)+"/ns/net", filepath.Join(run, "other")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(run, "stale"), nil, 0o600); err != nil {
		t.Fatal(err) // as it stays when a namespace is gone
	}
	want := []uint64{}
	for _, pid := range []int{os.Getpid(), first, second} {
		n, err := inode("/proc/" + strconv.Itoa(pid) + "/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, n)
	}
	var visited []uint64
	refused, err := Dirs{proc, run}.Visit(t.Context(), func() error {
		n, err := inode("/proc/thread-self/ns/net")
		visited = append(visited, n)
		return err
	})
	if refused != 0 || err != nil {
		t.Errorf("refused %d, %v", refused, err)
	}
	if !slices.Equal(visited, want) {
		t.Errorf("visited %v, want %v", visited, want)
	}
	if here, err := inode("/proc/thread-self/ns/net"); err != nil || here != want[0] {
		t.Errorf("the test ends up in namespace %d, %v", here, err)
	}
	broken := errors.New("broken")
	if _, err := (Dirs{proc, run}).Visit(t.Context(), func() error { return broken }); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
}
