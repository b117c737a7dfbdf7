package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// pod is the argument that makes this program an ordinary one: it asks a VIP by UDP, says so, and then waits for
// what comes, and says that.
const pod = "pod"

const (
	podAnswered = "answered"
	podClosed   = "its socket was closed"
)

func runPod(out io.Writer) int {
	err := func() error {
		c, err := new(net.Dialer).DialContext(context.Background(), "udp4", at(echoVIPs[0]).String())
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := isAnswered(ctx, c); err != nil {
			return err
		}
		fmt.Fprintln(out, podAnswered)
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		_, err = c.Read(make([]byte, 8))
		return err
	}()
	if errors.Is(err, unix.ECONNABORTED) {
		fmt.Fprintln(out, podClosed)
		return 0
	}
	fmt.Fprintln(out, err)
	return 1
}

// closesStale checks that a program hears at once that the UDP backend it talks to is gone, in a network namespace
// of its own.
func closesStale(ctx context.Context, w *testbed) (err error) {
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func(a *agent.Agent) { ended <- a.Run(running) }(w.agent)
	defer func() {
		stop()
		err = errors.Join(err, <-ended, w.agent.Sync(context.WithoutCancel(ctx), snapshot()))
	}()

	cmd := exec.CommandContext(ctx, "/proc/self/exe", pod)
	said, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := w.client.Do(cmd.Start); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cmd.Wait()) }()
	lines := bufio.NewReader(said)
	if err := hear(lines, podAnswered); err != nil {
		return err
	}
	elsewhere := []netip.Addr{netip.MustParseAddr("10.97.2.99"), netip.MustParseAddr("fd97::2:99")}
	if err := w.agent.Sync(ctx, &clusterset.Snapshot{Services: []clusterset.Service{service("echo", echoVIPs, elsewhere)}}); err != nil {
		return err
	}
	return hear(lines, podClosed)
}

// hear reads a line, which must be want.
func hear(from *bufio.Reader, want string) error {
	line, err := from.ReadString('\n')
	if err != nil {
		return fmt.Errorf("hear that %s: %w", want, err)
	}
	if have := strings.TrimSpace(line); have != want {
		return fmt.Errorf("the program says %q, want %q", have, want)
	}
	return nil
}
