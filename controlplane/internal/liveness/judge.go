package liveness

import (
	"context"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// silentVerdictsNeeded is how many Silent verdicts in a row prove a death: one may be lost packets.
const silentVerdictsNeeded = 2

// concurrentQueries bounds how many members are queried at the same time.
const concurrentQueries = 32

// ownLeaseTimeout is how long our own renewal may stay away before judging pauses: one renewal may be lost and the next
// one late.
func (t *Tracker) ownLeaseTimeout() time.Duration { return 5 * t.cfg.Times.Renew / 2 }

// ownLeaseSeen reports whether our own renewals come back. t.mu is held.
func (t *Tracker) ownLeaseSeen(now time.Time) bool {
	return !t.own.seenAt.IsZero() && now.Sub(t.own.seenAt) <= t.ownLeaseTimeout()
}

// renewedOwn records our own Lease, and judges if it is a renewal that came back.
func (t *Tracker) renewedOwn(renewTime, now time.Time) {
	present := t.present()
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.own.known
	if known && t.own.renewTime.Equal(renewTime) {
		return
	}
	t.own.known, t.own.renewTime = true, renewTime
	if !known {
		return // it may be old
	}
	if !t.ownLeaseSeen(now) {
		t.own.recoveredAt = now
		for _, m := range t.members {
			m.discountOutage(t.own.seenAt, now)
		}
	}
	t.own.seenAt = now
	t.flag(heartbeat, true)
	t.judge(present)
}

// present returns the members from which this cluster imports.
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

// discountOutage subtracts the time between from and to from a member's silence: for example, while the broker was away.
func (m *member) discountOutage(from, to time.Time) {
	moved := func(since time.Time) time.Time { return since.Add(to.Sub(later(from, since))) }
	m.silentSince = moved(m.silentSince)
	if !m.answeredAt.IsZero() {
		m.answeredAt = moved(m.answeredAt)
	}
	m.resetEvidence()
}

// resetEvidence discards the verdicts about a member's silence, and that of a query in flight.
func (m *member) resetEvidence() {
	m.askedAt, m.silentVerdicts, m.countedAt, m.provenAt = time.Time{}, 0, time.Time{}, time.Time{}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// judge updates the state of every member, at the moment t.own.seenAt at which our own renewal came back. t.mu is held.
func (t *Tracker) judge(present map[clusterset.ClusterID]bool) {
	now := t.own.seenAt
	for id, m := range t.members {
		if now.Sub(later(m.silentSince, t.own.recoveredAt)) < t.cfg.Times.Stale {
			continue
		}
		switch m.state {
		case Live:
			m.staleAt = now
			t.setState(id, m, Stale, now)
		case Unproven:
			t.setState(id, m, Dead, now)
		case Stale, Dead:
		}
	}
	if t.atMinimumLive(present) {
		return
	}
	// Every member is confirmed against the states before this judgement, in whatever order the map yields them.
	var dying []clusterset.ClusterID
	for id, m := range t.members {
		if m.state == Stale && t.expired(m, now) && t.confirmedSilent(id, m, present) {
			dying = append(dying, id)
		}
	}
	for _, id := range dying {
		m := t.members[id]
		m.deaths++
		t.setState(id, m, Dead, now)
	}
}

// expired reports whether nothing keeps a stale member alive any more. t.mu is held.
func (t *Tracker) expired(m *member, now time.Time) bool {
	if now.Sub(later(m.silentSince, t.own.recoveredAt)) < t.cfg.Times.Stale {
		return false
	}
	if m.leased && (t.cfg.Mode == Lease || m.silentVerdicts >= silentVerdictsNeeded || now.Sub(m.silentSince) >= t.cfg.Times.Frozen) {
		return true
	}
	return now.Sub(later(m.silentSince, m.answeredAt)) >= t.cfg.Times.HardTTL
}

// counts reports whether a member counts towards the minimum of live members. t.mu is held.
func (t *Tracker) counts(id clusterset.ClusterID, present map[clusterset.ClusterID]bool) bool {
	m := t.members[id]
	return m.leased && present[id] && (m.state == Live || m.state == Stale)
}

// confirmedSilent reports whether another member renewed after m became stale and evidence spoke against it, or no other
// member could. t.mu is held.
func (t *Tracker) confirmedSilent(id clusterset.ClusterID, m *member, present map[clusterset.ClusterID]bool) bool {
	since := later(m.staleAt, m.provenAt)
	needed := false
	for other, o := range t.members {
		if other == id || !o.leased {
			continue
		}
		if o.renewedAt.After(since) {
			return true
		}
		needed = needed || t.counts(other, present)
	}
	return !needed
}

// atMinimumLive reports whether several members count, all of them are stale, and no other member renews either. It logs
// each change. At the end, every silence starts anew. t.mu is held.
func (t *Tracker) atMinimumLive(present map[clusterset.ClusterID]bool) bool {
	counted, stale, renewing := 0, 0, 0
	for id, m := range t.members {
		if t.counts(id, present) {
			counted++
			if m.state == Stale {
				stale++
			}
		}
		if m.leased && (m.state == Live || m.state == Unproven) {
			renewing++
		}
	}
	was := t.atMinimum
	t.atMinimum = counted > 1 && stale == counted && renewing == 0
	t.flag(minimumLive, t.atMinimum)
	switch {
	case t.atMinimum && !was:
		t.cfg.Log.Error(ErrMinimumLive.Error(), "count", counted)
	case was && !t.atMinimum:
		t.cfg.Log.Info("another member renews its lease again; members are judged again")
		for _, m := range t.members {
			m.discountOutage(m.silentSince, t.own.seenAt)
		}
	}
	return t.atMinimum
}

// queryEvidence queries evidence about stale members until ctx ends.
func (t *Tracker) queryEvidence(ctx context.Context) {
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
		case <-t.newlyStale.C():
		}
		now := time.Now()
		t.ask(ctx, t.dueForEvidence(now), now)
		timer.Reset(t.untilNext(time.Now()))
	}
}

