package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// autogroup holds the nice value of this process' session, which weighs it against other sessions. It is empty if the kernel does
// not group sessions.
const autogroup = "/proc/self/autogroup"

// prioritize gives this process' session priority over other sessions until undo is called. The nice values of the benchmarks'
// processes apply only within a session: sched(7), "The autogroup feature".
func prioritize(file string) (undo func() error, err error) {
	none := func() error { return nil }
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(content) == 0 {
		return none, nil
	}
	if err != nil {
		return none, fmt.Errorf("read the session's priority: %w", err)
	}
	var group, nice int
	if _, err := fmt.Sscanf(string(content), "/autogroup-%d nice %d", &group, &nice); err != nil {
		return none, fmt.Errorf("read the session's priority from %q: %w", content, err)
	}
	set := func(nice int) error {
		if err := os.WriteFile(file, fmt.Append(nil, nice), 0o644); err != nil {
			return fmt.Errorf("set the session's priority: %w", err)
		}
		return nil
	}
	if err := set(-20); err != nil {
		return none, err
	}
	return func() error { return set(nice) }, nil
}
