package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// haveMachine waits until no other run of this program uses the machine's labs: labs have names, and two runs would take down
// each other's. release gives the machine back, as does the end of the process.
func haveMachine(ctx context.Context, lock string) (release func() error, err error) {
	f, err := os.OpenFile(lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for told := false; unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil; told = true {
		if !told {
			step("wait for another run of the tests, which uses the labs")
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("wait for %s: %w", lock, ctx.Err())
		case <-tick.C:
		}
	}
	return f.Close, nil
}

// machineLock is the lock file of the machine.
func machineLock() string { return filepath.Join(os.TempDir(), "isthmus-tests.lock") }
