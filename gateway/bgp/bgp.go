// Package bgp announces a gateway's VIPs to routers: the whole desired state goes in, and what routers are told, whether
// they listen, and what is wrong comes out. gobgp speaks BGP and BFD, and no other package knows it.
//
// A router is told the routes to VIPs that are announced by BGP, have a backend for new connections and whose gateway is
// not cordoned; where BFD is configured, only once it is up. Nothing is taken from routers.
//
// It fails closed: when the process dies, routers forget its routes at once, or when graceful restart's time is over.
package bgp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Config is what a speaker is besides the state that it applies.
type Config struct {
	// Restarting says that a predecessor in this place left without a word, and that the kernel still balances as
	// it did. Where graceful restart is on, routers then hear the same routes at once, BFD or not: a silence would
	// make them forget what works.
	Restarting bool
	// Punctual makes the whole process run before others (SCHED_RR) from the first peer with BFD on. Without the right to
	// that it goes on as it is, and says so once.
	Realtime bool
	Log      *slog.Logger
}

// Speaker is the part of a gateway that speaks BGP.
type Speaker struct {
	log *slog.Logger

	mu         sync.Mutex
	restarting bool  // until the first Apply
	realtime   bool  // until the first peer with BFD
	have       *plan // what was applied, step by step; nil: no server
	wanted     *plan // what was applied as a whole: it has the peers as well whose sessions could not begin anew
	server     *bgpServer
	sessions   map[netip.Addr]*session
	nextHops   map[netip.Addr][2]netip.Addr // next hops, by who may be told
	stop       context.CancelFunc           // of follow
	followDone chan struct{}                // closed when follow is over
}

// New returns a speaker that says nothing yet.
func New(c Config) *Speaker {
	return &Speaker{log: c.Log, restarting: c.Restarting, realtime: c.Realtime}
}

// Name is desired.PartBGP.
func (s *Speaker) Name() string { return desired.ComponentBGP }

// Apply makes the speaker as state says. It does not wait for sessions; it does wait until what is withdrawn was sent, a
// second at most, and before that half a second where the gateway is cordoned. Sessions that did not change stay; routes
// whose attributes change are replaced, never withdrawn. On an error, which may be desired.Faults, all is as it was.
func (s *Speaker) Apply(ctx context.Context, state *desired.State) error {
	want, err := newPlan(state)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.have.clone()
	if err := s.converge(ctx, want); err != nil {
		return errors.Join(err, s.converge(context.WithoutCancel(ctx), before))
	}
	s.restarting, s.wanted = false, want
	if want != nil {
		s.enableRealtime(want.peers)
	}
	return nil
}

// converge makes s as want says, step by step; s.have follows each.
func (s *Speaker) converge(ctx context.Context, want *plan) error {
	if s.have != nil && (want == nil || want.id != s.have.id) {
		if err := s.shut(ctx, false); err != nil {
			return err
		}
	}
	if want == nil {
		return nil
	}
	if s.have == nil {
		if err := s.start(ctx, want.id); err != nil {
			return err
		}
	}
	for a, n := range s.have.peers {
		if wanted, ok := want.peers[a]; ok && sameSession(n, wanted) {
			s.have.peers[a] = wanted // evaluate does what BFD needs
			continue
		}
		if err := s.server.deletePeer(ctx, a); err != nil {
			return err
		}
		delete(s.have.peers, a)
		delete(s.sessions, a)
	}
	if err := s.convergeRoutes(ctx, want); err != nil {
		return err
	}
	return s.addPeers(ctx, want.peers)
}

// convergeRoutes announces and withdraws what want asks for.
func (s *Speaker) convergeRoutes(ctx context.Context, want *plan) error {
	same := s.have.attrs.equal(want.attrs)
	var gone, more []netip.Addr
	for a := range s.have.routes {
		if !want.routes[a] {
			gone = append(gone, a)
		}
	}
	for a := range want.routes {
		if !same || !s.have.routes[a] {
			more = append(more, a)
		}
	}
	if err := s.server.announce(more, want.attrs); err != nil {
		return err
	}
	for _, a := range more {
		s.have.routes[a] = true
	}
	s.have.attrs = want.attrs
	if want.cordoned {
		return s.shutdownRoutes(ctx, gone)
	}
	return s.withdraw(ctx, gone)
}

