package dns

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// size holds the measurements with many names besides traffic.
type size struct {
	memory, peerMemory   float64         // resident, bytes
	changes, peerChanges []time.Duration // from a change to its answer, sorted
	restarts             []time.Duration // of isthmus-agent without an API server, to its first correct answer
}

// measureSize measures CoreDNS of the last round, and starts other servers for the rest.
func (b *bench) measureSize(ctx context.Context, c *cluster, all map[string]*server) (s size, err error) {
	if s.peerMemory, err = all[coreDNS].memory(); err != nil {
		return size{}, err
	}
	for n := range b.rounds {
		took, err := c.change(ctx, all[coreDNS], n, 1)
		if err != nil {
			return size{}, err
		}
		s.peerChanges = append(s.peerChanges, took)
		fmt.Fprintf(b.progress, "%s answers a change after %s\n", coreDNS, took.Round(time.Millisecond))
	}
	file := filepath.Join(b.dir, "zone")
	if err := b.keepZone(ctx, file); err != nil {
		return size{}, err
	}
	if s.memory, err = b.keptMemory(ctx, file); err != nil {
		return size{}, err
	}
	if s.changes, err = b.measureChanges(ctx); err != nil {
		return size{}, err
	}
	s.restarts, err = b.restarts(ctx, file)
	return s, err
}

// last is the question for the last Service of many.
func (b *bench) last() names.Question {
	return names.Question{Wire: names.Ask(names.Name(b.many.Services-1), names.TypeA, false), Answers: 1}
}

// keepZone makes a server save the zone of many names to a file.
func (b *bench) keepZone(ctx context.Context, file string) error {
	s, err := b.nameserver(ctx, isthmus, -1, "-services", fmt.Sprint(b.many.Services), "-file", file)
	if err != nil {
		return err
	}
	_, err = s.await(ctx, b.last())
	return errors.Join(err, s.stop())
}

// keptMemory returns the memory of a server that holds only the saved zone of many names.
func (b *bench) keptMemory(ctx context.Context, file string) (memory float64, err error) {
	s, err := b.nameserver(ctx, isthmus, -1, "-mode", "kept", "-file", file)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	if _, err := s.await(ctx, b.last()); err != nil {
		return 0, err
	}
	// It writes {} once it has returned the memory that reading the file needed.
	if err := json.NewDecoder(s.out).Decode(new(struct{})); err != nil {
		return 0, fmt.Errorf("read the output of %s: %w", isthmus, err)
	}
	return s.memory()
}

// measureChanges returns the times from a changed snapshot to the new answer, with many names.
func (b *bench) measureChanges(ctx context.Context) (took []time.Duration, err error) {
	s, err := b.nameserver(ctx, isthmus, -1, "-mode", "change", "-services", fmt.Sprint(b.many.Services))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	if err := json.NewDecoder(s.out).Decode(&took); err != nil {
		return nil, fmt.Errorf("read the output of %s: %w", isthmus, err)
	}
	return took, nil
}

// kubeconfig names an unreachable API server.
const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: gone, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: gone, context: {cluster: gone, user: nobody}}]
users: [{name: nobody, user: {token: none}}]
current-context: gone
`

// restarts returns the times from a start of isthmus-agent to its first answer from the zone file, with an unreachable API server.
// Each round has one.
func (b *bench) restarts(ctx context.Context, file string) (took []time.Duration, err error) {
	program := filepath.Join(b.dir, "isthmus-agent")
	if err := build(ctx, ".", "github.com/isthmus-net/isthmus/cmd/isthmus-agent", program); err != nil {
		return nil, err
	}
	unreachable := filepath.Join(b.dir, "unreachable")
	if err := os.WriteFile(unreachable, []byte(kubeconfig), 0o600); err != nil {
		return nil, err
	}
	bpffs := filepath.Join(b.dir, "bpffs")
	if err := os.Mkdir(bpffs, 0o700); err != nil {
		return nil, err
	}
	unmount, err := netlab.MountBPFFS(bpffs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unmount()) }()
	cgroup, err := netlab.NewCgroup()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, cgroup.Close()) }()
	for range b.rounds + 1 { // the first one is not a restart: the node has no programs yet
		ports, err := netlab.FreePorts(1)
		if err != nil {
			return nil, err
		}
		at := ports[0]
		begin := time.Now()
		s, err := start(ctx, isthmus, at, -1, program, "--kubeconfig="+unreachable, "--node-name=bench", "--http-listen=127.0.0.1:0",
			"--cgroup-root="+cgroup.Path, "--bpffs="+bpffs, "--dns-listen="+at.String(), "--dns-zone-file="+file)
		if err != nil {
			return nil, err
		}
		answered, err := s.await(ctx, b.last())
		if err := errors.Join(err, s.stop()); err != nil {
			return nil, err
		}
		took = append(took, answered.Sub(begin))
		fmt.Fprintf(b.progress, "isthmus-agent answers %s after its start\n", answered.Sub(begin).Round(time.Millisecond))
	}
	return took[1:], nil
}

// ask sends a question once and returns the answer with the time of its arrival. The answer is nil if none arrived in time.
func (s *server) ask(ctx context.Context, q names.Question) ([]byte, time.Time, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "udp", s.at.String())
	if err != nil {
		return nil, time.Time{}, err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, time.Time{}, err
	}
	if _, err := conn.Write(q.Wire); err != nil {
		return nil, time.Time{}, err
	}
	answer := make([]byte, answerSize)
	n, err := conn.Read(answer)
	if netErr := net.Error(nil); errors.As(err, &netErr) && netErr.Timeout() {
		return nil, time.Now(), nil
	}
	return answer[:n], time.Now(), err
}
