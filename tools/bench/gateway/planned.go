package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/traffic"
)

const (
	// resting is how long clients send requests before, between and after the disturbances.
	resting = time.Second
	// restartAfter is when systemd restarts a gateway (RestartSec of its unit).
	restartAfter = 100 * time.Millisecond
	// lasting is the number of long-lived connections per return path.
	lasting = 120
	// asked and questions are the ports of steady requests: TCP, and UDP for edge.Probe.
	asked, questions = 8082, 9000
)

// work is a planned disturbance of the gateway with the traffic, which has it again afterwards.
type work struct {
	name string
	do   func(*group, context.Context) error
}

var works = []work{
	{"agent killed and restarted", (*group).crash},
	{"agent restarted, as by an upgrade", (*group).reload},
	{"gateway cordoned and uncordoned", (*group).cordon},
	{"gateway drained, powered off and back on", (*group).drain},
}

// crash kills an agent.
func (g *group) crash(ctx context.Context) error {
	if err := g.agents[0].Kill(); err != nil {
		return err
	}
	return g.again(ctx)
}

// reload restarts an agent, as systemctl reload does.
func (g *group) reload(ctx context.Context) error {
	if err := g.agents[0].Reload(); err != nil {
		return err
	}
	return g.again(ctx)
}

// again starts an agent that ended, as systemd does.
func (g *group) again(ctx context.Context) error {
	if err := pauseFor(ctx, restartAfter); err != nil {
		return err
	}
	if err := g.start(ctx, 0); err != nil {
		return err
	}
	return g.awaitBestRoute(ctx, 0)
}

// cordon cordons a gateway until it had no traffic for a while.
func (g *group) cordon(ctx context.Context) error {
	if _, err := g.apply(ctx, 0, plannedVIPs(), true); err != nil {
		return err
	}
	if err := errors.Join(g.awaitBestRoute(ctx, 1), pauseFor(ctx, resting)); err != nil {
		return err
	}
	if _, err := g.apply(ctx, 0, plannedVIPs(), false); err != nil {
		return err
	}
	return g.awaitBestRoute(ctx, 0)
}

// drain stops an agent as systemctl stop does. It then reboots the machine, which keeps only its disk.
func (g *group) drain(ctx context.Context) error {
	if err := g.agents[0].Stop(); err != nil {
		return err
	}
	if err := errors.Join(g.awaitBestRoute(ctx, 1), pauseFor(ctx, resting), g.Cut(0), g.forget(0), pauseFor(ctx, resting), g.Mend(0)); err != nil {
		return err
	}
	return g.again(ctx)
}

// forget removes from a gateway without an agent what a reboot removes.
func (g *group) forget(i int) error {
	return g.Gateways[i].Do(func() error {
		args := []string{"cleanup"}
		if g.balancer == desired.EBPF {
			args = append(args, "--bpffs", g.bpffs(i))
		}
		if said, err := exec.Command(g.program(), args...).CombinedOutput(); err != nil { //nolint:noctx // it needs no cancellation
			return fmt.Errorf("clean up: %w: %s", err, said)
		}
		return netlink.ConntrackTableFlush(netlink.ConntrackTable)
	})
}

func pauseFor(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// plannedVIPs are the VIPs of ways, at which servers also answer asked and questions.
func plannedVIPs() []desired.VIP {
	var numbers []int
	for n := range serverCount {
		numbers = append(numbers, n)
	}
	all := vips(numbers...)
	for i := range all {
		for _, at := range []struct {
			protocol string
			port     uint16
		}{{"TCP", asked}, {"UDP", questions}} {
			f := frontend(numbers...)[0]
			f.Protocol, f.Port = at.protocol, at.port
			for b := range f.Backends {
				f.Backends[b].Port = at.port
			}
			all[i].Frontends = append(all[i].Frontends, f)
		}
	}
	return all
}

// answering makes the servers answer steady requests until the returned function is called.
func (g *group) answering(ctx context.Context) (stop func() error, err error) {
	var ends []io.Closer
	var serving sync.WaitGroup
	stop = func() error {
		var errs []error
		for _, e := range ends {
			errs = append(errs, e.Close())
		}
		serving.Wait()
		return errors.Join(errs...)
	}
	err = g.servers.Do(func() error {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp4", fmt.Sprintf(":%d", asked))
		if err != nil {
			return err
		}
		ends = append(ends, l)
		serving.Go(func() { echoStreams(l, &serving) })
		for n := range serverCount {
			c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(serverAddr(n), questions)))
			if err != nil {
				return err
			}
			ends = append(ends, c)
			serving.Go(func() { echoDatagrams(c) })
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

func echoStreams(l net.Listener, serving *sync.WaitGroup) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		serving.Go(func() {
			_ = c.SetDeadline(time.Now().Add(2 * longest)) // a client that was cut off sends nothing
			_, _ = io.Copy(c, c)
			_ = c.Close()
		})
	}
}

// echoDatagrams answers like a gateway of package edge: the request, and the only number.
func echoDatagrams(c *net.UDPConn) {
	b := make([]byte, 64)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteToUDPAddrPort(append(b[:n:n], 0), from) // a client counts missing answers
		}
	}
}

const (
	// askers is the number of TCP clients per VIP, each of which sends a request every askEvery unless it waits.
	askers   = 4
	askEvery = 40 * time.Millisecond
	// longest bounds an answer by TCP, with time for retransmissions. A slower request counts as lost.
	longest = 5 * time.Second
)

