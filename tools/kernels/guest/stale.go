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

// pod is the argument that runs this program as an ordinary UDP client of a VIP. It reports the first answer, waits on its
// socket, and reports the outcome.
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
		ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
		defer cancel()
		if err := isAnswered(ctx, c); err != nil {
			return err
		}
		fmt.Fprintln(out, podAnswered)
		if err := c.SetDeadline(time.Now().Add(checkTimeout)); err != nil {
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

// closesStale checks that the UDP socket of a program in another network namespace is closed immediately when its backend is
// removed.
func closesStale(ctx context.Context, tb *testbed) (err error) {
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func(a *agent.Agent) { ended <- a.Run(running) }(tb.agent)
	defer func() {
		stop()
		err = errors.Join(err, <-ended, tb.agent.Sync(context.WithoutCancel(ctx), snapshot()))
	}()

	cmd := exec.CommandContext(ctx, "/proc/self/exe", pod)
	said, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := tb.client.Do(cmd.Start); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cmd.Wait()) }()
	lines := bufio.NewReader(said)
	if err := expectLine(lines, podAnswered); err != nil {
		return err
	}
	elsewhere := []netip.Addr{netip.MustParseAddr("10.97.2.99"), netip.MustParseAddr("fd97::2:99")}
	if err := tb.agent.Sync(ctx, &clusterset.Snapshot{Services: []clusterset.Service{service("echo", echoVIPs, elsewhere)}}); err != nil {
		return err
	}
	return expectLine(lines, podClosed)
}

// expectLine reads a line and compares it with want.
func expectLine(from *bufio.Reader, want string) error {
	line, err := from.ReadString('\n')
	if err != nil {
		return fmt.Errorf("hear that %s: %w", want, err)
	}
	if have := strings.TrimSpace(line); have != want {
		return fmt.Errorf("the program wrote %q, want %q", have, want)
	}
	return nil
}
