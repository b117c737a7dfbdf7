package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// schedule sets the scheduling policy and priority of every thread of this process (sched(7)). New threads and child
// processes inherit them.
func schedule(policy, priority uint32) error {
	done := map[string]bool{}
	for before := -1; len(done) > before; {
		before = len(done)
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("list threads: %w", err)
		}
		for _, t := range threads {
			id, err := strconv.Atoi(t.Name())
			if err != nil || done[t.Name()] {
				continue
			}
			err = unix.SchedSetAttr(id, &unix.SchedAttr{Policy: policy, Priority: priority}, 0)
			if err != nil && !errors.Is(err, unix.ESRCH) { // the thread has ended
				return fmt.Errorf("set the policy of a thread: %w", err)
			}
			done[t.Name()] = true
		}
	}
	return nil
}

// enableRealtime gives this process a real-time priority once a peer has BFD, whose timers are milliseconds. gobgp sends
// BFD packets from any thread, so all threads need it.
func (s *Speaker) enableRealtime(peers map[netip.Addr]neighbour) {
	if !s.realtime {
		return
	}
	for _, n := range peers {
		if n.bfd == noBFD {
			continue
		}
		s.realtime = false
		if err := schedule(unix.SCHED_RR, 1); err != nil {
			s.log.Warn("BFD packets may be late on busy CPUs, and routers then consider this gateway dead: grant it CAP_SYS_NICE, and in a cgroup of version 1 a cpu.rt_runtime_us above 0", "err", err)
		}
		return
	}
}
