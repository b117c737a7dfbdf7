// Atsize runs an agent with many Services in a process of its own. It programs them, moves endpoints, and reports the cost as
// JSON. The programmed dataplane stays in place when it exits.
//
//	atsize -cgroup DIR -bpffs DIR -services 10000 -endpoints 10
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/process"
)

const (
	// moves is the number of endpoints moved, one by one.
	moves = 500
	// programs is the number of times that everything is programmed.
	programs = 5
)

// report is the result of the run; package dataplane reads it.
type report struct {
	Program []time.Duration // from an empty dataplane, each time
	Moves   []time.Duration // one endpoint each, sorted
	RSS     int64           // resident memory after the moves, bytes
	Peak    int64           // the most until then
}

func main() {
	var set services.Set
	cgroup := flag.String("cgroup", "", "the cgroup v2 folder that contains the served sockets")
	bpffs := flag.String("bpffs", "", "the BPF filesystem for maps and programs")
	flag.IntVar(&set.Services, "services", 10_000, "the number of Services")
	flag.IntVar(&set.Endpoints, "endpoints", 10, "the number of endpoints of each")
	flag.Parse()
	cfg := agent.Config{CgroupRoot: *cgroup, BPFFS: *bpffs, Topology: agent.Topology{Ranges: []netip.Prefix{services.Range}}}
	if err := run(context.Background(), cfg, set, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "atsize:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, cfg agent.Config, set services.Set, out io.Writer) (err error) {
	a, err := agent.New(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	var r report
	snap := set.Snapshot()
	program := func() error {
		took, err := sync(ctx, a, snap)
		r.Program = append(r.Program, took)
		return err
	}
	if err := program(); err != nil {
		return err
	}
	moved := snap
	for n := range moves {
		// Service 0 keeps its live endpoint.
		moved = services.Move(moved, 1+n*7919%(set.Services-1), n)
		took, err := sync(ctx, a, moved)
		if err != nil {
			return err
		}
		r.Moves = append(r.Moves, took)
	}
	slices.Sort(r.Moves)
	memory, err := process.MemoryOf(os.Getpid())
	if err != nil {
		return err
	}
	r.RSS, r.Peak = memory.RSS, memory.Peak
	for len(r.Program) < programs {
		if _, err := sync(ctx, a, &clusterset.Snapshot{}); err != nil {
			return err
		}
		if err := program(); err != nil {
			return err
		}
	}
	return json.NewEncoder(out).Encode(r)
}

func sync(ctx context.Context, a *agent.Agent, snap *clusterset.Snapshot) (time.Duration, error) {
	begin := time.Now()
	err := a.Sync(ctx, snap)
	return time.Since(begin), err
}
