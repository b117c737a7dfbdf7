package dataplane

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/bench/internal/manifests"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/process"
)

const (
	// restartLimit is the time that the agent has to become ready with the manifests of a folder.
	restartLimit = 5 * time.Minute
	// rest is the time that the agent's memory must stay the same before it counts.
	rest = 5 * time.Second
)

// agentCost is the cost of many Services to isthmus-agent itself, source and DNS included. The dataplane holds the Services
// already.
type agentCost struct {
	ready  time.Duration  // from its start until it was ready, most of it reading manifests
	memory process.Memory // once it is at rest
}

// measureProcess runs isthmus-agent on manifests of many Services.
func (b *testbed) measureProcess(ctx context.Context, cfg agent.Config) (err error) {
	folder := filepath.Join(b.dir, "manifests")
	if err := writeManifests(folder, b.many.Snapshot()); err != nil {
		return err
	}
	program := filepath.Join(b.dir, "isthmus-agent")
	build := compile.Go(ctx, "build", "-o", program, "github.com/isthmus-net/isthmus/cmd/isthmus-agent")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build isthmus-agent: %w\n%s", err, output)
	}
	ports, err := netlab.FreePorts(2)
	if err != nil {
		return err
	}
	http, dns := ports[0].String(), ports[1].String()
	begin := time.Now()
	cmd := exec.CommandContext(ctx, program, "--source=dir:"+folder, "--cgroup-root="+cfg.CgroupRoot, "--bpffs="+cfg.BPFFS,
		"--clusterset-ip-range="+services.Range.String(), "--node-name=bench", "--http-listen="+http, "--insecure-http", "--dns-listen="+dns)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start isthmus-agent: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("isthmus-agent with %d Services: %w", b.many.Services, err)
		}
		err = errors.Join(err, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, said.String()[max(0, said.Len()-2000):])
		}
	}()
	if err := poll(ctx, restartLimit, func() (bool, error) { return isReady(ctx, http), nil }); err != nil {
		return fmt.Errorf("wait until it is ready: %w", err)
	}
	b.agent.ready = time.Since(begin)
	if writes, err := metricOf(ctx, http, "isthmus_agent_map_writes_total"); err != nil || writes != 0 {
		return errors.Join(fmt.Errorf("it wrote %g map entries, although the maps held all of them", writes), err)
	}
	since := time.Now()
	err = poll(ctx, restartLimit, func() (bool, error) {
		memory, err := process.MemoryOf(cmd.Process.Pid)
		if diff := memory.RSS - b.agent.memory.RSS; max(diff, -diff) > memory.RSS/100 {
			since, b.agent.memory = time.Now(), memory
		}
		return time.Since(since) > rest, err
	})
	if err != nil {
		return fmt.Errorf("wait until its memory is at rest: %w", err)
	}
	fmt.Fprintf(b.progress, "isthmus-agent adopted them in %.1fs\n", b.agent.ready.Seconds())
	return nil
}

// poll calls done until it returns true, for at most limit.
func poll(ctx context.Context, limit time.Duration, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if is, err := done(); is || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// writeManifests writes snap to files in dir, as the ServiceImports and EndpointSlices that a member's API server would hold.
func writeManifests(dir string, snap *clusterset.Snapshot) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	const each = 100 // Services in a file
	for from := 0; from < len(snap.Services); from += each {
		var objects []client.Object
		for i := from; i < min(from+each, len(snap.Services)); i++ {
			objects = append(objects, manifests.Objects(&snap.Services[i])...)
		}
		text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%05d.json", from)), text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func get(ctx context.Context, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(req)
}

// isReady reports whether the agent at address is ready. An agent that does not listen yet is not.
func isReady(ctx context.Context, address string) bool {
	resp, err := get(ctx, "http://"+address+"/readyz")
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// metricOf returns the value of a metric without labels from the agent at address.
func metricOf(ctx context.Context, address, name string) (float64, error) {
	resp, err := get(ctx, "http://"+address+"/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		var value float64
		if text, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			_, err := fmt.Sscan(text, &value)
			return value, err
		}
	}
	return 0, errors.Join(fmt.Errorf("the agent has no metric %s", name), lines.Err())
}
