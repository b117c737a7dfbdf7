package withdrawal

import "time"

// source tracks what one member offers and has lost. The Guard's lock covers it.
type source[K comparable] struct {
	born    time.Time // of the first offer
	offered map[K]time.Time
	lost    map[K]loss
	count   [accepted + 1]int // of lost, by fate
	began   time.Time         // beginning of the open step; zero without one
	last    time.Time         // when a key last vanished
	notYet  time.Time         // the step is not judged before this time
	hold    *hold             // nil while no key is held
}

// loss describes a key that vanished without a tombstone.
type loss struct {
	fate  fate
	at    time.Time // when it vanished; once judged, when it was judged
	since time.Time // when it was first offered
}

type fate int

const (
	waiting  fate = iota // its step is open
	held                 // kept
	accepted             // gone, and remembered for Times.Memory
)

// hold describes the hold of a source.
type hold struct {
	of    int // the keys that the source had
	since time.Time
}

func newSource[K comparable](now time.Time) *source[K] {
	return &source[K]{born: now, offered: map[K]time.Time{}, lost: map[K]loss{}}
}

// offer records that a key is offered. A key that vanished and was kept counts as offered without a break.
func (s *source[K]) offer(key K, now time.Time) {
	if _, ok := s.offered[key]; ok {
		return
	}
	since := now
	if l, ok := s.lost[key]; ok && l.fate != accepted {
		since = l.since
	}
	s.drop(key)
	s.offered[key] = since
}

// withdraw records that a key was withdrawn, and reports whether it was kept until now.
func (s *source[K]) withdraw(key K) bool {
	l, ok := s.lost[key]
	s.drop(key)
	delete(s.offered, key)
	return ok && l.fate != accepted
}

// lose records that a key vanished, not to be judged before notYet, and reports whether this begins a step.
func (s *source[K]) lose(key K, now, notYet time.Time) bool {
	since, ok := s.offered[key]
	if !ok {
		return false
	}
	delete(s.offered, key)
	s.put(key, loss{fate: waiting, at: now, since: since})
	s.last = now
	if notYet.After(s.notYet) {
		s.notYet = notYet
	}
	if !s.began.IsZero() {
		return false
	}
	s.began = now
	return true
}

// established counts the offered keys that were offered a window before the step began, or within a window of the
// source's first offer. The package comment explains why.
func (s *source[K]) established(window time.Duration) int {
	before, young := s.began.Add(-window), s.born.Add(window)
	n := 0
	for _, since := range s.offered {
		if !since.After(before) || !since.After(young) {
			n++
		}
	}
	return n
}

// put and drop change lost and keep count current.
func (s *source[K]) put(key K, l loss) {
	s.drop(key)
	s.lost[key] = l
	s.count[l.fate]++
}

func (s *source[K]) drop(key K) {
	if l, ok := s.lost[key]; ok {
		s.count[l.fate]--
		delete(s.lost, key)
	}
}

// kept counts the lost keys that are not accepted as gone.
func (s *source[K]) kept() int { return s.count[waiting] + s.count[held] }

// turn moves losses from one fate to another, and returns how many.
func (s *source[K]) turn(from, to fate, now time.Time) int {
	n := s.count[from]
	for key, l := range s.lost {
		if l.fate == from {
			s.put(key, loss{fate: to, at: now, since: l.since})
		}
	}
	return n
}

// stepEnds returns when the open step is to be judged; zero without one.
func (s *source[K]) stepEnds(window time.Duration) time.Time {
	if s.began.IsZero() {
		return time.Time{}
	}
	end := s.last.Add(window)
	if latest := s.began.Add(maxStep * window); end.After(latest) {
		end = latest
	}
	if end.Before(s.notYet) {
		return s.notYet
	}
	return end
}

// due returns the time of the next judgement; zero means that the source has none pending.
func (s *source[K]) due(window, holdFor time.Duration) time.Time {
	next := s.stepEnds(window)
	for _, l := range s.lost {
		if end := l.at.Add(holdFor); l.fate == held && (next.IsZero() || end.Before(next)) {
			next = end
		}
	}
	return next
}
