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
)

const (
	// resting is how long clients ask before, between and after what is done to a gateway.
	resting = time.Second
	// restartAfter is when systemd starts a gateway again (RestartSec of its unit).
	restartAfter = 100 * time.Millisecond
	// lasting is how many connections are open all the time, of each way.
	lasting = 120
	// asked and questions are where servers answer whoever asks steadily: by TCP, and by UDP, where edge.Probe asks.
	asked, questions = 8082, 9000
)

// work is what is done to the gateway that has the traffic, which is to have it again afterwards.
type work struct {
	name string
	do   func(*group, context.Context) error
}

var works = []work{
	{"agent killed and started again", (*group).crash},
	{"agent started anew, as an upgrade does", (*group).reload},
	{"gateway cordoned and back", (*group).cordon},
	{"gateway drained, switched off and back", (*group).drain},
}

// crash kills an agent.
func (g *group) crash(ctx context.Context) error {
	if err := g.agents[0].Kill(); err != nil {
		return err
	}
	return g.again(ctx)
}

// reload starts an agent anew, as systemctl reload does.
func (g *group) reload(ctx context.Context) error {
	if err := g.agents[0].Reload(); err != nil {
		return err
	}
	return g.again(ctx)
}

// again starts an agent that has ended, as systemd does.
func (g *group) again(ctx context.Context) error {
	if err := pauseFor(ctx, restartAfter); err != nil {
		return err
	}
	if err := g.start(ctx, 0); err != nil {
		return err
	}
	return g.leads(ctx, 0)
}

// cordon cordons a gateway, until it has no traffic for a while.
func (g *group) cordon(ctx context.Context) error {
	if _, err := g.tell(ctx, 0, plannedVIPs(), true); err != nil {
		return err
	}
	if err := errors.Join(g.leads(ctx, 1), pauseFor(ctx, resting)); err != nil {
		return err
	}
	if _, err := g.tell(ctx, 0, plannedVIPs(), false); err != nil {
		return err
	}
	return g.leads(ctx, 0)
}

// drain ends an agent as systemctl stop does, then switches its machine off, which forgets all but its disk, and on again.
func (g *group) drain(ctx context.Context) error {
	if err := g.agents[0].Stop(); err != nil {
		return err
	}
	if err := errors.Join(g.leads(ctx, 1), pauseFor(ctx, resting), g.Cut(0), g.forget(0), pauseFor(ctx, resting), g.Mend(0)); err != nil {
		return err
	}
	return g.again(ctx)
}

// forget makes a gateway without an agent forget what a reboot does.
func (g *group) forget(i int) error {
	return g.Gateways[i].Do(func() error {
		args := []string{"cleanup"}
		if g.balancer == desired.EBPF {
			args = append(args, "--bpffs", g.bpffs(i))
		}
		if said, err := exec.Command(g.program(), args...).CombinedOutput(); err != nil { //nolint:noctx // it waits for nobody
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

// plannedVIPs are those of ways, at which servers answer asked and questions, too.
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

// answering lets the servers answer who asks steadily. It ends when the result is called.
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
			_ = c.SetDeadline(time.Now().Add(2 * longest)) // a client that is cut off says nothing
			_, _ = io.Copy(c, c)
			_ = c.Close()
		})
	}
}

// echoDatagrams answers as a gateway of package edge would: the question, and a number, of which there is one.
func echoDatagrams(c *net.UDPConn) {
	b := make([]byte, 64)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteToUDPAddrPort(append(b[:n:n], 0), from) // a client that hears nothing counts it
		}
	}
}

const (
	// askers is how many ask one VIP by TCP, each every askEvery unless it waits.
	askers   = 4
	askEvery = 40 * time.Millisecond
	// longest is how long an answer by TCP may take, in which TCP sends again what got lost: what takes longer is lost.
	longest = 5 * time.Second
)

// steady is a client that asks at all VIPs all the time: by UDP from one socket every 5 ms, and with short TCP connections.
type steady struct {
	probes []*edge.Probe
	cancel context.CancelFunc
	asking sync.WaitGroup

	mu  sync.Mutex // guards what follows
	all requests   // by TCP
	why []error    // some was lost
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

// ask asks until ctx is done. It stays on its thread, whose network is the client's.
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

// askOnce is one question, in a connection of its own.
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

// stop asks no more, and returns what was seen.
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

// disturbed is what was seen of a group, in all rounds.
type disturbed struct {
	lost           []requests // by work
	opened, broken int        // connections, by round
}

func newDisturbed() *disturbed { return &disturbed{lost: make([]requests, len(works))} }

// planned does to gateways what nobody is to notice, with each balancer.
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

// disturb is one round of one balancer.
func disturb(ctx context.Context, p *programs, balancer desired.Balancer, seen *disturbed, say func(string, ...any)) (err error) {
	g, err := newGroup(ctx, p, balancer)
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
	if err := errors.Join(g.could(ctx, 1), g.leads(ctx, 0)); err != nil {
		return err
	}
	c, err := newConnections(ctx, g.Client, g.servers)
	if err != nil {
		return err
	}
	g.undo = append(g.undo, c.close)
	for _, w := range ways {
		if err := c.open(ctx, w.name, netip.AddrPortFrom(w.vip, served), lasting); err != nil {
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
	broken := c.broken(time.Now())
	for _, b := range broken[:min(3, len(broken))] {
		say("a connection (%s, %s) is broken: %v", b.way, b.habit, b.why)
	}
	seen.broken += len(broken)
	say("%d connections broken of %d", len(broken), len(c.all))
	return nil
}

// during does a work while clients ask.
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

// plannedRows are what was lost.
func plannedRows(seen map[desired.Balancer]*disturbed) (rows []metric.Metric) {
	for _, b := range balancers {
		s := seen[b.kind]
		for i, w := range works {
			rows = append(rows, lost(b.name+": "+w.name, s.lost[i]))
		}
		rows = append(rows, metric.Metric{
			Name: fmt.Sprintf("%s: established TCP connections broken by all of that of %d", b.name, s.opened), Value: float64(s.broken),
			Unit: "connections", Bar: new(0.0), Better: metric.Lower,
		})
	}
	return rows
}
