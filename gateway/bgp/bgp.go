// Package bgp announces the VIPs of a gateway to routers. It takes the whole desired state, and reports the announced
// VIPs and what is wrong with the sessions. gobgp speaks BGP and BFD; no other package imports it.
//
// A router receives the routes to VIPs that are announced by BGP and have a backend for new connections, unless the
// gateway is cordoned. With BFD it receives them only while BFD is up. No route is accepted from routers.
//
// The package fails closed: when the process dies, routers remove its routes at once, or when the graceful restart timer
// expires.
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

// Config holds the settings of a speaker that are not part of the state.
type Config struct {
	// Restarting says that a predecessor ended without a drain, and that the kernel still balances as it did. With
	// graceful restart, routers then receive the same routes at once, with or without BFD: otherwise they would remove
	// routes that still work.
	Restarting bool
	// Realtime gives the whole process a real-time priority (SCHED_RR) once a peer has BFD. Without the capability for
	// that, it logs a warning once and continues.
	Realtime bool
	Log      *slog.Logger
}

// Speaker is the announcer that speaks BGP.
type Speaker struct {
	log *slog.Logger

	mu         sync.Mutex
	restarting bool  // until the first Apply
	realtime   bool  // until the first peer with BFD
	have       *plan // what is applied so far, step by step; nil: no server
	wanted     *plan // the whole state; it includes peers whose sessions could not be restarted
	server     *bgpServer
	sessions   map[netip.Addr]*session
	exports    map[netip.Addr]export // to the peers that may receive routes
	stop       context.CancelFunc    // ends follow
	followDone chan struct{}         // closed when follow has ended
}

// New returns a speaker without sessions.
func New(c Config) *Speaker {
	return &Speaker{log: c.Log, restarting: c.Restarting, realtime: c.Realtime}
}

// Name implements agent.Component.
func (s *Speaker) Name() string { return desired.ComponentBGP }

// Apply makes the speaker match state. It does not wait for sessions. It waits until withdrawals were sent, for a second
// at most; on a cordoned gateway it first waits half a second for routers to prefer other gateways. Unchanged sessions
// stay up, and routes with changed attributes are replaced, never withdrawn. After an error, which may be desired.Faults,
// nothing has changed.
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

// converge makes s match want step by step, and records each step in s.have.
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
			s.have.peers[a] = wanted // evaluate applies the change of BFD
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

// convergeRoutes announces and withdraws routes until they match want.
func (s *Speaker) convergeRoutes(ctx context.Context, want *plan) error {
	var gone []netip.Addr
	for a := range s.have.routes {
		if _, ok := want.routes[a]; !ok {
			gone = append(gone, a)
		}
	}
	more := map[netip.Addr]attributes{}
	for a, attrs := range want.routes {
		if have, ok := s.have.routes[a]; !ok || !have.equal(attrs) {
			more[a] = attrs
		}
	}
	if err := s.restrict(ctx, want, gone); err != nil {
		return err
	}
	if err := s.server.announce(more); err != nil {
		return err
	}
	maps.Copy(s.have.routes, more)
	if want.cordoned {
		return s.shutdownRoutes(ctx, gone)
	}
	return s.withdraw(ctx, gone)
}

// restrict makes the export policy that of want, before any route is announced that not all peers may receive. Routes that are gone
// keep their peers until they are withdrawn.
func (s *Speaker) restrict(ctx context.Context, want *plan, gone []netip.Addr) error {
	only := maps.Clone(want.only)
	for _, a := range gone {
		if peers, has := s.have.only[a]; has {
			only[a] = peers
		}
	}
	if maps.EqualFunc(only, s.have.only, slices.Equal) {
		return nil
	}
	s.have.only = only
	return s.evaluate(ctx)
}

// addPeers starts the missing sessions.
func (s *Speaker) addPeers(ctx context.Context, want map[netip.Addr]neighbour) error {
	var missing []netip.Addr
	for a, n := range want {
		if _, ok := s.have.peers[a]; !ok {
			s.have.peers[a] = n
			s.sessions[a] = &session{since: time.Now(), restarted: s.restarting && n.restart > 0}
			missing = append(missing, a)
		}
	}
	// A peer that remembers the predecessor receives routes at once, so the export policy must be complete before.
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
		have.bfdFirst, have.held, have.addedHeld = bfdFirst, bfdFirst, bfdFirst
	}
	return nil
}

