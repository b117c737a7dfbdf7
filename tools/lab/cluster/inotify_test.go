package cluster_test

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestInotifyNeed(t *testing.T) {
	for topology, want := range map[string]int{
		"a:2 b:1 broker:0": 3*8 + 3*11,
		"broker:0":         11,
	} {
		l, err := cluster.Open(cluster.Config{Name: "never-up", Dir: t.TempDir(), Topology: topology})
		if err != nil {
			t.Fatal(err)
		}
		if have := l.InotifyNeed(); have != want {
			t.Errorf("%s needs %d, want %d", topology, have, want)
		}
	}
}

// TestRequireInotify runs itself again in a user namespace with a limit of its own, so that
// nobody else's programs run short.
func TestRequireInotify(t *testing.T) {
	const inside = "LAB_TEST_IN_USER_NAMESPACE"
	if os.Getenv(inside) == "" {
		netlab.Privileged(t)
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v:\n%s", err, out)
		}
		return
	}
	if err := os.WriteFile("/proc/sys/user/max_inotify_instances", []byte("7"), 0); err != nil {
		t.Fatal(err)
	}
	for range 2 { // they are given back
		if err := cluster.RequireInotify(7); err != nil {
			t.Errorf("7 of 7: %v", err)
		}
	}
	err := cluster.RequireInotify(8)
	if err == nil {
		t.Fatal("8 of 7 were there")
	}
	for _, want := range []string{"need 8 ", " 7 are free", "sysctl fs.inotify.max_user_instances=512"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("have %q, want %q", err, want)
		}
	}
}
