package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// schedule gives every thread of this process a scheduling policy and priority (sched(7)). Threads and programs that they start
// from now on have them as well.
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
			if err != nil && !errors.Is(err, unix.ESRCH) { // that one has ended
				return fmt.Errorf("set the policy of a thread: %w", err)
			}
			done[t.Name()] = true
		}
	}
	return nil
}

// hurry lets this process run before others, once there is a neighbour who counts the milliseconds. gobgp sends BFD's packets
// from whatever thread it runs on, so all of them have to.
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
			s.log.Warn("BFD's packets may be late when the CPUs are busy, and routers then take this gateway for dead: allow it CAP_SYS_NICE", "err", err)
		}
		return
	}
}
