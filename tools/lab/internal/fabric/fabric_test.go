package fabric_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/lab/internal/fabric"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Do returns its thread to the original namespace. If it ended the thread instead, the kernel would kill the commands that the
// thread started.
func TestDoReturnsItsThread(t *testing.T) {
	netlab.Privileged(t)
	f := fabric.Fabric{Lab: "threads"}
	name := filepath.Base(f.Path())
	if out, err := exec.CommandContext(t.Context(), "ip", "netns", "add", name).CombinedOutput(); err != nil {
		t.Fatalf("ip netns add: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "netns", "del", name).CombinedOutput(); err != nil {
			t.Errorf("ip netns del: %v: %s", err, out)
		}
	})

	netns := func() string {
		t.Helper()
		link, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	home := netns()
	const rounds = 20
	var threads []int
	for range rounds {
		err := f.Do(func() error {
			threads = append(threads, unix.Gettid())
			if netns() == home {
				return fmt.Errorf("thread %d is not in the fabric", unix.Gettid())
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, tid := range threads {
		link, err := os.Readlink(fmt.Sprintf("/proc/self/task/%d/ns/net", tid))
		if err != nil {
			t.Fatalf("thread %d has ended: %v", tid, err)
		}
		if link != home {
			t.Errorf("thread %d stayed in %s", tid, link)
		}
	}
}
