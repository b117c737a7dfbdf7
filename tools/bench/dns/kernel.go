package dns

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	fastpath "github.com/isthmus-net/isthmus/bpf/datapath/names"
	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The resolver addresses that the pod queries. The node's name server listens at the first; the kernel answers for the second, at
// which no server listens.
var (
	askServer = netip.MustParseAddrPort("10.96.0.10:53")
	askKernel = netip.MustParseAddrPort("10.96.0.11:53")
)

// measureKernel compares the round trips of a pod to the node's name server and to the kernel, which answers in its place. The
// pod sends one question at a time, all on one CPU, alternately to both.
func (b *bench) measureKernel(ctx context.Context) (rows []metric.Metric, err error) {
	node, pod, err := nodeWithPod()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pod.Close(), node.Close()) }()
	var own *server
	err = node.Do(func() (err error) { // the process inherits the namespace
		own, err = start(ctx, isthmus, askServer, b.cpus.server, b.program, "-listen", askServer.String(), "-mode", "serve", "-services", "1")
		return err
	})
	if err != nil {
		return nil, err
	}
	own.attached = true
	defer func() { err = errors.Join(err, own.stop()) }()
	stop, err := answerInKernel(ctx, node)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()

	question := names.Set{Services: 1}.Plain()[0]
	if err := pod.Do(func() error { _, err := own.await(ctx, question); return err }); err != nil {
		return nil, err
	}
	trips := map[netip.AddrPort][]time.Duration{}
	ratios := make([]float64, 0, b.rounds)
	for round := range b.rounds + 1 { // round 0 warms up
		p50, err := b.roundTrips(ctx, pod, question)
		if err != nil {
			return nil, err
		}
		if round == 0 {
			continue
		}
		ratios = append(ratios, float64(p50[askKernel])/float64(p50[askServer]))
		for to, trip := range p50 {
			trips[to] = append(trips[to], trip)
		}
		fmt.Fprintf(b.progress, "round %d/%d  one question at a time  kernel %s  name server %s\n", round, b.rounds, p50[askKernel], p50[askServer])
	}
	for _, all := range trips {
		slices.Sort(all)
	}
	middle := func(to netip.AddrPort) float64 { return metric.Microseconds(trips[to][len(trips[to])/2]) }
	return []metric.Metric{
		{Name: "answers from the kernel, one CPU: round trip p50 / round trip to the node's name server", Value: metric.Median(ratios), Unit: "ratio", Better: metric.Lower},
		{Name: "answers from the kernel, one CPU: round trip p50", Value: middle(askKernel), Unit: "us", Better: metric.Lower},
		{Name: "the node's name server, one CPU: round trip p50", Value: middle(askServer), Unit: "us", Better: metric.Lower},
	}, nil
}

// roundTrips queries the name server and the kernel, one after the other, and returns the median round trip of each.
func (b *bench) roundTrips(ctx context.Context, pod *netlab.Namespace, question names.Question) (map[netip.AddrPort]time.Duration, error) {
	p50 := map[netip.AddrPort]time.Duration{}
	for _, to := range []netip.AddrPort{askServer, askKernel} {
		var all []time.Duration
		err := pod.Do(func() error {
			return onCPU(b.cpus.server, func() (err error) {
				all, err = askInTurn(ctx, to, question, b.phase)
				return err
			})
		})
		if err != nil {
			return nil, fmt.Errorf("ask %s: %w", to, err)
		}
		slices.Sort(all)
		p50[to] = all[len(all)/2]
	}
	return p50, nil
}

// nodeWithPod returns two network namespaces connected by a veth. The node has the address of the name server.
func nodeWithPod() (node, pod *netlab.Namespace, err error) {
	if node, err = netlab.NewNamespace(); err != nil {
		return nil, nil, err
	}
	if pod, err = netlab.NewNamespace(); err != nil {
		return nil, nil, errors.Join(err, node.Close())
	}
	err = errors.Join(
		node.Connect(pod, netip.MustParsePrefix("10.200.1.1/24"), netip.MustParsePrefix("10.200.1.2/24")),
		pod.Route(netip.MustParseAddr("10.200.1.1")),
		node.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return fmt.Errorf("find loopback: %w", err)
			}
			return netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(askServer.Addr().AsSlice())})
		}),
	)
	if err != nil {
		return nil, nil, errors.Join(err, pod.Close(), node.Close())
	}
	return node, pod, nil
}

// answerInKernel makes the kernel of a node answer for Service 0 until stop.
func answerInKernel(ctx context.Context, node *netlab.Namespace) (stop func() error, err error) {
	r, err := fastpath.New(fastpath.Config{Resolvers: []netip.Addr{askKernel.Addr()}}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- node.Do(func() error { return r.Follow(ctx) }) }()
	stop = func() error {
		cancel()
		return errors.Join(<-done, r.Close())
	}
	if err := r.Update(5, unusedSOA, oneName()); err != nil {
		return nil, errors.Join(err, stop())
	}
	for {
		is, err := r.Status()
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		if is.Devices == 1 {
			return stop, nil
		}
		select {
		case err := <-done:
			done <- err
			return nil, errors.Join(errors.New("the program was attached to no device"), stop())
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), stop())
		case <-time.After(time.Millisecond):
		}
	}
}

// unusedSOA has the length of an SOA record. No question here has a negative answer.
var unusedSOA = string(make([]byte, 84))

// oneName returns Service 0 with its address.
func oneName() iter.Seq2[string, [2]netip.Addr] {
	const header, typeAndClass = 12, 4
	wire := names.Ask(names.Name(0), names.TypeA, false)
	return maps.All(map[string][2]netip.Addr{string(wire[header : len(wire)-typeAndClass]): {names.Address(0, 0)}})
}

// askInTurn sends one question after the other and returns the round trips.
func askInTurn(ctx context.Context, to netip.AddrPort, q names.Question, phase time.Duration) (trips []time.Duration, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	timeout := unix.NsecToTimeval(int64(timeout))
	if err := errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}),
	); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	answer := make([]byte, answerSize)
	for begin := time.Now(); time.Since(begin) < phase && ctx.Err() == nil; {
		sent := time.Now()
		if _, err := unix.Write(fd, q.Wire); err != nil {
			return nil, fmt.Errorf("ask: %w", err)
		}
		n, err := unix.Read(fd, answer)
		for errors.Is(err, unix.EINTR) { // a signal of the Go runtime
			n, err = unix.Read(fd, answer)
		}
		if err != nil {
			return nil, fmt.Errorf("wait for the answer: %w", err)
		}
		trips = append(trips, time.Since(sent))
		if err := check(answer[:n], &q); err != nil {
			return nil, err
		}
	}
	return trips, ctx.Err()
}
