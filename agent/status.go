package agent

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// programStatus reads the state of the programs from the kernel.
type programStatus interface {
	Hooks() []datapath.HookStatus
	Refusals() (map[datapath.Refusal]uint64, error)
}

// nodeStatus checks the node that the programs run on.
type nodeStatus interface {
	Missing() []string
	Findings() ([]datapath.Finding, error)
}

// Status is the state of an agent.
type Status struct {
	Hooks     []datapath.HookStatus     // every program of the socket path and of the packet path
	Frontends int                       // in the maps, by the last successful Load or Sync
	Backends  int                       // likewise
	LastSync  time.Time                 // of the last successful Sync; zero before it
	LastError error                     // of the last Sync; nil when it succeeded
	Problems  []lb.Problem              // of the last successful Sync
	Drained   []clusterset.ClusterID    // drained members, sorted
	Writes    uint64                    // map entries written or deleted since New
	Refusals  map[bpf.DropReason]uint64 // clients refused since the maps were created
	// Differences is how many map entries the last check found wrong, and repaired. Checked is the time of that check, zero
	// before the first one.
	Differences int
	Checked     time.Time
	Missing     []string           // features that the node lacks, one sentence each with the consequence
	Findings    []datapath.Finding // faults of the node that affect the dataplane
}

// Ready returns nil when the maps hold the last snapshot and every program is attached, and otherwise the reasons why
// not.
func (s Status) Ready() error {
	var errs []error
	for _, h := range s.Hooks {
		if !h.Attached {
			errs = append(errs, fmt.Errorf("program %s is not attached; restart the agent to attach it again", h.Name))
		}
	}
	if s.LastError != nil {
		errs = append(errs, fmt.Errorf("last sync: %w", s.LastError))
	} else if s.LastSync.IsZero() {
		errs = append(errs, errors.New("no snapshot received yet"))
	}
	return errors.Join(errs...)
}

// Status asks the kernel and returns the state of the agent. Refusals is nil when they cannot be read, and after Close.
func (a *Agent) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock() // Close must wait: a closed datapath must not be asked
	s := a.status
	s.Problems, s.Drained = slices.Clone(s.Problems), slices.Clone(s.Drained)
	s.Writes = a.maps.Writes()
	if a.closed {
		return s
	}
	s.Hooks, s.Missing = a.programs.Hooks(), a.node.Missing()
	findings, err := a.node.Findings()
	if err != nil {
		a.log.Error("check the node's configuration", "err", err)
	}
	s.Findings = findings
	refusals, err := a.programs.Refusals()
	if err != nil {
		a.log.Error("read refusals", "err", err)
		return s
	}
	s.Refusals = map[bpf.DropReason]uint64{}
	for r := bpf.DropNone + 1; r < bpf.DropMax; r++ {
		s.Refusals[r] = 0
	}
	for r, n := range refusals {
		s.Refusals[r.Reason] += n
	}
	return s
}
