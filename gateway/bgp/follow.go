package bgp

import (
	"context"
	"maps"
	"net/netip"
	"time"
)

const (
	// look is how often BFD is looked at while it is awaited; gobgp tells nobody.
	bfdPollInterval = 100 * time.Millisecond
	// lookAround is how often next hops are looked at.
	nextHopInterval = 5 * time.Second
)

// follow keeps what neighbours are told in step with their sessions, until ctx ends.
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

// changed acts on an event.
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
		s.log.Info("session is down", "peer", e.peer, "reason", e.reason)
		if err := s.redial(ctx, e.peer, n); err != nil {
			return err
		}
	}
	return s.evaluate(ctx)
}

// redial begins a session anew: gobgp would wait for five seconds before it dials one that ended.
func (s *Speaker) redial(ctx context.Context, a netip.Addr, n *session) error {
	if err := s.server.deletePeer(ctx, a); err != nil {
		return err
	}
	n.bfd, n.bfdFirst = noBFD, false
	if err := s.server.addPeer(ctx, a, s.have.peers[a], false, false); err != nil {
		delete(s.have.peers, a) // it is drift, and the next Apply adds it
		delete(s.sessions, a)
		return err
	}
	return nil
}

// evaluateIfAwaited evaluates when BFD or a time is awaited.
func (s *Speaker) evaluateIfWaiting(ctx context.Context) error {
	if !s.waits() {
		return nil
	}
	return s.evaluate(ctx)
}

// waits reports whether any session waits for BFD or a time.
func (s *Speaker) waits() bool {
	for a, n := range s.sessions {
		if n.waits(s.have.peers[a]) {
			return true
		}
	}
	return false
}

// evaluate decides who is told what now, and with whom BFD runs, and does it.
func (s *Speaker) evaluate(ctx context.Context) error {
	now := time.Now()
	up := s.server.bfdUp(ctx)
	told := map[netip.Addr][2]netip.Addr{}
	for a, have := range s.sessions {
		have.setBFDUp(up[a])
		if have.announced = have.mayAnnounce(s.have.peers[a], now); have.announced {
			told[a] = s.hopsFor(a, have)
		}
	}
	again, err := s.peersToRefresh(ctx, told)
	if err != nil {
		return err
	}
	if len(again) > 0 || !maps.Equal(told, s.nextHops) {
		if err := s.server.export(ctx, told, again); err != nil {
			return err
		}
		s.nextHops = told
	}
	if err := s.beginHeld(ctx, now); err != nil {
		return err
	}
	return s.evaluateBFD(ctx, now)
}

// begin lets sessions that are held begin, when it is time.
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

// changedFor returns the neighbours who must be told again because what they are told changes, or because their session
// is new: what changed while gobgp began it may not have been sent.
func (s *Speaker) peersToRefresh(ctx context.Context, told map[netip.Addr][2]netip.Addr) ([]netip.Addr, error) {
	var again, fresh []netip.Addr
	for a, have := range s.sessions {
		before, was := s.nextHops[a]
		now, is := told[a]
		switch {
		case have.unsynced:
			fresh = append(fresh, a)
		case have.established && (is != was || now != before):
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

// hops returns the next hops for a neighbour: none of a family that it does not take.
func (s *Speaker) hopsFor(a netip.Addr, have *session) [2]netip.Addr {
	hops, err := nextHops(a)
	if err != nil {
		s.log.Debug("next hops", "peer", a, "err", err)
		return s.nextHops[a] // the link is gone for now, as will be the session
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
		// Other times are a stop and, at the next look, a start.
		on = on && have.bfd == noBFD
		if err := s.server.setBFD(ctx, a, n, on, have.bfdFirst); err != nil {
			return err
		}
		have.bfd, have.bfdUp = noBFD, false
		if on {
			have.bfd = n.bfd
		}
	}
	return nil
}
