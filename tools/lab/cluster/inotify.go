package cluster

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Inotify instances the programs of one machine hold, as TestLab counts them: kubelet 6,
// containerd 1, kube-proxy 1; kube-apiserver 6, kube-controller-manager 5 (0 where the
// cluster has no nodes). The kernel's limit is for all processes of a user together.
const (
	nodeInotify         = 8
	controlPlaneInotify = 11
)

// inotifyNeed is how many instances the machines that do not run yet will open.
func (l *Lab) inotifyNeed() int {
	need := 0
	for _, c := range l.topology {
		if !l.machine(c.Name).Running() {
			need += controlPlaneInotify
		}
		for _, n := range c.Nodes {
			if !l.machine(n.Name).Running() {
				need += nodeInotify
			}
		}
	}
	return need
}

// requireInotify opens need instances and closes them again: the kernel has no counter to
// read. Without them the kubelet ends as soon as it starts.
func requireInotify(need int) error {
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for len(fds) < need {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
		if errors.Is(err, unix.EMFILE) {
			return fmt.Errorf("the machines to start need %d inotify instances and %d are free: raise the limit with `sysctl fs.inotify.max_user_instances=512`, or take another lab down", need, len(fds))
		}
		if err != nil {
			return fmt.Errorf("open an inotify instance: %w", err)
		}
		fds = append(fds, fd)
	}
	return nil
}
