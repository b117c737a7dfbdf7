package bgp

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"
)

const (
	// bfdPollInterval is how often the state of BFD is read while a session waits for it; gobgp sends no event.
	bfdPollInterval = 100 * time.Millisecond
	// nextHopInterval is how often next hops are looked up again.
	nextHopInterval = 5 * time.Second
)

// follow keeps the export policy and BFD in step with the sessions, until ctx ends.
func (s *Speaker) follow(ctx context.Context, server *bgpServer, events <-chan event, done chan<- struct{}) {
	defer close(done)
	soon, later := time.NewTicker(bfdPollInterval), time.NewTicker(nextHopInterval)
	defer soon.Stop()
	defer later.Stop()
	for {
		do := s.evaluate
		select {
		case <-ctx.Done():
			return
		case e := <-events:
			do = func(ctx context.Context) error { return s.onEvent(ctx, e) }
		case <-soon.C:
			do = s.evaluateIfWaiting
		case <-later.C:
		}
		s.mu.Lock()
		if s.server == server {
			if err := do(ctx); err != nil && ctx.Err() == nil {
				s.log.Error("follow sessions", "err", err)
			}
		}
		s.mu.Unlock()
	}
}

// onEvent handles an event of a session.
func (s *Speaker) onEvent(ctx context.Context, e event) error {
	n := s.sessions[e.peer]
	if n == nil {
		return nil
	}
	before := n.established
	n.update(e.established, e.families, e.reason, time.Now())
	if n.established && !before {
		s.log.Info("session is up", "peer", e.peer)
	}
	if before && !n.established {
		if e.flooded {
			n.flooded = time.Now()
		}
		s.log.Info("session is down", "peer", e.peer, "reason", e.reason, "tooManyRoutes", e.flooded)
		if err := s.redial(ctx, e.peer, n); err != nil {
			return err
		}
	}
	return s.evaluate(ctx)
}

// redial restarts a session: gobgp would wait five seconds before it dials again. A peer that sent too many routes waits.
func (s *Speaker) redial(ctx context.Context, a netip.Addr, n *session) error {
	if err := s.server.deletePeer(ctx, a); err != nil {
		return err
	}
	wait := !n.flooded.IsZero()
	n.bfd, n.bfdFirst, n.held, n.addedHeld = noBFD, false, wait, wait
	if err := s.server.addPeer(ctx, a, s.have.peers[a], false, wait); err != nil {
		delete(s.have.peers, a) // reported as drift; the next Apply adds it again
		delete(s.sessions, a)
		return err
	}
	return nil
}

// evaluateIfWaiting calls evaluate if a session waits for BFD or for a point in time.
func (s *Speaker) evaluateIfWaiting(ctx context.Context) error {
	if !s.waits() {
		return nil
	}
	return s.evaluate(ctx)
}

// waits reports whether any session waits for BFD or for a point in time.
func (s *Speaker) waits() bool {
	for a, n := range s.sessions {
		if n.waits(s.have.peers[a]) {
			return true
		}
	}
	return false
}

// evaluate decides which peers receive routes and with which peers BFD runs, and applies both.
func (s *Speaker) evaluate(ctx context.Context) error {
	now := time.Now()
	up := s.server.bfdUp(ctx)
	exports := map[netip.Addr]export{}
	for a, have := range s.sessions {
		have.setBFDUp(up[a])
		if have.announced = have.mayAnnounce(s.have.peers[a], now); have.announced {
			exports[a] = export{s.hopsFor(a, have), s.withheldFrom(a)}
		}
	}
	again, err := s.peersToRefresh(ctx, exports)
	if err != nil {
		return err
	}
	if len(again) > 0 || !maps.EqualFunc(exports, s.exports, export.equal) {
		if err := s.server.export(ctx, exports, again); err != nil {
			return err
		}
		s.exports = exports
	}
	if err := s.beginHeld(ctx, now); err != nil {
		return err
	}
	return s.evaluateBFD(ctx, now)
}

// beginHeld starts held sessions that need not wait any longer.
func (s *Speaker) beginHeld(ctx context.Context, now time.Time) error {
	for a, have := range s.sessions {
		if !have.held || !have.mayBegin(s.have.peers[a], now) {
			continue
		}
		if err := s.server.beginSession(ctx, a); err != nil {
			return err
		}
		have.held = false
	}
	return nil
}

// changes reports whether a route is in one of two lists of withheld VIPs only, so that its peer gains or loses it.
func (s *Speaker) changes(before, now []netip.Addr) bool {
	for vip := range s.have.routes {
		_, was := slices.BinarySearchFunc(before, vip, netip.Addr.Compare)
		if _, is := slices.BinarySearchFunc(now, vip, netip.Addr.Compare); is != was {
			return true
		}
	}
	return false
}

// withheldFrom returns the VIPs whose routes a peer does not receive, sorted.
func (s *Speaker) withheldFrom(peer netip.Addr) (vips []netip.Addr) {
	for vip := range s.have.only {
		if !s.have.receives(peer, vip) {
			vips = append(vips, vip)
		}
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	return vips
}

// peersToRefresh returns the peers that need another export: theirs changed, or their session is new. gobgp may not have sent a
// change that was made while it set up the session.
func (s *Speaker) peersToRefresh(ctx context.Context, exports map[netip.Addr]export) ([]netip.Addr, error) {
	var again, fresh []netip.Addr
	for a, have := range s.sessions {
		before, was := s.exports[a]
		now, is := exports[a]
		switch {
		case have.unsynced:
			fresh = append(fresh, a)
		case have.established && (is != was || now.nextHops != before.nextHops || s.changes(before.withheld, now.withheld)):
			again = append(again, a)
		}
	}
	if len(fresh) == 0 {
		return again, nil
	}
	sends, err := s.server.established(ctx)
	if err != nil {
		return nil, err
	}
	for _, a := range fresh {
		if sends[a] {
			s.sessions[a].unsynced = false
			again = append(again, a)
		}
	}
	return again, nil
}

// hopsFor returns the next hops for a peer, without those of address families that it does not accept.
func (s *Speaker) hopsFor(a netip.Addr, have *session) [2]netip.Addr {
	hops, err := nextHops(a)
	if err != nil {
		s.log.Debug("next hops", "peer", a, "err", err)
		return s.exports[a].nextHops // the link is down for now, and soon the session
	}
	for i := range hops {
		if have.established && !have.families[i] {
			hops[i] = netip.Addr{}
		}
	}
	return hops
}

// evaluateBFD starts and stops BFD.
func (s *Speaker) evaluateBFD(ctx context.Context, now time.Time) error {
	for a, have := range s.sessions {
		n := s.have.peers[a]
		on := have.wantsBFD(n, now)
		if on == (have.bfd != noBFD) && (!on || have.bfd == n.bfd) {
			continue
		}
		// A change of timers is a stop, and a start at the next poll.
		on = on && have.bfd == noBFD
		if err := s.server.setBFD(ctx, a, n, on, have.addedHeld); err != nil {
			return err
		}
		have.bfd, have.bfdUp = noBFD, false
		if on {
			have.bfd = n.bfd
		}
	}
	return nil
}