// steady is a client that sends requests to all VIPs all the time: by UDP from one socket every 5 ms, and by short TCP
// connections.
type steady struct {
	probes []*edge.Probe
	cancel context.CancelFunc
	asking sync.WaitGroup

	mu  sync.Mutex // guards what follows
	all requests   // by TCP
	why []error    // errors of lost requests
	err error
}

func (g *group) asking(ctx context.Context) (*steady, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &steady{cancel: cancel}
	for _, w := range ways {
		p, err := g.Probe(w.vip)
		if err != nil {
			_, _, asking := s.stop()
			return nil, errors.Join(err, asking)
		}
		s.probes = append(s.probes, p)
		for range askers {
			s.asking.Go(func() {
				err := g.Client.Do(func() error {
					s.ask(ctx, netip.AddrPortFrom(w.vip, asked))
					return nil
				})
				s.mu.Lock()
				defer s.mu.Unlock()
				s.err = errors.Join(s.err, err)
			})
		}
	}
	return s, nil
}

// ask sends requests until ctx is done. It stays on its thread, which is in the client's namespace.
func (s *steady) ask(ctx context.Context, to netip.AddrPort) {
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		err := askOnce(to)
		s.mu.Lock()
		s.all.asked++
		if err != nil {
			s.all.lost++
			s.why = append(s.why, err)
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// askOnce sends one request, in its own connection.
func askOnce(to netip.AddrPort) error {
	end := time.Now().Add(longest)
	c, err := (&net.Dialer{Deadline: end}).Dial("tcp4", to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	var answer int64
	question := end.UnixNano()
	if err := errors.Join(c.SetDeadline(end), binary.Write(c, binary.BigEndian, question)); err != nil {
		return err
	}
	if err := binary.Read(c, binary.BigEndian, &answer); err != nil {
		return err
	}
	if answer != question {
		return fmt.Errorf("%s answers something else", to)
	}
	return nil
}

// stop sends no more requests, and returns the result.
func (s *steady) stop() (all requests, why []error, err error) {
	s.cancel()
	s.asking.Wait()
	all, why = s.all, s.why
	for i, p := range s.probes {
		r := p.Stop()
		all.add(r)
		if r.Lost() > 0 {
			why = append(why, fmt.Errorf("%d of %d questions by UDP have no answer, %s", r.Lost(), r.Sent(), ways[i].name))
		}
	}
	return all, why, s.err
}

// disturbed is the result of a group over all rounds.
type disturbed struct {
	lost           []requests // requests by work
	opened, broken int        // connections, by round
}

func newDisturbed() *disturbed { return &disturbed{lost: make([]requests, len(works))} }

// planned runs every work that clients should not notice, with each balancer.
func planned(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	seen := map[desired.Balancer]*disturbed{}
	for _, b := range balancers {
		seen[b.kind] = newDisturbed()
	}
	if err := eachBalancer(ctx, rounds, progress, func(p *programs, kind desired.Balancer, say func(string, ...any)) error {
		return disturb(ctx, p, kind, seen[kind], say)
	}); err != nil {
		return nil, err
	}
	return plannedRows(seen), nil
}

// disturb runs one round of one balancer.
func disturb(ctx context.Context, p *programs, balancer desired.Balancer, seen *disturbed, say func(string, ...any)) (err error) {
	g, err := newGroup(ctx, p, balancer, pair)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	stop, err := g.answering(ctx)
	if err != nil {
		return err
	}
	g.undo = append(g.undo, stop)
	if err := g.reconfigureAll(ctx, plannedVIPs()); err != nil {
		return err
	}
	if err := errors.Join(g.awaitRoute(ctx, 1), g.awaitBestRoute(ctx, 0)); err != nil {
		return err
	}
	c, err := traffic.NewConnections(ctx, g.Client, g.servers, served)
	if err != nil {
		return err
	}
	g.undo = append(g.undo, c.Close)
	for _, w := range ways {
		if err := c.Open(ctx, w.name, netip.AddrPortFrom(w.vip, served), lasting); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		seen.opened += lasting
	}
	for i, w := range works {
		begin := time.Now()
		all, why, err := g.during(ctx, w)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		seen.lost[i].asked += all.asked
		seen.lost[i].lost += all.lost
		say("%s: %d requests lost of %d in %s", w.name, all.lost, all.asked, time.Since(begin).Round(time.Millisecond))
		for _, err := range why[:min(3, len(why))] {
			say("  %v", err)
		}
	}
	broken := c.Broken(time.Now())
	for _, b := range broken[:min(3, len(broken))] {
		say("a connection is broken: %v", b)
	}
	seen.broken += len(broken)
	say("%d connections broken of %d", len(broken), c.Count())
	return nil
}

// during runs a work while clients send requests.
func (g *group) during(ctx context.Context, w work) (all requests, why []error, err error) {
	s, err := g.asking(ctx)
	if err != nil {
		return all, nil, err
	}
	if err = pauseFor(ctx, resting); err == nil {
		err = w.do(g, ctx)
	}
	if err == nil {
		err = pauseFor(ctx, resting)
	}
	all, why, asking := s.stop()
	return all, why, errors.Join(err, asking)
}

// plannedRows returns the lost requests.
func plannedRows(seen map[desired.Balancer]*disturbed) (rows []metric.Metric) {
	for _, b := range balancers {
		s := seen[b.kind]
		for i, w := range works {
			rows = append(rows, lost(b.name+": "+w.name, s.lost[i]))
		}
		rows = append(rows, metric.Metric{
			Name: fmt.Sprintf("%s: established TCP connections broken by these events, of %d", b.name, s.opened), Value: float64(s.broken),
			Unit: "connections", Bar: new(0.0), Better: metric.Lower,
		})
	}
	return rows
}