// addPeers begins the sessions that are missing.
func (s *Speaker) addPeers(ctx context.Context, want map[netip.Addr]neighbour) error {
	var missing []netip.Addr
	for a, n := range want {
		if _, ok := s.have.peers[a]; !ok {
			s.have.peers[a] = n
			s.sessions[a] = &session{since: time.Now(), restarted: s.restarting && n.restart > 0}
			missing = append(missing, a)
		}
	}
	// Whoever remembers our predecessor is told at once, so who is told what must be settled before.
	if err := s.evaluate(ctx); err != nil {
		for _, a := range missing {
			delete(s.have.peers, a)
			delete(s.sessions, a)
		}
		return err
	}
	for i, a := range missing {
		have := s.sessions[a]
		bfdFirst := have.restarted && want[a].bfd != noBFD
		if err := s.server.addPeer(ctx, a, want[a], have.restarted, bfdFirst); err != nil {
			for _, a := range missing[i:] {
				delete(s.have.peers, a)
				delete(s.sessions, a)
			}
			return err
		}
		have.bfdFirst, have.held = bfdFirst, bfdFirst
	}
	return nil
}

// start begins to speak, to nobody yet.
func (s *Speaker) start(ctx context.Context, id identity) error {
	following, stop := context.WithCancel(context.WithoutCancel(ctx))
	events := make(chan event)
	server, err := startServer(following, id, s.log, func(e event) {
		select {
		case events <- e:
		case <-following.Done():
		}
	})
	if err != nil {
		stop()
		return err
	}
	s.server, s.stop, s.followDone = server, stop, make(chan struct{})
	s.have = &plan{id: id, peers: map[netip.Addr]neighbour{}, routes: map[netip.Addr]bool{}}
	s.sessions, s.nextHops = map[netip.Addr]*session{}, map[netip.Addr][2]netip.Addr{}
	go s.follow(following, server, events, s.followDone)
	return nil
}

// shut ends the speaker. With restart, neighbours may keep the routes.
func (s *Speaker) shut(ctx context.Context, restart bool) error {
	s.stop()
	err := s.server.stop(ctx, restart)
	s.server, s.have, s.sessions, s.nextHops = nil, nil, nil, nil
	return err
}

// withdraw removes routes and waits until the neighbours that had them were told.
func (s *Speaker) withdraw(ctx context.Context, gone []netip.Addr) error {
	if len(gone) == 0 {
		return nil
	}
	sent, err := s.server.updates(ctx)
	if err != nil {
		return err
	}
	if err := s.server.withdraw(gone); err != nil {
		return err
	}
	for _, a := range gone {
		delete(s.have.routes, a)
	}
	for a := range sent {
		if !slices.ContainsFunc(gone, func(vip netip.Addr) bool { return s.announces(a, vip) }) {
			delete(sent, a)
		}
	}
	return s.awaitSent(ctx, sent)
}

// tells reports whether a neighbour is told the route to vip, if there is one.
func (s *Speaker) announces(peer, vip netip.Addr) bool {
	n := s.sessions[peer]
	return n != nil && n.established && s.nextHops[peer][family(vip)].IsValid()
}

const (
	// sendPatience is how long a neighbour may keep us from sending. Its session ends by itself when that goes on.
	sendTimeout      = time.Second
	sendPollInterval = 5 * time.Millisecond
)