// start starts a server without sessions.
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
	s.have = &plan{id: id, peers: map[netip.Addr]neighbour{}, routes: map[netip.Addr]attributes{}}
	s.sessions, s.exports = map[netip.Addr]*session{}, map[netip.Addr]export{}
	go s.follow(following, server, events, s.followDone)
	return nil
}

// shut stops the server. With restart, peers may keep the routes.
func (s *Speaker) shut(ctx context.Context, restart bool) error {
	s.stop()
	err := s.server.stop(ctx, restart)
	s.server, s.have, s.sessions, s.exports = nil, nil, nil, nil
	return err
}

// withdraw removes routes and waits until the peers that had them received the withdrawal.
func (s *Speaker) withdraw(ctx context.Context, routes []netip.Addr) error {
	if len(routes) == 0 {
		return nil
	}
	sent, err := s.server.updates(ctx)
	if err != nil {
		return err
	}
	if err := s.server.withdraw(routes); err != nil {
		return err
	}
	for _, a := range routes {
		delete(s.have.routes, a)
	}
	for a := range sent {
		if !slices.ContainsFunc(routes, func(vip netip.Addr) bool { return s.announces(a, vip) }) {
			delete(sent, a)
		}
	}
	return s.awaitSent(ctx, sent)
}

// announces reports whether a peer receives the route to vip, if there is one.
func (s *Speaker) announces(peer, vip netip.Addr) bool {
	n := s.sessions[peer]
	return n != nil && n.established && s.have.receives(peer, vip) && s.exports[peer].nextHops[family(vip)].IsValid()
}

const (
	// sendTimeout is how long a peer may block sending. Its session ends by itself if that lasts longer.
	sendTimeout      = time.Second
	sendPollInterval = 5 * time.Millisecond
)

// awaitSent waits until each peer was sent more messages than before says, and then no further ones for one interval.
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
	s.log.Warn("a peer does not read its updates")
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

// convergenceWait is how long routers may take to apply an update: FRR 8.4 took 70 ms on a busy machine.
const convergenceWait = 500 * time.Millisecond

// Close stops the speaker. With drain, routers are first asked to prefer other gateways, then the routes are withdrawn,
// each with time to converge. Without drain, routers only see the connection close: with graceful restart they keep the
// routes for a successor.
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

// shutdownRoutes asks routers to prefer other gateways (RFC 8326), and withdraws the routes once they had time to
// converge.
func (s *Speaker) shutdownRoutes(ctx context.Context, routes []netip.Addr) error {
	if len(routes) == 0 {
		return nil
	}
	last := map[netip.Addr]attributes{}
	for _, a := range routes {
		attrs := s.have.routes[a]
		attrs.standard = append(slices.Clone(attrs.standard), gracefulShutdown)
		last[a] = attrs
	}
	if err := s.server.announce(last); err != nil {
		return err
	}
	if err := wait(ctx, convergenceWait); err != nil {
		return err
	}
	return s.withdraw(ctx, routes)
}

// Announced returns the VIPs that at least one peer receives now, sorted.
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

// Drift lists what keeps peers from receiving the applied routes. The speaker repairs sessions itself. A peer that gobgp
// refused to add again needs another Apply.
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

// peerFaults lists what is wrong with a peer.
func (s *Speaker) peerFaults(a netip.Addr) []string {
	n, have := s.have.peers[a], s.sessions[a]
	if have == nil {
		return []string{"no session: it could not be started again; see the log"}
	}
	if !have.established {
		return []string{have.downReason(n, s.have.id.asn)}
	}
	var all []string
	if n.bfd != noBFD && !have.bfdUp {
		all = append(all, "BFD is down: is BFD enabled for this gateway there, and UDP port 3784 open?")
	}
	var needed [2]bool
	for vip := range s.have.routes {
		needed[family(vip)] = needed[family(vip)] || s.have.receives(a, vip)
	}
	for i, hop := range s.exports[a].nextHops {
		if !needed[i] || hop.IsValid() || !have.announced {
			continue
		}
		if have.families[i] {
			all = append(all, fmt.Sprintf("this gateway has no %s address on the link to it, which routes need as their next hop: add one", familyNames[i]))
		} else {
			all = append(all, fmt.Sprintf("it accepts no %s routes: activate that address family for this gateway there", familyNames[i]))
		}
	}
	return all
}

var familyNames = [2]string{ipv4: "IPv4", ipv6: "IPv6"}
