package liveness

import (
	"context"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// enoughSilences is how many verdicts in a row must be Silent to be believed: one can be lost packets.
const enoughSilences = 2

// askedAtOnce bounds how many members evidence is asked about at the same time.
const askedAtOnce = 32

// sight is for how long our own heartbeat may stay away without anything being doubted: one renewal may be lost,
// and the next one late.
func (t *Tracker) sight() time.Duration { return 5 * t.cfg.Times.Renew / 2 }

// sighted reports whether our own heartbeat comes back. t.mu is held.
func (t *Tracker) sighted(now time.Time) bool {
	return !t.own.last.IsZero() && now.Sub(t.own.last) <= t.sight()
}

// beat takes in our own Lease, and judges if it is a renewal that came back.
func (t *Tracker) beat(renewTime, now time.Time) {
	present := t.present()
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.own.known
	if known && t.own.renewTime.Equal(renewTime) {
		return
	}
	t.own.known, t.own.renewTime = true, renewTime
	if !known {
		return // it may be of long ago
	}
	if !t.sighted(now) {
		t.own.fresh = now
		for _, m := range t.members {
			m.excuse(t.own.last, now)
		}
	}
	t.own.last = now
	flag(heartbeat, true)
	t.judge(present)
}

// present returns the members that are used here.
func (t *Tracker) present() map[clusterset.ClusterID]bool {
	t.mu.Lock()
	present := make(map[clusterset.ClusterID]bool, len(t.members))
	for id := range t.members {
		present[id] = true
	}
	t.mu.Unlock()
	for id := range present {
		present[id] = t.cfg.Present(id)
	}
	return present
}

// excuse takes the time from one moment to another out of a member's silence.
func (m *member) excuse(from, to time.Time) {
	excused := func(since time.Time) time.Time { return since.Add(to.Sub(later(from, since))) }
	m.silent = excused(m.silent)
	if !m.answered.IsZero() {
		m.answered = excused(m.answered)
	}
	m.hush()
}

// hush forgets what evidence said about a member's silence, and what it is being asked right now.
func (m *member) hush() {
	m.asked, m.silences, m.counted, m.convicted = time.Time{}, 0, time.Time{}, time.Time{}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// judge passes judgement on everybody, at the moment t.own.last at which our own heartbeat came back. t.mu is
// held.
func (t *Tracker) judge(present map[clusterset.ClusterID]bool) {
	now := t.own.last
	for id, m := range t.members {
		if now.Sub(later(m.silent, t.own.fresh)) < t.cfg.Times.Stale {
			continue
		}
		switch m.state {
		case Live:
			m.staleAt = now
			t.become(id, m, Stale, now)
		case Unproven:
			t.become(id, m, Dead, now)
		case Stale, Dead:
		}
	}
	if t.onFloor(present) {
		return
	}
	// All are judged by the same witnesses, whoever comes first.
	var dying []clusterset.ClusterID
	for id, m := range t.members {
		if m.state == Stale && t.expired(m, now) && t.witnessed(id, m, present) {
			dying = append(dying, id)
		}
	}
	for _, id := range dying {
		m := t.members[id]
		m.deaths++
		t.become(id, m, Dead, now)
	}
}

// expired reports whether all that keeps a stale member alive is over. t.mu is held.
func (t *Tracker) expired(m *member, now time.Time) bool {
	if now.Sub(later(m.silent, t.own.fresh)) < t.cfg.Times.Stale {
		return false
	}
	if m.leased && (t.cfg.Mode == Lease || m.silences >= enoughSilences || now.Sub(m.silent) >= t.cfg.Times.Frozen) {
		return true
	}
	return now.Sub(later(m.silent, m.answered)) >= t.cfg.Times.HardTTL
}

// counts reports whether a member is one of those that the floor is about. t.mu is held.
func (t *Tracker) counts(id clusterset.ClusterID, present map[clusterset.ClusterID]bool) bool {
	m := t.members[id]
	return m.leased && present[id] && (m.state == Live || m.state == Stale)
}

// witnessed reports whether somebody was heard after m had become stale and evidence had spoken, or nobody could
// have been. t.mu is held.
func (t *Tracker) witnessed(id clusterset.ClusterID, m *member, present map[clusterset.ClusterID]bool) bool {
	alone := later(m.staleAt, m.convicted)
	needed := false
	for other, o := range t.members {
		if other == id || !o.leased {
			continue
		}
		if o.heard.After(alone) {
			return true
		}
		needed = needed || t.counts(other, present)
	}
	return !needed
}

// onFloor reports whether everybody who counts is stale, there are several of them, and nobody else is heard
// either, and says so when that changes. Whoever was on the floor begins with a new silence. t.mu is held.
func (t *Tracker) onFloor(present map[clusterset.ClusterID]bool) bool {
	counted, stale, heard := 0, 0, 0
	for id, m := range t.members {
		if t.counts(id, present) {
			counted++
			if m.state == Stale {
				stale++
			}
		}
		if m.leased && (m.state == Live || m.state == Unproven) {
			heard++
		}
	}
	was := t.floored
	t.floored = counted > 1 && stale == counted && heard == 0
	flag(floor, t.floored)
	switch {
	case t.floored && !was:
		t.cfg.Log.Error(ErrFloor.Error(), "count", counted)
	case was && !t.floored:
		t.cfg.Log.Info("not all other members seem to be gone any more; they are judged again")
		for _, m := range t.members {
			m.excuse(m.silent, t.own.last)
		}
	}
	return t.floored
}

// investigate asks for evidence about stale members.
func (t *Tracker) investigate(ctx context.Context) {
	if t.cfg.Mode == Lease || t.cfg.Evidence == nil {
		return
	}
	timer := time.NewTimer(t.cfg.Times.ProbeEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-t.suspect:
		}
		now := time.Now()
		t.ask(ctx, t.suspects(now), now)
		timer.Reset(t.untilNext(time.Now()))
	}
}

// suspects returns the stale members that have not been asked about for long enough, and notes that they are
// now.
func (t *Tracker) suspects(now time.Time) []clusterset.ClusterID {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.sighted(now) {
		return nil
	}
	var ids []clusterset.ClusterID
	for id, m := range t.members {
		if m.state == Stale && (m.asked.IsZero() || now.Sub(m.asked) >= t.cfg.Times.ProbeEvery) {
			m.asked = now
			ids = append(ids, id)
		}
	}
	return ids
}

// untilNext returns when the next member is to be asked about.
func (t *Tracker) untilNext(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := t.cfg.Times.ProbeEvery
	if !t.sighted(now) {
		return next
	}
	for _, m := range t.members {
		if m.state == Stale && !m.asked.IsZero() {
			next = min(next, max(m.asked.Add(t.cfg.Times.ProbeEvery).Sub(now), 0))
		}
	}
	return next
}

// ask asks for evidence about several members, and returns when all verdicts are there.
func (t *Tracker) ask(ctx context.Context, ids []clusterset.ClusterID, asked time.Time) {
	var asking sync.WaitGroup
	slots := make(chan struct{}, askedAtOnce)
	for _, id := range ids {
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			t.weigh(id, t.cfg.Evidence.Answers(ctx, id), asked)
		})
	}
	asking.Wait()
}

// weigh takes in a verdict that was asked for at asked. Between two silences that count our own heartbeat comes
// back, and once more before the second one counts: else both may be a silence of our own.
func (t *Tracker) weigh(id clusterset.ClusterID, v Verdict, asked time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[id]
	if m == nil || m.state != Stale || !m.asked.Equal(asked) {
		return // it was heard since, or nobody could have been
	}
	switch v {
	case Answering:
		m.hush()
		m.asked, m.answered = asked, asked
	case Silent:
		if m.counted.Equal(t.own.last) {
			return
		}
		m.counted = t.own.last
		if m.silences++; m.silences == enoughSilences {
			m.convicted = asked
		}
	case Unknown:
		m.hush()
		m.asked = asked
	}
}
