// Package netns finds the network namespaces of a node and runs functions in them: an iterator over sockets lists those
// of one namespace.
package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Dirs are the folders in which the node's network namespaces are found.
type Dirs struct {
	Proc string // of the node's processes, such as /proc
	Run  string // of named namespaces, such as /run/netns
}

// Namespaces returns a path to each network namespace of the node that has a process or a name, except that of this
// process. Namespaces that end meanwhile, or that this process may not see, are left out.
func (p Dirs) Namespaces() ([]string, error) {
	// The thread's namespace, not the process's: the latter is that of the main thread, which may have left it for good.
	own, err := inode("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("find own network namespace: %w", err)
	}
	processes, err := filepath.Glob(filepath.Join(p.Proc, "[0-9]*", "ns", "net"))
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	named, err := filepath.Glob(filepath.Join(p.Run, "*"))
	if err != nil {
		return nil, fmt.Errorf("list named network namespaces: %w", err)
	}
	seen := map[uint64]bool{own: true}
	var found []string
	for _, path := range append(processes, named...) {
		n, err := inode(path)
		if err != nil || seen[n] {
			continue
		}
		seen[n] = true
		found = append(found, path)
	}
	return found, nil
}

// inode returns the inode number that identifies a namespace.
func inode(path string) (uint64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return st.Sys().(*syscall.Stat_t).Ino, nil
}

// Visit calls f in the current and in every other network namespace of the node, one after the other. f must work on
// the thread that it is called on, and start no goroutine. Namespaces that end meanwhile are no error. refused counts
// those that this process may not enter for lack of the capability SYS_ADMIN.
func (p Dirs) Visit(ctx context.Context, f func() error) (refused int, err error) {
	errs := []error{f()}
	paths, err := p.Namespaces()
	if err != nil {
		return 0, errors.Join(append(errs, err)...)
	}
	for _, path := range paths {
		if err := ctx.Err(); err != nil {
			return refused, errors.Join(append(errs, err)...)
		}
		switch err := runIn(path, f); {
		case errors.Is(err, errRefused):
			refused++
		case err != nil:
			errs = append(errs, err)
		}
	}
	return refused, errors.Join(errs...)
}

var errRefused = errors.New("may not enter the network namespace")

// runIn calls f in the network namespace at path, on a thread that ends afterwards.
func runIn(path string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: no other goroutine may run on this thread afterwards
		result <- func() error {
			fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return ignoreGone(err)
			}
			defer unix.Close(fd)
			if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
				return ignoreGone(err)
			}
			return f()
		}()
	}()
	return <-result
}

// ignoreGone drops the errors that mean that a namespace has ended.
func ignoreGone(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return errRefused
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL):
		return nil // the process ended; EINVAL is of a name without its namespace
	}
	return fmt.Errorf("enter network namespace: %w", err)
}