// awaitSent waits until each neighbour was sent more messages than it has in before, and then no more for a moment.
func (s *Speaker) awaitSent(ctx context.Context, before map[netip.Addr]uint64) error {
	last := maps.Clone(before)
	for begin := time.Now(); time.Since(begin) < sendTimeout; {
		if err := wait(ctx, sendPollInterval); err != nil {
			return err
		}
		now, err := s.server.updates(ctx)
		if err != nil {
			return err
		}
		done := true
		for a, n := range before {
			done = done && (!s.sessions[a].established || now[a] > n && now[a] == last[a])
		}
		if done {
			return nil
		}
		last = now
	}
	s.log.Warn("a peer does not read what it is sent")
	return nil
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// settle is how long routers take to use what they are told: FRR 8.4 took 70 ms on a busy machine.
const convergenceWait = 500 * time.Millisecond

// Close ends the speaker. With drain, routers are first asked to prefer other gateways, then told that the routes are
// gone, and have the time to follow. Without, they hear nothing but the end of the connection: with graceful restart
// they keep the routes for a successor.
func (s *Speaker) Close(ctx context.Context, drain bool) error {
	s.mu.Lock()
	if s.server == nil {
		s.mu.Unlock()
		return nil
	}
	var err error
	if drain {
		err = s.drain(ctx)
	}
	followed := s.followDone
	err = errors.Join(err, s.shut(context.WithoutCancel(ctx), !drain))
	s.mu.Unlock()
	<-followed
	return err
}

func (s *Speaker) drain(ctx context.Context) error {
	all := slices.Collect(maps.Keys(s.have.routes))
	if len(all) == 0 {
		return nil
	}
	if err := s.shutdownRoutes(ctx, all); err != nil {
		return err
	}
	return wait(ctx, convergenceWait)
}

// leave asks routers to prefer other gateways (RFC 8326), and withdraws routes when they had the time to follow.
func (s *Speaker) shutdownRoutes(ctx context.Context, routes []netip.Addr) error {
	if len(routes) == 0 {
		return nil
	}
	attrs := s.have.attrs
	attrs.standard = append(slices.Clone(attrs.standard), gracefulShutdown)
	if err := s.server.announce(routes, attrs); err != nil {
		return err
	}
	if err := wait(ctx, convergenceWait); err != nil {
		return err
	}
	return s.withdraw(ctx, routes)
}

// Announced returns the VIPs that a neighbour is told about now, sorted.
func (s *Speaker) Announced() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.have == nil {
		return nil
	}
	var all []netip.Addr
	for vip := range s.have.routes {
		for peer := range s.sessions {
			if s.announces(peer, vip) {
				all = append(all, vip)
				break
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// Drift tells what keeps neighbours from hearing what was applied. Speakers mend it themselves, when it can be mended; but a
// peer that gobgp would not take again needs another Apply.
func (s *Speaker) Drift(context.Context) ([]desired.Fault, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.have == nil || s.wanted == nil {
		return nil, nil
	}
	var faults []desired.Fault
	for _, a := range slices.SortedFunc(maps.Keys(s.wanted.peers), netip.Addr.Compare) {
		for _, message := range s.peerFaults(a) {
			faults = append(faults, desired.Fault{Component: desired.ComponentBGP, Message: fmt.Sprintf("peer %s: %s", a, message)})
		}
	}
	return faults, nil
}

// complaints tells what is wrong with a neighbour.
func (s *Speaker) peerFaults(a netip.Addr) []string {
	n, have := s.have.peers[a], s.sessions[a]
	if have == nil {
		return []string{"no session: it could not begin anew; the log says why"}
	}
	if !have.established {
		return []string{have.downReason(n, s.have.id.asn)}
	}
	var all []string
	if n.bfd != noBFD && !have.bfdUp {
		all = append(all, "BFD is down: is it on for us there, and UDP port 3784 open?")
	}
	var needed [2]bool
	for vip := range s.have.routes {
		needed[family(vip)] = true
	}
	for i, hop := range s.nextHops[a] {
		if !needed[i] || hop.IsValid() || !have.announced {
			continue
		}
		if have.families[i] {
			all = append(all, fmt.Sprintf("the link to it has no %s address of ours, which routes need as their next hop: add one", familyNames[i]))
		} else {
			all = append(all, fmt.Sprintf("it takes no %s routes: activate that address family for us there", familyNames[i]))
		}
	}
	return all
}

var familyNames = [2]string{ipv4: "IPv4", ipv6: "IPv6"}
