package e2e

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

// closed are the reasons by which a program learns that its connected UDP socket was closed: while it reads, when it
// writes, when it asks whom it is connected to.
var closed = []string{"software caused connection abort", "destination address required", "transport endpoint is not connected"}

// TestSocketsOfRemovedUDPBackendsAreClosed: an ordinary pod of a has UDP sockets that are connected to a VIP, and others
// that are connected to one of the pods behind it without a VIP. That pod leaves the Service and goes on serving. The
// sockets that reached it by the VIP are closed, and their program reaches the other pod; all others stay.
func TestSocketsOfRemovedUDPBackendsAreClosed(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	if err := drains(ctx); err != nil { // a test before this one may have left b silent
		t.Fatal(err)
	}
	vip := offer(t, "datagrams", "0", "b")
	said, err := bed.Kubectl(ctx, "b", "get", "pods", "--namespace", namespace, "--selector", "app=datagrams",
		"--output", "jsonpath={range .items[*]}{.metadata.name} {.status.podIP}{\"\\n\"}{end}")
	if err != nil {
		t.Fatal(err)
	}
	leaver, ip, _ := strings.Cut(strings.SplitN(said, "\n", 2)[0], " ")
	const sockets = 16
	keep := func(target string) *stream {
		t.Helper()
		return flow(t, podClient, "--keep", "--rate", "160", "--concurrency", strconv.Itoa(sockets), "--timeout", "2s", "--udp", target)
	}
	byVIP, direct := keep(netip.AddrPortFrom(vip, 7).String()), keep(ip+":8081")
	if err := holdsSockets(ctx, 2*sockets); err != nil {
		t.Fatal(err)
	}

	left := time.Now()
	if _, err := bed.Kubectl(ctx, "b", "label", "pod", leaver, "--namespace", namespace, "--overwrite", "app=left"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := bed.Kubectl(context.WithoutCancel(ctx), "b", "delete", "pod", leaver, "--namespace", namespace, "--wait=false"); err != nil {
			t.Error(err)
		}
	})
	// Only the sockets without a VIP are still connected to the pod.
	if err := holdsSocketsTo(ctx, ip, sockets); err != nil {
		t.Fatal(err)
	}
	closedAll := time.Now()
	r, err := byVIP.end()
	if err != nil {
		t.Fatal(err)
	}
	d, err := direct.end()
	if err != nil {
		t.Fatal(err)
	}
	who := "b/" + leaver
	told := 0
	for _, reason := range closed {
		told += r.Errors[reason]
	}
	if told == 0 || told >= sockets || told != r.Failures {
		t.Errorf("of %d sockets by the VIP %d were closed: %v", sockets, told, r.Errors)
	}
	last := r.LastAnswer[who]
	t.Logf("%d of %d sockets closed; %s answered by the VIP until %s after it was told to leave", told, sockets, who, last.Sub(left).Round(time.Millisecond))
	if !last.After(left) || last.After(closedAll) {
		t.Errorf("%s left the Service at %s, its sockets were closed at %s, and it answered by the VIP until %s: %v", who, left, closedAll, last, r.Backends)
	}
	if len(r.Backends) < 2 {
		t.Errorf("answers by the VIP from %v alone", r.Backends)
	}
	if d.Failures != 0 || d.Backends[who] != d.Connections {
		t.Errorf("sockets without a VIP: %d of %d exchanges failed: %v", d.Failures, d.Connections, d.Errors)
	}
}

// holdsSockets waits until the client pod has at least a number of connected UDP sockets.
func holdsSockets(ctx context.Context, want int) error {
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		have, err := connectedSockets(ctx, "")
		if err == nil && have < want {
			err = fmt.Errorf("the client has %d connected sockets, want %d", have, want)
		}
		return err
	})
}

// holdsSocketsTo waits until exactly a number of the client pod's UDP sockets are connected to an IPv4 address.
func holdsSocketsTo(ctx context.Context, address string, want int) error {
	ip := netip.MustParseAddr(address).As4()
	remote := fmt.Sprintf("%08X", binary.NativeEndian.Uint32(ip[:]))
	return testbed.Eventually(ctx, patience, func(ctx context.Context) error {
		have, err := connectedSockets(ctx, remote)
		if err == nil && have != want {
			err = fmt.Errorf("%d sockets of the client are connected to %s, want %d", have, address, want)
		}
		return err
	})
}

// connectedSockets counts the client pod's connected UDP sockets whose remote address, as /proc/net/udp writes it, begins with
// remote.
func connectedSockets(ctx context.Context, remote string) (int, error) {
	said, err := bed.Exec(ctx, "a", namespace, "client", "cat", "/proc/net/udp", "/proc/net/udp6")
	if err != nil {
		return 0, err
	}
	have := 0
	for line := range strings.Lines(said) {
		const established = "01"
		if fields := strings.Fields(line); len(fields) > 3 && fields[3] == established && strings.HasPrefix(fields[2], remote) {
			have++
		}
	}
	return have, nil
}
