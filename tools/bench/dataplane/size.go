package dataplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/compile"
)

// size is the cost of many Services to an agent in a separate process (program atsize) and to the kernel.
type size struct {
	Program []time.Duration // from an empty dataplane, each time
	Moves   []time.Duration // one endpoint each, sorted
	RSS     int64           // resident memory after the moves, bytes
	Peak    int64           // the most until then
	maps    uint64          // memory of all maps, bytes
}

// measureSize programs many Services and leaves them in place.
func (b *testbed) measureSize(ctx context.Context, cfg agent.Config) error {
	program := filepath.Join(b.dir, "atsize")
	build := compile.Go(ctx, "build", "-o", program, "github.com/isthmus-net/isthmus/tools/bench/dataplane/atsize")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build atsize: %w\n%s", err, output)
	}
	out, err := exec.CommandContext(ctx, program, "-cgroup", cfg.CgroupRoot, "-bpffs", cfg.BPFFS,
		"-services", strconv.Itoa(b.many.Services), "-endpoints", strconv.Itoa(b.many.Endpoints)).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return fmt.Errorf("program %d Services: %w\n%s", b.many.Services, err, exit.Stderr)
	}
	if err != nil {
		return fmt.Errorf("program %d Services: %w", b.many.Services, err)
	}
	if err := json.Unmarshal(out, &b.size); err != nil {
		return fmt.Errorf("read the report of atsize: %w", err)
	}
	if b.size.maps, err = mapMemory(cfg.BPFFS); err != nil {
		return err
	}
	fmt.Fprintf(b.progress, "programmed %d Services with %d endpoints each: %v; moved %d endpoints\n",
		b.many.Services, b.many.Endpoints, b.size.Program, len(b.size.Moves))
	return b.measureProcess(ctx, cfg)
}

// mapMemory returns the memory, in bytes, that the kernel charges for the maps pinned below dir.
func mapMemory(dir string) (total uint64, err error) {
	err = eachPin(dir, func(path string) error {
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return nil // a program or a link
		}
		defer m.Close()
		about, err := m.Info()
		if err != nil {
			return fmt.Errorf("read the info of map %s: %w", path, err)
		}
		memory, _ := about.Memlock() // an empty one may have none
		total += memory
		return nil
	})
	return total, err
}

// eachPin calls f with the path of every pin below dir.
func eachPin(dir string, f func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return f(path)
	})
}

// sizeRows returns the rows about many Services.
func (b *testbed) sizeRows() []metric.Metric {
	at := fmt.Sprintf("%d x %d", b.many.Services, b.many.Endpoints)
	seconds := make([]float64, len(b.size.Program))
	for i, d := range b.size.Program {
		seconds[i] = d.Seconds()
	}
	percentile := func(p int) float64 {
		return float64(b.size.Moves[(len(b.size.Moves)*p+99)/100-1]) / float64(time.Millisecond)
	}
	mib := func(bytes float64) float64 { return bytes / (1 << 20) }
	rows := []metric.Metric{
		{Name: "program " + at + " from a snapshot", Value: metric.Median(seconds), Unit: "s", Bar: new(0.4)},
		{Name: "the same, first time in a new process", Value: b.size.Program[0].Seconds(), Unit: "s"},
		{Name: "one endpoint moves at " + at + ", snapshot to maps, p99", Value: percentile(99), Unit: "ms", Bar: new(20.0)},
		{Name: "one endpoint moves at " + at + ", snapshot to maps, p50", Value: percentile(50), Unit: "ms"},
		{Name: "isthmus-agent: memory at " + at + ", at rest", Value: mib(float64(b.agent.memory.RSS)), Unit: "MiB", Bar: new(100.0)},
		{Name: "isthmus-agent: anonymous part of that memory", Value: mib(float64(b.agent.memory.Anonymous)), Unit: "MiB"},
		{Name: "isthmus-agent: start until it has adopted " + at, Value: b.agent.ready.Seconds(), Unit: "s"},
		{Name: "agent without source and DNS: memory at " + at + " after 500 moves", Value: mib(float64(b.size.RSS)), Unit: "MiB"},
		{Name: "kernel: memory of all maps at " + at, Value: mib(float64(b.size.maps)), Unit: "MiB"},
		{Name: "kube-proxy: start until it has programmed " + at, Value: b.peerProgram, Unit: "s"},
	}
	for i := range rows {
		rows[i].Better = metric.Lower
	}
	return rows
}
