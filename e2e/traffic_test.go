package e2e

import (
	"bufio"
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stream is traffic during a change: an echo client that runs until it is ended.
type stream struct {
	first string // who answered first, as "cluster/pod"
	cmd   *exec.Cmd
	out   strings.Builder
	over  bool // it was ended
}

// flow begins to send requests with the echo client, two at a time, and returns after the first answer. What a test
// does not end ends with it.
func flow(t *testing.T, c client, args ...string) *stream {
	t.Helper()
	args = slices.Concat([]string{"--duration", "2h", "--concurrency", "2"}, args)
	// A client in a pod ends by a signal alone, and not when the command that started it is killed.
	cmd, err := c(context.WithoutCancel(t.Context()), args...)
	if err != nil {
		t.Fatal(err)
	}
	s := &stream{cmd: cmd}
	cmd.Stdout = &s.out
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !s.over {
			_, _ = s.end() // the test has failed already
		}
	})
	giveUp := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer giveUp.Stop()
	line, err := bufio.NewReader(said).ReadString('\n')
	if s.first = strings.TrimSpace(line); err != nil || !strings.Contains(s.first, "/") {
		t.Fatalf("no server answers a client with %q: %q, %v", args, line, err)
	}
	return s
}

// end stops the traffic and returns what became of it. It fails if the traffic had ended already.
func (s *stream) end() (report, error) {
	s.over = true
	if err := errors.Join(s.cmd.Process.Signal(syscall.SIGTERM), s.cmd.Wait()); err != nil {
		return report{}, err
	}
	return readReport(s.out.String())
}

// held is a connection over which requests go until it is ended.
type held struct{ *stream }

// hold connects to a URL and returns after the first answer.
func hold(t *testing.T, c client, url string) held {
	t.Helper()
	return held{flow(t, c, "--hold", "--concurrency", "1", "--rate", "50", "--timeout", "3s", "--url", url)}
}

// holdTo is hold for a connection that leads to a cluster: others are ended and tried again.
func holdTo(t *testing.T, c client, url, cluster string) held {
	t.Helper()
	for range 30 {
		h := hold(t, c, url)
		if strings.HasPrefix(h.first, cluster+"/") {
			return h
		}
		h.end(t)
	}
	t.Fatalf("of 30 connections to %s none leads to %s", url, cluster)
	return held{}
}

// end ends the connection. The test fails if that had happened already, or if another server ever answered.
func (h held) end(t *testing.T) {
	t.Helper()
	r, err := h.stream.end()
	if err != nil {
		t.Errorf("the connection to %s: %v", h.first, err)
		return
	}
	if r.Failures != 0 || len(r.Backends) != 1 || r.Backends[h.first] == 0 {
		t.Errorf("of %d requests over one connection to %s %d failed: %v; answered by %v", r.Connections, h.first, r.Failures, r.Errors, r.Backends)
	}
}
