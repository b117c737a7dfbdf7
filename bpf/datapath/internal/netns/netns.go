// Package netns finds the network namespaces of a node and visits them: an iterator over sockets shows those of one
// namespace.
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

// Places are where a node's network namespaces can be found.
type Places struct {
	Proc string // of the node's processes, such as /proc
	Run  string // where they are kept by name, such as /run/netns
}

// Namespaces returns a path to each network namespace that a process of the node is in or that has a name, but not
// the one of this process. What goes while it looks, and what this process may not see, is left out.
func (p Places) Namespaces() ([]string, error) {
	// Of this thread: that of the process is the main thread's, which may be one that was elsewhere and never came back.
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

// inode returns the number that a namespace is known by.
func inode(path string) (uint64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return st.Sys().(*syscall.Stat_t).Ino, nil
}

// Visit calls f here and in every other network namespace of the node, one after the other. f must do its work on
// the thread it is called on, and starts no goroutine. Namespaces that go in the meantime are no error; ones
// that this process may not enter, for which it would need the capability SYS_ADMIN, are counted.
func (p Places) Visit(ctx context.Context, f func() error) (refused int, err error) {
	errs := []error{f()}
	paths, err := p.Namespaces()
	if err != nil {
		return 0, errors.Join(append(errs, err)...)
	}
	for _, path := range paths {
		if err := ctx.Err(); err != nil {
			return refused, errors.Join(append(errs, err)...)
		}
		switch err := within(path, f); {
		case errors.Is(err, errRefused):
			refused++
		case err != nil:
			errs = append(errs, err)
		}
	}
	return refused, errors.Join(errs...)
}

var errRefused = errors.New("may not enter the network namespace")

// within calls f in the network namespace at path, on a thread that ends with it.
func within(path string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: nothing else must run on this thread afterwards
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

// ignoreGone sorts the errors of entering a namespace.
func ignoreGone(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return errRefused
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL):
		return nil // the process ended; EINVAL is for a name whose namespace is not there any more
	}
	return fmt.Errorf("enter network namespace: %w", err)
}