// dueForEvidence returns the stale members whose last query is ProbeEvery ago, and records that they are queried now.
func (t *Tracker) dueForEvidence(now time.Time) []clusterset.ClusterID {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.ownLeaseSeen(now) {
		return nil
	}
	var ids []clusterset.ClusterID
	for id, m := range t.members {
		if m.state == Stale && (m.askedAt.IsZero() || now.Sub(m.askedAt) >= t.cfg.Times.ProbeEvery) {
			m.askedAt = now
			ids = append(ids, id)
		}
	}
	return ids
}

// untilNext returns the time until the next query.
func (t *Tracker) untilNext(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := t.cfg.Times.ProbeEvery
	if !t.ownLeaseSeen(now) {
		return next
	}
	for _, m := range t.members {
		if m.state == Stale && !m.askedAt.IsZero() {
			next = min(next, max(m.askedAt.Add(t.cfg.Times.ProbeEvery).Sub(now), 0))
		}
	}
	return next
}

// ask queries evidence about several members, and returns when it has every verdict.
func (t *Tracker) ask(ctx context.Context, ids []clusterset.ClusterID, asked time.Time) {
	var asking sync.WaitGroup
	slots := make(chan struct{}, concurrentQueries)
	for _, id := range ids {
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			t.recordVerdict(id, t.cfg.Evidence.Answers(ctx, id), asked)
		})
	}
	asking.Wait()
}

// recordVerdict records the verdict of the query sent at asked. Two Silent verdicts count only if our own renewal came
// back between them; otherwise an outage on our side could cause both.
func (t *Tracker) recordVerdict(id clusterset.ClusterID, v Verdict, asked time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[id]
	if m == nil || m.state != Stale || !m.askedAt.Equal(asked) {
		return // it renewed since, or our own renewals were away
	}
	switch v {
	case Answering:
		m.resetEvidence()
		m.askedAt, m.answeredAt = asked, asked
	case Silent:
		if m.countedAt.Equal(t.own.seenAt) {
			return
		}
		m.countedAt = t.own.seenAt
		if m.silentVerdicts++; m.silentVerdicts == silentVerdictsNeeded {
			m.provenAt = asked
		}
	case Unknown:
		m.resetEvidence()
		m.askedAt = asked
	}
}
