package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Down ends every process of the lab and removes everything it made, whatever state it is
// in. Only the cache stays. A lab that is not there is fine.
func (l *Lab) Down(ctx context.Context) error {
	if err := preflight(); err != nil {
		return err
	}
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	names, err := l.leftMachines()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, l.removeMachine(ctx, name))
	}
	errs = append(errs, l.fabric.Down(ctx))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take lab %q down: %w", l.name, err)
	}
	if err := os.RemoveAll(l.dir); err != nil {
		return err
	}
	// Other labs may live beside this one.
	if err := os.Remove(filepath.Dir(l.dir)); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	l.step("lab %q is down", l.name)
	return nil
}

// leftMachines are those of the topology and those found on disk.
func (l *Lab) leftMachines() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(l.dir, "machines"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	for _, m := range l.topology.Machines() {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// lock makes the lab's directory and holds it against other programs' Up and Down. It
// waits for them.
func (l *Lab) lock() (unlock func(), err error) {
	for {
		if err := os.MkdirAll(l.dir, 0o755); err != nil {
			return nil, err
		}
		f, err := os.Open(l.dir)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", l.dir, err)
		}
		// The one before us may have been a Down: then we hold a directory without a name.
		held, err := f.Stat()
		if err != nil {
			return nil, err
		}
		if named, err := os.Stat(l.dir); err == nil && os.SameFile(held, named) {
			return func() { f.Close() }, nil
		}
		f.Close()
	}
}
